//! `vpmu exec`: becomes a VMM that nobody changes, with the library before the C library's functions.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};

use clap::Args;
use clap::builder::PossibleValue;
use vpmu_lab::image::{artifacts, elf};
use vpmu_lab::spec::design::{Freeze, Model, Policy};
use vpmu_lab::{Error, Result, usage};

use crate::values::choice;

pub(crate) const AFTER: &str = "\
Examples:
  vpmu exec -- qemu-system-x86_64 -accel kvm -cpu host -m 2G disk.qcow2
  vpmu exec --pmu intel -- qemu-system-x86_64 -M q35,accel=kvm -cpu host -smp 4 -sandbox on ...
  vpmu exec -- lkvm run -k bzImage -d disk.img

The program is not changed: a library that is loaded before its own takes its calls of KVM, gives each vCPU a PMU made of \
this host's perf events, and leaves the rest to the program. perf in the guest works, whatever the guest boots. With an AMD \
PMU the guest keeps its processor; with Intel's on an AMD host its processor becomes Intel's.

Needs: /dev/kvm; CAP_PERFMON, or kernel.perf_event_paranoid of 1 or less; QEMU with -accel kvm (or -enable-kvm).

Not reached: static programs, those that call the kernel past the C library, and those that run with more rights than \
their user (setuid, file capabilities): they are refused. QEMU's -sandbox on works; a stricter seccomp filter must allow \
what docs/embed/seccomp.md lists. Migration, savevm and libvirt's managed save are refused by QEMU, which would lose the PMU's \
state. Children of the program are not reached. More in docs/use/qemu-pmu.md.

Exit status: the program's own; 125 when vpmu refuses or fails, 2 for a wrong command line.";

/// Programs that were tried.
const KNOWN: [&str; 2] = ["qemu-system-", "lkvm"];
const SETUID_OR_SETGID: u32 = 0o6000;
const LOADER: &str = "ld-linux-x86-64.so.2";

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Whose PMU the guest has, and so whose processor
    ///
    /// auto: AMD's on AMD's processors, else Intel's. amd: the core extension, six counters. amd-v2: PerfMonV2, the same with
    /// global registers.
    #[arg(long, value_name = "PMU", default_value = "auto", value_parser = choice::<Model>())]
    pmu: Model,
    /// The version of Intel's architectural performance monitoring, 2 to 5, and with it Intel's PMU
    ///
    /// With Intel's PMU, the default is 5.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=5))]
    perfmon: Option<u8>,
    /// What counts for the guest
    #[arg(long, default_value = "auto", value_parser = [
        PossibleValue::new("auto").help("The processor's counters where perf has them, else the time of the vCPU's thread"),
        PossibleValue::new("hardware").help("The processor's counters, and nothing else"),
        PossibleValue::new("clock").help("The time of the vCPU's thread: cycles only"),
    ])]
    backing: String,
    /// Offer instructions and branches even where only time can be counted: one per cycle
    #[arg(long)]
    approximate_instructions: bool,
    /// Which time counts where a clock does
    ///
    /// vm: the guest's, and the host's while it completes the guest's exits. guest: the guest's alone.
    #[arg(long, value_name = "FREEZE", default_value = "vm", value_parser = choice::<Freeze>())]
    freeze: Freeze,
    /// When host events are made and given back
    ///
    /// recreate: a new host event for each overflow and each rewrite. reuse: the host event is kept. paused: as reuse, and a
    /// paused event is left alone.
    #[arg(long, value_name = "POLICY", default_value = "paused", value_parser = choice::<Policy>())]
    policy: Policy,
    /// Let the guest measure (it writes 1 to port 0x5650, and 2 at the end), and append what the PMU has cost to this file;
    /// - is standard output
    #[arg(long, value_name = "FILE")]
    statistics: Option<PathBuf>,
    /// Try programs that nobody has tried
    #[arg(long)]
    any: bool,
    /// The VMM and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    command: Vec<OsString>,
}

/// Refuses a program, with the way out.
fn refuse<T>(program: &Path, problem: impl Into<String>) -> Result<T> {
    Err(Error::format(program, problem))
}

/// Becomes the program, or says why not.
pub(crate) fn exec(options: &Exec) -> Result<ExitCode> {
    let Some((name, arguments)) = options.command.split_first() else {
        return usage("nothing to run: give a program after --");
    };
    if options.perfmon.is_some() && matches!(options.pmu, Model::Amd | Model::AmdV2) {
        return usage("--perfmon is about Intel's PMU: leave --pmu out, or give --pmu intel");
    }
    let program = find(name)?;
    let known = KNOWN.iter().any(|known| is_named(&program, known));
    if !known && !options.any {
        return refuse(
            &program,
            "neither QEMU (qemu-system-x86_64) nor kvmtool (lkvm), and what other programs do with KVM was not tried: \
             --any tries",
        );
    }
    check_program(&program)?;
    let mut becomes = process::Command::new(&program);
    becomes.arg0(name).args(arguments);
    let is_qemu = is_named(&program, KNOWN[0]);
    // libvirt asks each emulator so, with all capabilities taken away, and rejects those that do not answer.
    if !(is_qemu && has_no_guest(arguments)) {
        if is_qemu {
            check_qemu(&program, arguments)?;
        }
        check_kvm()?;
        let library = artifacts::find_preload()?;
        becomes
            .env("LD_PRELOAD", preload(&library)?)
            .env("VPMU_EXEC", options.words());
    }
    Err(Error::file("run", &program)(becomes.exec()))
}

/// Returns whether QEMU is started to be asked for its abilities only: its machine is `none`, or it prints and ends.
fn has_no_guest(arguments: &[OsString]) -> bool {
    let is_machine = ["-machine", "--machine", "-M", "--M"];
    let is_none =
        |word: &OsStr| word.as_bytes().split(|byte| *byte == b',').next() == Some(b"none");
    let has_none = arguments
        .windows(2)
        .any(|words| is_one(&words[0], &is_machine) && is_none(&words[1]));
    let asks = ["-version", "--version", "-h", "-help", "--help"];
    has_none || arguments.iter().any(|word| is_one(word, &asks))
}

fn is_one(word: &OsStr, names: &[&str]) -> bool {
    names.iter().any(|name| word == *name)
}

/// Returns whether a program's name begins so.
fn is_named(program: &Path, beginning: &str) -> bool {
    let name = program.file_name().unwrap_or_default().as_bytes();
    name.starts_with(beginning.as_bytes())
}

/// Finds a program as a shell does.
fn find(name: &OsStr) -> Result<PathBuf> {
    let is_file = |path: &Path| fs::metadata(path).is_ok_and(|about| about.is_file());
    let is_program = |path: &Path| {
        fs::metadata(path).is_ok_and(|about| about.is_file() && about.mode() & 0o111 != 0)
    };
    let path = Path::new(name);
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = match path.components().nth(1) {
        Some(_) => Some(path.to_owned()),
        None => env::split_paths(&folders)
            .map(|folder| folder.join(path))
            .find(|path| is_program(path)),
    };
    match found {
        Some(path) if is_program(&path) => Ok(path),
        Some(path) if is_file(&path) => refuse(
            &path,
            "no user may execute this file: chmod +x, or give another program",
        ),
        _ => refuse(path, "is no program here: install it, or give its path"),
    }
}

/// Checks that the dynamic linker loads LD_PRELOAD into this program.
fn check_program(program: &Path) -> Result<()> {
    let data = fs::read(program).map_err(Error::file("read", program))?;
    if data.starts_with(b"#!") {
        return refuse(
            program,
            "is a script, whose interpreter the library would be loaded into: give the program that it starts",
        );
    }
    let needed = elf::needed(program)?;
    match &needed.interpreter {
        None => {
            return refuse(
                program,
                "is linked statically, so that no library can be put before its calls: use one that is not (Debian's \
                 QEMU; `make lkvm` for kvmtool)",
            );
        }
        Some(loader) if !loader.ends_with(LOADER) => {
            return refuse(
                program,
                format!(
                    "is for {loader}, not for x86-64's GNU C library, which this library is for: use Debian's"
                ),
            );
        }
        Some(_) => {}
    }
    let mode = fs::metadata(program)
        .map_err(Error::file("read", program))?
        .mode();
    let mut room = [0_u8; 64];
    let has_capabilities =
        rustix::fs::getxattr(program, "security.capability", &mut room[..]).is_ok();
    if mode & SETUID_OR_SETGID != 0 || has_capabilities {
        return refuse(
            program,
            "runs with more rights than its user (setuid, or file capabilities), so that the dynamic linker ignores \
             LD_PRELOAD: copy it, and give the rights to the process (setpriv --ambient-caps)",
        );
    }
    Ok(())
}

/// Checks QEMU's words for what cannot work.
fn check_qemu(program: &Path, arguments: &[OsString]) -> Result<()> {
    let saved = ["-incoming", "--incoming", "-loadvm", "--loadvm"];
    if arguments.iter().any(|word| is_one(word, &saved)) {
        return refuse(
            program,
            "a guest that was saved, or comes from elsewhere, has no state of this PMU: leave -incoming and -loadvm \
             out",
        );
    }
    Ok(())
}

fn check_kvm() -> Result<()> {
    let device = "/dev/kvm";
    let Err(error) = OpenOptions::new().read(true).write(true).open(device) else {
        return Ok(());
    };
    let way = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "join the group kvm (adduser $USER kvm), and log in again"
        }
        _ => {
            "load kvm_intel or kvm_amd, enable virtualisation in the firmware, or nested virtualisation in the \
             cloud"
        }
    };
    refuse(Path::new(device), format!("{error}; {way}"))
}

/// Returns the list of the dynamic linker with the library before the user's own.
fn preload(library: &Path) -> Result<OsString> {
    let separates = |byte: &u8| matches!(byte, b' ' | b':');
    if library.as_os_str().as_bytes().iter().any(separates) {
        return refuse(
            library,
            "the dynamic linker takes no path with a space or a colon: move vpmu",
        );
    }
    let mut list = library.as_os_str().to_owned();
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        list.push(":");
        list.push(others);
    }
    Ok(list)
}

impl Exec {
    /// Returns the choices as the library reads them.
    fn words(&self) -> OsString {
        let mut words = OsString::from(format!(
            "pmu={} backing={} policy={} freeze={}",
            self.pmu.name(),
            self.backing,
            self.policy.name(),
            self.freeze.name()
        ));
        if let Some(version) = self.perfmon {
            words.push(format!(" perfmon={version}"));
        }
        if self.approximate_instructions {
            words.push(" approximate");
        }
        if let Some(file) = &self.statistics {
            words.push(" measure=");
            words.push(file);
        }
        words
    }
}
