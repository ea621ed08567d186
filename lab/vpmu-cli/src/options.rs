//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ArgPredicate;
use clap::{Args, Parser, Subcommand};
use itertools::Itertools;
use vpmu_lab::host::files::{check_writable, write_json, write_whole};
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::report::page;
use vpmu_lab::report::result::{Results, Run};
use vpmu_lab::spec::arch::Arch;
use vpmu_lab::spec::command::Command;
use vpmu_lab::spec::design::{Design, Pmu, Policy};
use vpmu_lab::spec::disk::Disk;
use vpmu_lab::spec::{Machine, Request, Spec};
use vpmu_lab::{Result, run, usage};

use crate::bench::Bench;
use crate::exec;
use crate::monitor::Monitor;
use crate::offer::Offer;
use crate::values::{choice, memory, seconds};
use crate::vmm::Vmm;

const AFTER: &str = "\
Examples:
  vpmu doctor
  vpmu run -- uname -a
  vpmu run --pmu partitioned -- perf stat -e cycles:u,instructions:u workload
  vpmu run --arch x86_64 --pmu emulated -- perf stat workload
  vpmu run --arch x86_64 --pmu kvm --disk uefi -- uname -a
  vpmu compare -- 'perf record --no-bpf-event -F 1000 -e cycles gzip -c random.bin > /dev/null'
  vpmu run --kernel ./Image --append 'console=ttyAMA0' --initrd ./initrd

In the guest: perf, gzip, busybox, stress-ng, and workload (functions of known weight). The
command starts as root in /root, where random.bin holds 4 MiB of random data. A perf.data left
there is counted.

Environment: XDG_CACHE_HOME moves the cache (~/.cache); VPMU_DEBIAN_MIRROR is where packages come
from (the mirror of this machine's apt); VPMU_GUEST_DIR has the built guest programs; VPMU_QEMU is
the folder of another QEMU than that on PATH, VPMU_PATCHED_QEMU of the one that embeds the PMU
(--pmu qemu).

Exit status: of `run` and `exec`, the command's own (128 + signal when it was killed); of `doctor`,
1 when something is missing; of `selftest`, 1 when a check fails; of `rewrite-kernel`, as its help
says; otherwise 0. 125 when vpmu itself or the guest failed, 2 for a wrong command line, 130 after
Ctrl-C.";

const AFTER_REWRITE: &str = "\
Why: KVM never hands RDPMC over to a VMM, and without a PMU in KVM the instruction faults: the first perf in the \
guest oopses its kernel. Each RDPMC of the kernel, two bytes, becomes `out 0xe6, al`, two bytes too, which a VMM \
with vpmu's PMU completes. vpmu-vmm does this by itself; this command is for other VMMs.

What is lost: without --bzimage the kernel is no longer moved at boot (KASLR), as the code that does it is in the \
bzImage around it; with --bzimage, a signature (secure boot). A kernel that the guest loads itself (kexec, kdump) is \
not rewritten. RDPMC in user space still faults: write 0 to \
/sys/bus/event_source/devices/cpu/rdpmc in the guest.

Exit status: 0 when OUT was written (also where there was no RDPMC to rewrite), 1 when IN is no kernel or cannot be \
rewritten safely, 2 for a wrong command line, 125 when a file cannot be read or written. OUT is replaced whole or \
not at all.";

/// Performance counters in virtual machines: run a command under several
/// virtual PMU designs and see what each costs.
///
/// Boots a stock Debian guest in QEMU, as root or not, on any machine with
/// Debian's apt. Nothing is installed; guests are downloaded once into
/// ~/.cache/vpmu.
#[derive(Debug, Parser)]
#[command(name = "vpmu", version, after_help = AFTER, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Say what this machine can do, each missing thing with its fix
    ///
    /// Exit status 1 when something needed is missing.
    Doctor {
        /// Architecture of the guests to check for
        #[arg(long, value_name = "NAME", default_value = "aarch64", value_parser = choice::<Arch>())]
        arch: Arch,
        /// Check the QEMU in this folder, not the one on PATH
        #[arg(long, value_name = "DIR")]
        qemu: Option<PathBuf>,
    },
    /// Check what this machine's own counters do, and attach the result to a report
    ///
    /// For a machine that nobody here has: with a PMU of Intel's or AMD's, with two kinds of cores, a VM of a cloud. Tries
    /// perf events with each backing, and runs a bare-metal test program in this machine's own KVM. Nothing is downloaded.
    /// Takes a minute, CAP_PERFMON (or kernel.perf_event_paranoid of 1) and /dev/kvm. What this machine cannot show is
    /// named. Exit status 1 when a check fails.
    Selftest {
        /// Write what was found to a file: {"schema":1,"machine":{..},"checks":[{"name","result","why"}]}
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
    /// Boot a guest, run CMD in it, stream its output, exit with its status
    #[command(after_help = AFTER)]
    Run {
        /// The PMU design
        ///
        /// With --vmm the default is vmm.
        #[arg(long, value_name = "NAME", default_value = "native", value_parser = choice::<Pmu>())]
        #[arg(default_value_if("vmm", ArgPredicate::IsPresent, "vmm"))]
        pmu: Pmu,
        /// When host events are made and given back (x86_64, emulated)
        ///
        /// The default is paused.
        #[arg(long, value_name = "NAME", value_parser = choice::<Policy>())]
        policy: Option<Policy>,
        #[command(flatten)]
        guest: Guest,
    },
    /// Write a kernel whose RDPMC instructions exit to the VMM (x86-64)
    ///
    /// IN is a bzImage (gzip, xz, zstd or lz4) or a vmlinux. OUT is an ELF file that any VMM loads or, with --bzimage, a
    /// bzImage as IN. A kernel without RDPMC, such as one that was rewritten before, is written as it is.
    #[command(after_help = AFTER_REWRITE)]
    RewriteKernel {
        /// A distribution's kernel, for example /boot/vmlinuz
        #[arg(value_name = "IN")]
        input: PathBuf,
        /// Where the rewritten kernel goes
        #[arg(value_name = "OUT")]
        output: PathBuf,
        /// Make OUT a bzImage, as IN is one (zstd or lz4): for VMMs that load nothing else, and for KASLR
        ///
        /// Takes a minute and 1 GiB of memory. A kernel that has become longer than its room is refused.
        #[arg(long)]
        bzimage: bool,
    },
    /// Run the same CMD under several designs and print one table
    ///
    /// Designs run side by side: by default time is counted in instructions, so that neither
    /// company nor a slow machine changes any figure, and the same comparison gives the same
    /// figures again. (Where all designs are x86_64's emulated and this machine's own KVM can run
    /// them, they run there, in real time, one by one.) CMD's output is kept inside the guest until
    /// CMD is over.
    #[command(after_help = AFTER)]
    Compare {
        /// The PMU designs, in the order of the table; the first is what others are relative to
        ///
        /// The default is native,kvm,emulated and, on aarch64, partitioned,direct; with --vmm also vmm.
        #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = choice::<Pmu>())]
        pmu: Vec<Pmu>,
        /// When host events are made and given back (x86_64): one row of emulated for each of
        /// recreate, reuse and paused that is named
        ///
        /// The default is paused.
        #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = choice::<Policy>())]
        policy: Vec<Policy>,
        #[command(flatten)]
        guest: Guest,
    },
    /// Repeat a published experiment: measured beside published
    ///
    /// Without a name: list them.
    Bench(Bench),
    /// Run an unchanged QEMU or kvmtool whose guests have a PMU (x86-64)
    ///
    /// Without a change of the program, and without one of the guest.
    #[command(after_help = exec::AFTER)]
    Exec(exec::Exec),
    /// Show the guests of this host that have the PMU, live: what they cost, and what they lost (x86-64)
    ///
    /// A line for each vCPU. The guests are those whose VMMs publish their statistics in /run/vpmu or
    /// $XDG_RUNTIME_DIR/vpmu, as all VMMs of this project do.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[command(after_help = crate::fleet::top::AFTER)]
    Top(crate::fleet::top::Top),
    /// Give the statistics of the guests of this host that have the PMU to Prometheus (x86-64)
    ///
    /// In OpenMetrics' text format. Without an option: once, on standard output.
    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[command(after_help = crate::fleet::metrics::AFTER)]
    Metrics(crate::fleet::metrics::Metrics),
    /// Make one HTML page, with drawings and tables, of saved results
    ///
    /// Reads each file in DIR that --json wrote. The page needs no other file and no network.
    Report {
        /// The folder with the files
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Write the page there instead of DIR/report.html
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Write the manual pages, and completions for bash, zsh and fish, into a folder
    Manual {
        /// The folder, made if need be
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Guest {
    /// Architecture of the guest
    ///
    /// With --vmm the default is x86_64.
    #[arg(long, value_name = "NAME", default_value = "aarch64", value_parser = choice::<Arch>())]
    #[arg(default_value_if("vmm", ArgPredicate::IsPresent, "x86_64"))]
    arch: Arch,
    /// Processors of the guest, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 1)]
    vcpus: u32,
    /// Memory of the guest, for example 512M or 2G; at most 3G for x86_64, emulated
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = memory)]
    memory: u32,
    /// Model of the processor that QEMU emulates, by QEMU's name, such as neoverse-n1; kvm and
    /// emulated need SVM of it on x86_64, as EPYC has
    ///
    /// The default is max, which has all that QEMU emulates and, on x86_64 in counted time, AMD's PMU where QEMU has one
    /// (script/qemu builds such a QEMU). --cpu max has no PMU there. Options of QEMU's may follow behind commas
    /// (max,sve=off).
    #[arg(long, value_name = "NAME")]
    cpu: Option<String>,
    #[command(flatten)]
    monitor: Monitor,
    /// Run CMD this often, 1 to 100, one after the other; times and counts are means
    #[arg(long, value_name = "N", default_value_t = 1)]
    runs: u32,
    /// Boot this kernel instead of Debian's (aarch64: an Image or a raw binary; x86_64: a bzImage
    /// or an ELF file)
    ///
    /// Without CMD the guest runs until it powers off, and its console is streamed.
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Give the kernel this initrd (without CMD only)
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Boot from a disk, by firmware (x86_64; native, kvm, exec): bios, uefi, or the image in FILE (with UEFI: uefi:FILE)
    ///
    /// The first two make a disk of Debian packages, whose GRUB starts Debian's kernel where the kernel wants to be. A
    /// release behind them names another kernel: bookworm, trixie, trixie-backports or sid (uefi:bookworm). FILE is raw
    /// or qcow2 and stays as it is. Its cloud-init runs CMD; without CMD its console is streamed until it powers off.
    #[arg(long, value_name = "DISK")]
    disk: Option<Disk>,
    /// Add words to the guest's kernel command line
    #[arg(long, value_name = "STRING", allow_hyphen_values = true)]
    append: Option<String>,
    /// Put a file into the guest's /root (repeatable)
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,
    /// Load a module of the guest's kernel, and those that it needs, before CMD (repeatable)
    ///
    /// By its name, as modprobe(8) takes it. The file comes from the kernel's own Debian package.
    #[arg(long, value_name = "NAME")]
    module: Vec<String>,
    /// Put the files of a Debian package, and of those that it depends on, into the guest (repeatable)
    ///
    /// For example util-linux, whose setpriv takes ids. Of the guest's release (Debian 13); downloaded the first time. The
    /// package's own scripts do not run.
    #[arg(long, value_name = "NAME", value_parser = package)]
    package: Vec<String>,
    /// Run machines on the QEMU in this folder, such as the one that script/qemu builds
    ///
    /// The default is VPMU_QEMU in the environment, and else the QEMU on PATH. Guests of QEMU with script/qemu's
    /// patches get one try.
    #[arg(long, value_name = "DIR")]
    qemu: Option<PathBuf>,
    /// Give QEMU, where it runs the machine, one more argument (repeatable)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    qemu_arg: Vec<String>,
    #[command(flatten)]
    vmm: Vmm,
    /// Let time pass as it does here, instead of counting instructions
    ///
    /// This machine's own KVM, where it runs the guest, knows no other time.
    #[arg(long)]
    realtime: bool,
    /// Give up on a design after this many seconds, those not counted in which a busy machine lets it wait
    #[arg(long, value_name = "SECS", default_value = "900", value_parser = seconds)]
    timeout: Duration,
    /// Give up when the command has not begun after this many seconds, counted likewise
    #[arg(long, value_name = "SECS", default_value = "240", value_parser = seconds)]
    boot_timeout: Duration,
    #[command(flatten)]
    offer: Offer,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Write a page of the figures, with drawings, to a file
    ///
    /// A guest whose CMD leaves a perf.data behind then tells its profile, too, which takes a moment more.
    #[arg(long, value_name = "FILE")]
    pub(crate) html: Option<PathBuf>,
    /// Keep each design's console log, QEMU command line and records in a folder
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// What to run: a program and its arguments, or one quoted line for the shell
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

impl Guest {
    /// Returns what to run under these designs, by default all, and policies. Refuses it before anything is downloaded, and
    /// files for the figures that cannot be written.
    pub(crate) fn spec(&self, pmus: &[Pmu], policies: &[Policy]) -> Result<Spec> {
        // Only our x86 VMM has host events.
        if !policies.is_empty() && !pmus.is_empty() && !pmus.contains(&Pmu::Emulated) {
            return usage("--policy is about --arch x86_64 --pmu emulated");
        }
        let designs = designs(self.arch, pmus, policies, self.vmm.vmm.is_some());
        let spec = self.request().check(&designs)?;
        run::check(&spec)?;
        let mut files = self.html.iter().chain(&self.json);
        files.try_for_each(|path| check_writable(path))?;
        Ok(spec)
    }

    fn request(&self) -> Request {
        Request {
            machine: Machine {
                arch: self.arch,
                vcpus: self.vcpus,
                memory: self.memory,
                cpu: self.cpu.clone(),
                realtime: self.realtime,
                qemu: Qemu::chosen(self.qemu.as_deref()),
                qemu_args: self.qemu_arg.clone(),
            },
            vmm: self.vmm.vmm.clone(),
            vmm_files: self.vmm.vmm_file.clone(),
            vmm_args: self.vmm.vmm_arg.clone(),
            model: self.offer.model,
            perfmon: self.offer.perfmon,
            pebs: self.offer.pebs,
            lbr: self.offer.lbr,
            backing: self.offer.backing,
            freeze: self.offer.freeze,
            host_counters: self.monitor.host_counters,
            host_profile: self.monitor.host_profile(),
            second: self.monitor.second(),
            command: Command::from_words(&self.command),
            runs: self.runs,
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            disk: self.disk.clone(),
            append: self.append.clone(),
            add: self.add.clone(),
            modules: self.module.clone(),
            packages: self.package.clone(),
            timeout: self.timeout,
            boot_timeout: self.boot_timeout,
            keep: self.keep.clone(),
            profile: self.html.is_some(),
            ..Request::new(self.arch)
        }
    }

    /// Writes the figures to the files that were asked for, also where one of them cannot be written.
    pub(crate) fn write(&self, runs: Vec<Run>) -> Result<()> {
        let html = match self.html.as_ref().zip(page::of_runs(&runs)) {
            Some((path, page)) => write_whole(path, page.as_bytes()),
            None => Ok(()),
        };
        if let Some(path) = &self.json {
            write_json(path, &Results::new(runs))?;
        }
        html
    }
}

/// Takes what Debian's policy lets be a name, so that apt takes it for nothing else.
fn package(text: &str) -> std::result::Result<String, String> {
    let fits =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"+-.".contains(&byte);
    let begins = text.starts_with(|first: char| first.is_ascii_alphanumeric());
    match begins && text.bytes().all(fits) {
        true => Ok(text.to_owned()),
        false => Err("a package's name has lower-case letters, digits, +, - and .".to_owned()),
    }
}

/// The rows of a table: each design once, the one with policies once for each.
fn designs(arch: Arch, pmus: &[Pmu], policies: &[Policy], has_vmm: bool) -> Vec<Design> {
    let defaults: &[Pmu] = match arch {
        Arch::Aarch64 => &[
            Pmu::Native,
            Pmu::Kvm,
            Pmu::Emulated,
            Pmu::Partitioned,
            Pmu::Direct,
        ],
        Arch::X86_64 if has_vmm => &[Pmu::Native, Pmu::Kvm, Pmu::Emulated, Pmu::Vmm],
        Arch::X86_64 => &[Pmu::Native, Pmu::Kvm, Pmu::Emulated],
    };
    let pmus = if pmus.is_empty() { defaults } else { pmus };
    let policies = match (policies, arch) {
        ([], Arch::Aarch64) => vec![None],
        ([], Arch::X86_64) => vec![Some(Policy::default())],
        _ => policies.iter().copied().map(Some).collect(),
    };
    let of_pmu = |&pmu| match pmu {
        Pmu::Emulated => policies
            .iter()
            .map(|&policy| Design { pmu, policy })
            .collect(),
        _ => vec![Design::from(pmu)],
    };
    pmus.iter().flat_map(of_pmu).unique().collect()
}

#[cfg(test)]
mod tests;
