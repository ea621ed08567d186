//! `vpmu doctor`: what this machine can do, line by line.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;

use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::host::tool::{SETPRIV, Tool};
use vpmu_lab::image::cache::Cache;
use vpmu_lab::image::debian::{self, Pool, RELEASE, Selection, apt, sources};
use vpmu_lab::image::{artifacts, images, module};
use vpmu_lab::spec::arch::Arch;
use vpmu_lab::{Error, Result};

use crate::print::print;

/// The first QEMU with all that guests need (on Arm, FEAT_FGT).
const OLDEST_QEMU: u32 = 8;
/// Packages, guest images and the files of five runs at once, MiB.
const DISK_MIB: u64 = 2500;
/// Two KVM hosts with their guests and QEMU's own, MiB.
const MEMORY_MIB: u64 = 5000;

/// One line: what was checked, what was found, what to do.
struct Line {
    verdict: Verdict,
    subject: &'static str,
    found: String,
    fix: String,
}

#[derive(PartialEq, strum::Display)]
#[strum(serialize_all = "lowercase")]
enum Verdict {
    Ok,
    /// Something works less well, or not at all, but guests run.
    Note,
    Missing,
}

pub(crate) fn doctor(arch: Arch, folder: Option<&Path>) -> Result<ExitCode> {
    let chosen = Qemu::chosen(folder);
    let mut lines = vec![
        qemu(arch, &chosen),
        tool(&SETPRIV),
        tool(&sources::APT_GET),
        tool(&debian::DPKG_DEB),
        keyring(),
        mirror(),
        cache(),
        disk(),
        guests(arch),
        artifact(arch, artifacts::METER),
        artifact(arch, artifacts::WORKLOAD),
        artifact(arch, artifacts::KVM_HOST),
    ];
    match arch {
        Arch::Aarch64 => lines.push(artifact(arch, artifacts::MONITOR)),
        Arch::X86_64 => lines.extend([
            beside(artifacts::VMM),
            optional(beside(artifacts::REPROGRAM)),
            // For `bench deadline`.
            optional(tool(&module::COMPILER)),
            optional(tool(&module::MAKE)),
        ]),
    }
    lines.extend([cores(), memory(), kvm(arch), perf(arch)]);
    if arch == Arch::X86_64 {
        lines.extend(backing(arch, &chosen));
        lines.extend(arch.has_hardware_kvm().then(whose_pmu));
    }
    let complete = lines.iter().all(|line| line.verdict != Verdict::Missing);
    let mut text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    if complete {
        text += &format!("\n{arch} guests run on this machine\n");
        let other = match arch {
            Arch::Aarch64 => Arch::X86_64,
            Arch::X86_64 => Arch::Aarch64,
        };
        text += &format!("for {other} guests: vpmu doctor --arch {other}\n");
    } else {
        text += "\nsomething needed is missing: see the lines marked \"missing\"\n";
    }
    print(&text)?;
    Ok(ExitCode::from(u8::from(!complete)))
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8} {:18} {}", self.verdict, self.subject, self.found)?;
        if self.verdict != Verdict::Ok && !self.fix.is_empty() {
            write!(f, "\n{:8} {:18} -> {}", "", "", self.fix)?;
        }
        Ok(())
    }
}

impl Line {
    fn new(verdict: Verdict, subject: &'static str, found: impl Into<String>) -> Self {
        Self {
            verdict,
            subject,
            found: found.into(),
            fix: String::new(),
        }
    }

    /// Says what to do. What is good needs none.
    fn fix(self, fix: impl Into<String>) -> Self {
        Self {
            fix: fix.into(),
            ..self
        }
    }
}

fn ok(subject: &'static str, found: impl Into<String>) -> Line {
    Line::new(Verdict::Ok, subject, found)
}

fn note(subject: &'static str, found: impl Into<String>) -> Line {
    Line::new(Verdict::Note, subject, found)
}

fn missing(subject: &'static str, found: impl Into<String>) -> Line {
    Line::new(Verdict::Missing, subject, found)
}

/// What is good, or else a note.
fn noted(is_good: bool, subject: &'static str, found: impl Into<String>) -> Line {
    match is_good {
        true => ok(subject, found),
        false => note(subject, found),
    }
}

fn qemu(arch: Arch, qemu: &Qemu) -> Line {
    let tool = arch.qemu();
    let program = tool.program;
    let fix = format!(
        "{} (Debian 13; on Debian 12 from bookworm-backports: with -t bookworm-backports)",
        tool.fix
    );
    let version = match qemu.version(&tool) {
        Ok(version) => version,
        Err(Error::MissingProgram { program: at, .. }) if at == program => {
            return missing(program, "not installed").fix(fix);
        }
        Err(error) => return missing(program, error.to_string()),
    };
    let found = format!("version {version}");
    if version.major() >= OLDEST_QEMU {
        ok(program, found)
    } else {
        let found = format!("{found}, {OLDEST_QEMU}.0 or newer is needed");
        missing(program, found).fix(fix)
    }
}

fn tool(tool: &Tool) -> Line {
    match tool.is_installed() {
        true => ok(tool.program, "installed"),
        false => missing(tool.program, "not installed").fix(tool.fix),
    }
}

fn keyring() -> Line {
    let subject = "Debian's keys";
    match Path::new(apt::KEYRING).exists() {
        true => ok(subject, apt::KEYRING),
        false => missing(subject, "not installed").fix(apt::KEYRING_FIX),
    }
}

fn mirror() -> Line {
    let subject = "Debian mirror";
    match sources::mirror() {
        Some(mirror) => ok(subject, mirror),
        None => missing(subject, "none among this machine's apt sources")
            .fix(format!("export {}=ADDRESS", sources::MIRROR_VARIABLE)),
    }
}

fn cache() -> Line {
    match Cache::open().and_then(|cache| cache.run_dir().map(|_| cache)) {
        Ok(cache) => ok("cache folder", cache.root.display().to_string()),
        Err(error) => missing("cache folder", error.to_string())
            .fix("point XDG_CACHE_HOME to a folder you can write"),
    }
}

fn disk() -> Line {
    let subject = "disk space";
    let cache = Cache::open().ok();
    let Some(disk) = cache.and_then(|cache| rustix::fs::statvfs(&cache.root).ok()) else {
        return note(subject, "unknown");
    };
    let free = (disk.f_bavail * disk.f_frsize) >> 20;
    if free >= DISK_MIB {
        return ok(subject, format!("{free} MiB free"));
    }
    let found = format!("{free} MiB free, guests want {DISK_MIB} MiB");
    note(subject, found).fix("free some, or move the cache with XDG_CACHE_HOME")
}

fn guests(arch: Arch) -> Line {
    let subject = "guest images";
    let Ok(cache) = Cache::open() else {
        return note(subject, "no cache folder");
    };
    if let Some(images) = images::Images::ready(&cache, arch) {
        let release = images.kernel_release();
        return ok(
            subject,
            format!("ready, offline too (Debian kernel {release})"),
        );
    }
    if Pool::fetched(&cache, &Selection::guests(arch)).is_some() {
        return ok(subject, "downloaded, built at first use");
    }
    let found = format!("Debian {RELEASE} is downloaded at first use (170 MB)");
    note(subject, found).fix(format!("fetch now: vpmu run --arch {arch} -- true"))
}

fn artifact(arch: Arch, file: &'static str) -> Line {
    found(file, artifacts::find(arch, file))
}

fn beside(file: &'static str) -> Line {
    found(file, artifacts::find_beside(file))
}

/// Something that one bench alone needs.
fn optional(line: Line) -> Line {
    let verdict = match line.verdict {
        Verdict::Missing => Verdict::Note,
        verdict => verdict,
    };
    Line { verdict, ..line }
}

fn found(file: &'static str, path: Result<PathBuf>) -> Line {
    match path {
        Ok(path) => ok(file, path.display().to_string()),
        Err(error) => missing(file, error.to_string()),
    }
}

fn cores() -> Line {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    ok(
        "processors",
        format!("{cores}, so many designs run at once"),
    )
}

fn kvm(arch: Arch) -> Line {
    let subject = "/dev/kvm";
    let open = fs::OpenOptions::new().read(true).write(true).open(subject);
    let is_usable = open.is_ok() && (arch == Arch::Aarch64 || arch.has_hardware_kvm());
    let state = match &open {
        Ok(_) if is_usable => "usable".to_owned(),
        Ok(_) => "a KVM in software, which stock kernels do not run in".to_owned(),
        Err(error) => error.to_string(),
    };
    let found = match arch {
        Arch::Aarch64 => format!("{state} (aarch64 guests do not need it)"),
        Arch::X86_64 if is_usable => format!("{state}: --pmu emulated runs in it, in real time"),
        Arch::X86_64 => format!("{state}; an emulated host is used"),
    };
    noted(is_usable, subject, found)
}

/// Says which PMU a guest of this machine's own KVM is best given, by what was measured (docs/use/whose-pmu.md).
fn whose_pmu() -> Line {
    let is_on = |name: &str| {
        ["kvm", "kvm_amd", "kvm_intel"].iter().any(|module| {
            let file = format!("/sys/module/{module}/parameters/{name}");
            fs::read_to_string(file).is_ok_and(|value| matches!(value.trim(), "Y" | "1"))
        })
    };
    let found = match (is_on("enable_mediated_pmu"), is_on("enable_pmu")) {
        (true, _) => {
            "KVM's mediated PMU (9 us a sample in the lab); ours for PEBS, last branches and a host that profiles"
        }
        (false, true) => {
            "KVM's own emulated PMU for stock perf (26 us a sample in the lab, ours 34); ours for PEBS (5), last \
             branches, a driver in the guest (4), and guests that move between hosts"
        }
        (false, false) => "ours: this machine's KVM has none",
    };
    ok("whose PMU", found)
}

fn memory() -> Line {
    let subject = "memory";
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let mut lines = text.lines();
        let kib = lines.find_map(|line| line.strip_prefix("MemAvailable:"))?;
        kib.split_whitespace().next()?.parse::<u64>().ok()
    });
    let Some(mib) = available.map(|kib| kib / 1024) else {
        return note(subject, "unknown");
    };
    let found = format!("{mib} MiB available");
    let fix = format!("compare takes up to {MEMORY_MIB}: close something, or give --memory 512M");
    noted(mib >= MEMORY_MIB, subject, found).fix(fix)
}

/// What counts for a guest's counters, whether the kernel can sample guests for `--pebs ring`, and whether records are
/// precise, as the program says that measures perf events.
fn backing(arch: Arch, qemu: &Qemu) -> [Line; 3] {
    let subject = "counter backing";
    let fix =
        "cycles work; instructions and branches only with --vmm-arg --approximate-instructions";
    let own = artifacts::find_beside(artifacts::REPROGRAM)
        .ok()
        .and_then(|program| Command::new(program).arg("--probe").output().ok());
    let (own, error) = own.map_or_else(Default::default, |output| {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        (text(&output.stdout), text(&output.stderr))
    });
    let mut facts = own.lines();
    let mut fact = || facts.next().unwrap_or("unknown");
    let (own, sampled, counters, mediated) = (fact(), fact(), fact(), fact());
    let emulated = !arch.has_hardware_kvm();
    let has_counters = emulated && qemu.has_x86_pmu();
    let itself = format!("(on this machine itself: {own})");
    let counts = match own {
        _ if has_counters => ok(
            subject,
            format!("hardware: the emulated host's PMU {itself}"),
        ),
        _ if emulated => note(
            subject,
            format!("clock, as the emulated host has no PMU {itself}"),
        )
        .fix(format!(
            "script/qemu builds a QEMU whose host has; with a clock, {fix}"
        )),
        "hardware" if Path::new("/sys/bus/event_source/devices/cpu_atom").exists() => note(
            subject,
            "hardware: this machine's PMU, but nothing while a vCPU's thread is on an E-core",
        )
        .fix("taskset -c $(cat /sys/devices/cpu_core/cpus) vpmu ..."),
        "hardware" if mediated == "mediated" => note(
            subject,
            "hardware: this machine's PMU, which another VM has for itself now (mediated vPMU)",
        )
        .fix(
            "counters are lost until that VM ends; its KVM gives it up with enable_mediated_pmu=0",
        ),
        "hardware" => ok(
            subject,
            format!("hardware: this machine's PMU, {counters} counters that nobody has pinned"),
        ),
        "clock" => note(
            subject,
            "clock: this machine has no hardware PMU for perf events",
        )
        .fix(fix),
        _ => note(subject, format!("unknown: {error}")),
    };
    [
        counts,
        buffer(emulated, sampled),
        records(match (emulated, has_counters) {
            (true, true) => "hardware",
            (true, false) => "clock",
            _ => own,
        }),
    ]
}

/// Whether the kernel can sample guests.
fn buffer(emulated: bool, sampled: &str) -> Line {
    let (found, fix) = match sampled {
        _ if emulated => ("the emulated host's kernel samples guests", ""),
        "sampled" => ("this machine's kernel samples guests", ""),
        reason => (reason, "--pebs exit asks less of a kernel"),
    };
    noted(fix.is_empty(), "PEBS by the ring buffer", found).fix(fix)
}

/// Whether the records of a guest's PEBS are where its events were.
fn records(backing: &str) -> Line {
    let subject = "PEBS records";
    match backing {
        "clock" => ok(subject, "without skid, as a clock counts"),
        "hardware" => note(
            subject,
            "some instructions late, as KVM lets no host event of a guest be precise: not offered",
        )
        .fix("--vmm-arg=--pebs-skid offers them so; with --backing clock they have no skid"),
        _ => note(subject, "unknown"),
    }
}

fn perf(arch: Arch) -> Line {
    let subject = "perf events";
    let needs = match arch {
        Arch::X86_64 if arch.has_hardware_kvm() => "the guest's counters are backed by them",
        _ => "guests do not need them here, vpmu bench reprogram does",
    };
    match fs::read_to_string("/proc/sys/kernel/perf_event_paranoid") {
        Ok(text) => {
            let level = text.trim();
            let found = format!("perf_event_paranoid is {level} ({needs})");
            let allowed = level.parse::<i32>().is_ok_and(|level| level < 2);
            let allowed = allowed || rustix::process::geteuid().is_root();
            noted(allowed, subject, found).fix("as root: sysctl kernel.perf_event_paranoid=1")
        }
        Err(_) => note(subject, format!("this kernel has none ({needs})")),
    }
}
