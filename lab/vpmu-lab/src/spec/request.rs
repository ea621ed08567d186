//! The request of a user or a bench, and the check that makes a [`Spec`] of it.

mod vmm;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use itertools::Itertools;

use super::arch::Arch;
use super::command::Command;
use super::design::{Backing, Design, Freeze, Lbr, Model, Pebs, Pmu};
use super::disk::Disk;
use super::profile::ProfileRequest;
use super::{Guest, Machine, SecondRequest, Spec, Vmm, Way, disturbance};
use crate::{Error, Result, usage};

/// The least memory that holds a guest's file tree, MiB.
const LEAST_MEMORY: u32 = 384;
/// The most processors: vpmu-vmm has no more, and QEMU's boards for arm64 have more.
const MOST_VCPUS: u32 = 64;

/// The wish of a user or a bench. What is given by default runs nothing: see [`Request::new`].
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The machine.
    pub machine: Machine,
    /// The user's own VMM for x86-64 guests.
    pub vmm: Option<PathBuf>,
    /// Files that this VMM reads.
    pub vmm_files: Vec<PathBuf>,
    /// More options for that VMM or, where there is none, for this project's.
    pub vmm_args: Vec<String>,
    /// The model of the PMU that this VMM's guests have.
    pub model: Model,
    /// The version of Intel's PMU that these guests have.
    pub perfmon: Option<u8>,
    /// The way in which these guests' PEBS records are made.
    pub pebs: Pebs,
    /// The last branch records that these guests have.
    pub lbr: Lbr,
    /// What counts for these guests; `None`: hardware counters where there are any.
    pub backing: Option<Backing>,
    /// The time that counts for these guests where a clock does.
    pub freeze: Freeze,
    /// Counters that a partitioning monitor keeps.
    pub host_counters: u32,
    /// The profile that the monitor takes of its guest.
    pub host_profile: Option<ProfileRequest>,
    /// A guest beside the monitor's.
    pub second: Option<SecondRequest>,
    /// The command; without a command the kernel runs until it powers off.
    pub command: Option<Command>,
    /// Number of runs of the command, 1 to 100. Times and counts are means.
    pub runs: u32,
    /// A kernel instead of Debian's.
    pub kernel: Option<PathBuf>,
    /// An initrd instead of the lab's file tree. Excludes a command.
    pub initrd: Option<PathBuf>,
    /// A disk to boot from, instead of a kernel that the lab loads.
    pub disk: Option<Disk>,
    /// More words for the kernel command line.
    pub append: Option<String>,
    /// Files for `/root`.
    pub add: Vec<PathBuf>,
    /// Names of modules of the guest's own kernel, which are loaded before the command.
    pub modules: Vec<String>,
    /// Names of Debian packages whose files the guest has.
    pub packages: Vec<String>,
    /// Whether the guest tells the profile in each `perf.data` that the command leaves behind.
    pub profile: bool,
    /// Names of programs that stand beside `vpmu` and that the command calls.
    pub programs: Vec<&'static str>,
    /// Whether the command itself marks the parts to be measured (`meter --doorbell`), each with
    /// some rest behind it. The KVM host then counts by tracepoints.
    pub marked: bool,
    /// Whether this machine's own KVM may run the guests, in real time.
    pub own_kvm: bool,
    /// Wall-clock limit for one design.
    pub timeout: Duration,
    /// Wall-clock limit for the boot.
    pub boot_timeout: Duration,
    /// The folder for logs, with a folder for each design.
    pub keep: Option<PathBuf>,
}

impl Request {
    /// Requests one processor of `arch`, 1 GiB, counted time, and nothing to run.
    pub fn new(arch: Arch) -> Self {
        Self {
            machine: Machine {
                arch,
                vcpus: 1,
                memory: 1024,
                ..Machine::default()
            },
            runs: 1,
            own_kvm: arch.has_hardware_kvm(),
            timeout: Duration::from_secs(900),
            boot_timeout: Duration::from_secs(240),
            ..Self::default()
        }
    }

    /// Checks everything that does not need this project's or the machine's programs, and decides
    /// how the guest of each of `designs` runs.
    ///
    /// # Errors
    ///
    /// When options contradict each other or a file is missing.
    pub fn check(self, designs: &[Design]) -> Result<Spec> {
        self.check_designs(designs)?;
        self.check_vmm(designs)?;
        self.check_append()?;
        self.check_disk(designs)?;
        let guests = self.guests(designs)?;
        self.check_payload(designs)?;
        self.check_extras()?;
        self.check_numbers(designs)?;
        self.check_profile(designs)?;
        self.check_second(designs)?;
        self.check_files()?;
        if self.command.is_none() && self.kernel.is_none() && self.disk.is_none() {
            return usage("nothing to run: give a command after --, or --kernel FILE");
        }
        Ok(Spec {
            request: self,
            guests,
        })
    }

    fn check_designs(&self, designs: &[Design]) -> Result<()> {
        let arch = self.machine.arch;
        for design in designs {
            if !arch.designs().contains(&design.pmu) {
                let names = arch.designs().iter().join(", ");
                return usage(format!(
                    "--pmu {} does not exist on {arch}; there are {names}",
                    design.pmu
                ));
            }
            if arch == Arch::Aarch64 && design.policy.is_some() {
                return usage("--policy is about --arch x86_64 --pmu emulated");
            }
        }
        Ok(())
    }

    fn check_append(&self) -> Result<()> {
        let mut words = (self.append.iter()).flat_map(|words| words.split_whitespace());
        match words.find(|word| word.starts_with("vpmu.")) {
            None => Ok(()),
            Some(word) => usage(format!(
                "--append {word} would contradict --pmu, --host-counters and --host-profile: use those"
            )),
        }
    }

    fn check_disk(&self, designs: &[Design]) -> Result<()> {
        let Some(disk) = &self.disk else {
            return Ok(());
        };
        if self.machine.arch != Arch::X86_64 {
            return usage("--disk is about --arch x86_64");
        }
        if let Some(design) = designs.iter().find(|design| design.pmu.is_ours()) {
            return usage(format!(
                "--disk needs firmware, which vpmu-vmm has not: --pmu {} boots a kernel only",
                design.pmu
            ));
        }
        if designs.iter().any(|design| design.pmu == Pmu::Mediated) {
            return usage(
                "--disk: the host of --pmu mediated has another kernel, without the disk's driver",
            );
        }
        if self.kernel.is_some() || self.initrd.is_some() || self.append.is_some() {
            return usage(
                "--disk boots what is on the disk: leave --kernel, --initrd and --append out",
            );
        }
        match (&disk.image, &self.command) {
            (None, None) => usage("--disk bios and uefi run a command: give it after --"),
            (Some(_), None) if !self.add.is_empty() => {
                usage("--add puts files beside a command: give one after --")
            }
            _ => Ok(()),
        }
    }

    /// Returns whether this machine's own KVM runs the guests: only if it can run all designs, as real time is not compared
    /// with counted instructions, and marks no parts, which are the lab's KVM host's to count.
    pub fn is_direct(&self, designs: &[Design]) -> bool {
        self.own_kvm && !self.marked && designs.iter().all(|design| design.pmu.is_ours())
    }

    fn guests(&self, designs: &[Design]) -> Result<Vec<Guest>> {
        let is_direct = self.is_direct(designs);
        if is_direct && !self.machine.qemu_args.is_empty() {
            return usage("--qemu-arg: this machine's own KVM runs the guest, without QEMU");
        }
        if is_direct && self.machine.cpu.is_some() {
            return usage("--cpu: this machine's own KVM runs the guest, on its own processors");
        }
        if is_direct && self.saves() {
            return usage(
                "--vmm-arg=--save=FILE goes on with the saved guest in the lab's own KVM host only; here \
                 run vpmu-vmm itself",
            );
        }
        let guest = |&design: &Design| Guest {
            design,
            way: self.way(design.pmu, is_direct),
        };
        Ok(designs.iter().map(guest).collect())
    }

    fn way(&self, pmu: Pmu, is_direct: bool) -> Way {
        let has_theirs = self.vmm.is_some();
        match (self.machine.arch, pmu) {
            (_, Pmu::Native) => Way::Native,
            (_, Pmu::Kvm) => Way::Nested(Vmm::Stock),
            (_, Pmu::Mediated) => Way::Nested(Vmm::Mediated),
            (Arch::Aarch64, _) => Way::Monitor,
            (Arch::X86_64, Pmu::Vmm) => Way::Nested(Vmm::Theirs { under_exec: false }),
            (Arch::X86_64, Pmu::Exec) if has_theirs => {
                Way::Nested(Vmm::Theirs { under_exec: true })
            }
            (Arch::X86_64, Pmu::Exec) => Way::Nested(Vmm::Exec),
            (Arch::X86_64, Pmu::Qemu) => Way::Nested(Vmm::Patched),
            (Arch::X86_64, _) if is_direct => Way::Direct,
            (Arch::X86_64, _) => Way::Nested(Vmm::Ours),
        }
    }

    /// Returns the options for a VMM that is not the user's: with one of the user's, they are that one's.
    pub(crate) fn our_vmm_args(&self) -> &[String] {
        match self.vmm {
            None => &self.vmm_args,
            Some(_) => &[],
        }
    }

    /// Tells whether the guest of this project's VMM may ask to be saved and then goes on in another process.
    pub(crate) fn saves(&self) -> bool {
        let mut words = self.our_vmm_args().iter();
        words.any(|word| word.starts_with("--save"))
    }

    /// Tells whether the KVM host moves, takes back or resets the guest of the patched QEMU while it measures.
    pub(crate) fn is_disturbed(&self) -> bool {
        let mut words = self.our_vmm_args().iter();
        words.any(|word| disturbance(word).is_some())
    }

    /// Returns the counters that a monitor of this design keeps, where that is a choice.
    pub(crate) fn kept_counters(&self, pmu: Pmu) -> Option<u32> {
        let is_choice = matches!(pmu, Pmu::Partitioned | Pmu::Direct);
        (is_choice || self.profile_of(pmu).is_some()).then_some(self.host_counters)
    }

    /// Returns the profile that a monitor of this design takes of its guest.
    pub(crate) fn profile_of(&self, pmu: Pmu) -> Option<&ProfileRequest> {
        let takes_some = matches!(pmu, Pmu::Partitioned | Pmu::Emulated);
        self.host_profile.as_ref().filter(|_| takes_some)
    }

    fn check_payload(&self, designs: &[Design]) -> Result<()> {
        let is_stock = |design: &Design| matches!(design.pmu, Pmu::Kvm | Pmu::Mediated);
        match (&self.command, &self.kernel) {
            (Some(_), _) if self.initrd.is_some() => {
                usage("a command runs in vpmu's own initrd: give either --initrd or a command")
            }
            (None, Some(_)) if designs.iter().any(is_stock) => usage(
                "kvm and mediated need a command: their machine holds a host that starts the guest",
            ),
            (None, Some(_)) if !self.add.is_empty() => {
                usage("--add puts files into vpmu's own initrd: it needs a command")
            }
            (None, Some(_)) if self.runs > 1 => {
                usage("--runs repeats a command: give one after --")
            }
            _ if designs.iter().any(|design| design.pmu == Pmu::Paravirt) => {
                match (&self.command, &self.kernel) {
                    (Some(_), None) => Ok(()),
                    (None, _) => {
                        usage("paravirt needs a command: vpmu loads the guest's driver before it")
                    }
                    (_, Some(_)) => usage(
                        "paravirt boots the kernel that its driver is built for: leave --kernel out, or give \
                         --pmu emulated --vmm-arg=--paravirt and load a driver of your own",
                    ),
                }
            }
            _ => Ok(()),
        }
    }

    /// Checks that the guest is one that Debian's packages fit.
    fn check_extras(&self) -> Result<()> {
        if self.modules.is_empty() && self.packages.is_empty() {
            return Ok(());
        }
        if self.command.is_none() {
            return usage(
                "--module and --package add to vpmu's own guest: give a command after --",
            );
        }
        if self.disk.as_ref().is_some_and(|disk| disk.image.is_some()) {
            return usage(
                "--module and --package add to vpmu's own guest: the system on your disk has its own",
            );
        }
        if self.kernel.is_some() && !self.modules.is_empty() {
            return usage(
                "--module takes modules of Debian's kernel: give those of your own with --add, and load them by insmod",
            );
        }
        Ok(())
    }

    fn check_numbers(&self, designs: &[Design]) -> Result<()> {
        if !(1..=MOST_VCPUS).contains(&self.machine.vcpus) {
            return usage(format!("--vcpus takes a number from 1 to {MOST_VCPUS}"));
        }
        if !(1..=100).contains(&self.runs) {
            return usage("--runs takes a number from 1 to 100");
        }
        if self.command.is_some() && self.machine.memory < LEAST_MEMORY {
            return usage(format!(
                "--memory is too small for a guest: give at least {LEAST_MEMORY}M"
            ));
        }
        let keeps = |design: &Design| self.kept_counters(design.pmu).is_some();
        if self.host_counters > 0 && !designs.iter().any(keeps) {
            return usage(
                "--host-counters is about --pmu partitioned and direct, and about emulated with --host-profile",
            );
        }
        Ok(())
    }

    fn check_profile(&self, designs: &[Design]) -> Result<()> {
        let Some(profile) = &self.host_profile else {
            return Ok(());
        };
        let has = |pmu| designs.iter().any(|design| design.pmu == pmu);
        if self.machine.arch != Arch::Aarch64 {
            return usage("--host-profile is about --arch aarch64");
        }
        if has(Pmu::Direct) {
            return usage(
                "--host-profile: with --pmu direct no interrupt comes to the monitor, so none of a host \
                 counter's either: take partitioned",
            );
        }
        if has(Pmu::Untrapped) {
            return usage("--host-profile: with --pmu untrapped the guest has every counter");
        }
        if !(designs.iter()).any(|design| self.profile_of(design.pmu).is_some()) {
            return usage("--host-profile is about --pmu partitioned and emulated");
        }
        if !profile.borrow && profile.events.len() > self.host_counters as usize {
            return usage(format!(
                "--host-profile takes a host counter for each event: give --host-counters {} or more, \
                 or --borrow",
                profile.events.len()
            ));
        }
        Ok(())
    }

    fn check_files(&self) -> Result<()> {
        let image = self.disk.as_ref().and_then(|disk| disk.image.as_ref());
        let files = self.kernel.iter().chain(&self.initrd);
        let files = files.chain(image).chain(&self.add);
        let files = files.chain(self.second_files());
        for path in files.chain(&self.vmm).chain(&self.vmm_files) {
            let file = File::open(path).map_err(Error::file("open", path))?;
            if file.metadata().is_ok_and(|file| file.is_dir()) {
                return usage(format!("{} is a folder", path.display()));
            }
        }
        Ok(())
    }
}

mod second;
#[cfg(test)]
mod tests;
