//! A guest in a stock KVM host, on the machine that QEMU emulates.

use std::path::{Path, PathBuf};

use super::parts::{Boot, command_line};
use super::{Backend, Launch, Parts, direct, disk, qemu};
use crate::error::STUCK;
use crate::image::archive::{Archive, concatenate};
use crate::image::artifacts;
use crate::image::host_kernel::HostKernel;
use crate::image::images::{Images, unpack_kernel};
use crate::image::job::{Notify, settle_ms};
use crate::image::program::{self, library_name};
use crate::image::theirs;
use crate::spec::arch::Arch;
use crate::spec::design::Model;
use crate::spec::{Guest, Machine, Request, Vmm, disturbance};
use crate::{Failure, Result, usage};
use vpmu_measure::{Host, HostJob, HostVmm, Record};

/// Memory that a KVM host needs beside its guest's, MiB: its own file tree,
/// twice while it is unpacked, and the guest's.
const KVM_HOST_MEMORY: u32 = 1024;

/// Options of a stock QEMU whose guest rings the doorbell from user space. For its vapic QEMU reads and writes the segments
/// of a guest that runs. KVM calls the task's segment busy, and QEMU below KVM reads the permissions of ports in one that
/// is not: the guest's user space then has no port.
const NO_VAPIC: [&str; 2] = ["-global", "kvm-apic.vapic=off"];

/// An option for the VMM that restores a saved guest. No other VMM gets it.
const RESTORING: &str = "--drop-paravirt";

/// A machine whose KVM cannot hand a PMU over.
const NO_PMU: &str = "--pmu mediated needs a processor with AMD's PerfMonV2, which the lab gives to machines in counted time \
    on a QEMU that has it: script/qemu builds one, and --qemu or VPMU_QEMU takes its folder (in real time: --cpu \
    max,perfctr-core=on,perfmon-v2=on)";

/// A guest one level further down than under the other designs.
pub(super) struct Nested<'a> {
    pub(super) request: &'a Request,
    pub(super) guest: &'a Guest,
    pub(super) vmm: Vmm,
}

impl Nested<'_> {
    /// Returns the memory of the machine below the host, MiB.
    fn memory(&self) -> u32 {
        let guest = match self.vmm {
            // The saved guest's file and the guest restored from it are both in memory.
            Vmm::Ours if self.request.saves() => 3 * self.request.machine.memory,
            Vmm::Patched if self.request.is_disturbed() => 3 * self.request.machine.memory,
            _ => self.request.machine.memory,
        };
        guest + KVM_HOST_MEMORY
    }

    /// Tells whether the host is a PC whose instructions QEMU counts.
    fn is_counted_pc(&self) -> bool {
        let machine = &self.request.machine;
        machine.arch == Arch::X86_64 && self.guest.is_counted(machine)
    }

    /// Returns the number of the host's processors.
    fn processors(&self) -> u32 {
        match self.is_counted_pc() {
            // QEMU executes no two processors at once while it counts instructions, but each for long turns. Several
            // PCs' processors also take so many interrupts that it delivers one of them twice.
            true => 1,
            false => self.request.machine.vcpus,
        }
    }

    /// Returns the kernel command line of the host.
    fn host_command_line(&self) -> String {
        let one_timer = match self.is_counted_pc() {
            // A PC's only processor needs no timer of its own: the machine's is as good. Linux calibrates that of
            // the processor by RDTSC in a loop, which takes QEMU a third of the host's boot.
            true => " nolapic_timer",
            false => "",
        };
        // A watchdog would take a counter, as in the lab's guests. A KVM that mediates then refuses every vCPU.
        command_line(self.request.machine.arch) + one_timer + " nmi_watchdog=0"
    }

    /// Returns the host's kernel, where that hands the PMU over to the guest.
    fn newest_kernel<'a>(&self, parts: &Parts<'a>) -> Option<&'a HostKernel> {
        parts.host_kernel.filter(|_| self.vmm == Vmm::Mediated)
    }

    /// Returns the guest's kernel as an ELF file, where the user's VMM asks for one.
    fn unpacked(
        &self,
        parts: &Parts<'_>,
        images: &Images,
        folder: &Path,
    ) -> Result<Option<PathBuf>> {
        let is_theirs = matches!(self.vmm, Vmm::Theirs { .. });
        if !is_theirs || !theirs::wants_unpacked(self.request)? {
            return Ok(None);
        }
        let Some(own) = parts.own_kernel() else {
            return images.boot_kernel(self.request.machine.arch).map(Some);
        };
        let path = folder.join("vmlinux");
        unpack_kernel(own, &path)?;
        Ok(Some(path))
    }

    /// Returns the options of the stock QEMU in the host, without console and kernel.
    fn stock_arguments(&self, parts: &Parts<'_>) -> Vec<String> {
        let machine = match self.request.machine.arch {
            Arch::Aarch64 => "virt,gic-version=3",
            Arch::X86_64 => "pc",
        };
        let vcpus = self.request.machine.vcpus.to_string();
        let memory = format!("{}M", self.request.machine.memory);
        let words = ["-M", machine, "-accel", "kvm", "-cpu", "host"];
        let size = ["-smp", &vcpus, "-m", &memory];
        let fixed = "-nodefaults -display none -nic none -name guest,debug-threads=on -seed 42";
        let words = words.into_iter().chain(size).chain(fixed.split(' '));
        let words = words.map(str::to_owned);
        match parts.disk {
            None => words.chain(["-no-reboot".to_owned()]).collect(),
            Some(disk) => words
                .chain(disk::in_host(disk, parts.job.is_some()))
                .collect(),
        }
    }

    /// Makes the archive that the run adds to the host's file tree.
    fn job(&self, parts: &Parts<'_>, images: &Images, folder: &Path) -> Result<Archive> {
        let arch = self.request.machine.arch;
        let mut archive = Archive::default();
        archive.copy("init", 0o755, artifacts::find(arch, artifacts::KVM_HOST)?);
        let append = parts.command_line(arch);
        let (vmm, options) = self.put_vmm(parts, &append, &mut archive)?;
        let trace = self.request.marked;
        let newest = self.newest_kernel(parts);
        let settings = HostJob {
            vmm,
            options,
            append,
            vcpus: self.request.machine.vcpus,
            // A traced guest has no shares, and a host's tick that comes while a handler runs
            // makes QEMU deliver that interrupt twice.
            skew: self.guest.has_fair_shares(&self.request.machine) && !trace,
            trace,
            settle_ms: settle_ms(parts.phase),
            boots_disk: parts.disk.is_some(),
            mediates: newest.is_some(),
        };
        let settings = serde_json::to_vec(&settings).expect("a job is plain data");
        archive.bytes(HostJob::PATH, 0o644, settings);
        if let Some(kernel) = newest {
            kernel.put_modules(&mut archive)?;
        }
        if let Some(disk) = parts.disk {
            disk::put(disk, &mut archive);
        }
        let kernel = match (parts.own_kernel(), self.vmm) {
            (Some(own), _) => Some(own.to_owned()),
            (None, Vmm::Ours) => Some(images.boot_kernel(arch)?),
            (None, _) => None,
        };
        let job = parts.job.clone().filter(|_| parts.disk.is_none());
        let files = [
            ("guest/job.cpio", job),
            ("guest/own.cpio", parts.own_initrd().map(Path::to_owned)),
            ("guest/kernel", kernel),
            (
                theirs::UNPACKED_PLACE,
                self.unpacked(parts, images, folder)?,
            ),
        ];
        for (place, path) in files {
            if let Some(path) = path {
                archive.copy(place, 0o644, path);
            }
        }
        Ok(archive)
    }

    /// Puts the VMM into the host's `archive`. Returns what the host reads of it, and its options.
    fn put_vmm(
        &self,
        parts: &Parts<'_>,
        append: &str,
        archive: &mut Archive,
    ) -> Result<(HostVmm, Vec<String>)> {
        let arch = self.request.machine.arch;
        let qemu = || arch.qemu().program.to_owned();
        let ours = self.request.our_vmm_args();
        Ok(match self.vmm {
            Vmm::Stock | Vmm::Mediated => (HostVmm::Qemu(qemu()), self.stock_arguments(parts)),
            Vmm::Exec => {
                let mut options = self.stock_arguments(parts);
                options.extend(NO_VAPIC.map(str::to_owned));
                options.extend_from_slice(ours);
                let exec = HostVmm::Exec {
                    qemu: qemu(),
                    options: self.put_exec(archive)?,
                };
                (exec, options)
            }
            Vmm::Patched => {
                let mut options = self.stock_arguments(parts);
                // QEMU takes the last of several processors.
                options.extend(["-cpu".to_owned(), patched_cpu(self.request.model)]);
                let own = ours.iter().filter(|word| disturbance(word).is_none());
                options.extend(own.cloned());
                let name = artifacts::PATCHED_QEMU;
                program::put(archive, name, &artifacts::find_patched_qemu()?)?;
                let patched = HostVmm::Patched {
                    name: name.to_owned(),
                    disturb: ours.iter().find_map(|word| disturbance(word)),
                };
                (patched, options)
            }
            Vmm::Ours => {
                let mut options = direct::arguments(self.request, self.guest.design);
                let save = ours.iter().find_map(|word| word.strip_prefix("--save="));
                let save = save.map(str::to_owned);
                let restores = |word: &mut String| save.is_some() && word == RESTORING;
                let restore = options.extract_if(.., restores).collect();
                program::put_own(archive, artifacts::VMM)?;
                (HostVmm::Ours { save, restore }, options)
            }
            Vmm::Theirs { under_exec } => {
                let exec = under_exec.then(|| self.put_exec(archive)).transpose()?;
                let program = theirs::put(self.request, under_exec, append, archive)?;
                let options = theirs::options(self.request, append);
                (HostVmm::Theirs { program, exec }, options)
            }
        })
    }

    /// Puts `vpmu exec` into the host's `archive`. Returns its options, for a guest with this PMU.
    fn put_exec(&self, archive: &mut Archive) -> Result<Vec<String>> {
        const GCC: &str = "libgcc_s.so.1";
        program::put_own(archive, artifacts::VPMU)?;
        let preload = artifacts::find_preload()?;
        let libraries = program::put(archive, artifacts::PRELOAD, &preload)?;
        // The C library of the VMM serves the library in it. What else it needs is on each Debian.
        for (_, file) in libraries
            .iter()
            .filter(|(place, _)| library_name(place) == GCC)
        {
            let folder = self.request.machine.arch.libraries();
            archive.copy(&format!("{folder}/{GCC}"), 0o755, file);
        }
        let policy = self.guest.design.policy.unwrap_or_default();
        let mut options = vec![
            format!("--pmu={}", self.request.model.name()),
            format!("--policy={}", policy.name()),
            // With the VMM's own output, as the guest's console is.
            "--statistics=-".to_owned(),
        ];
        let (backing, perfmon) = (self.request.backing, self.request.perfmon);
        options.extend(backing.map(|backing| format!("--backing={}", backing.name())));
        options.extend(perfmon.map(|version| format!("--perfmon={version}")));
        Ok(options)
    }
}

impl Backend for Nested<'_> {
    fn check(&self) -> Result<()> {
        let machine = &self.request.machine;
        match self.vmm {
            Vmm::Stock => {}
            Vmm::Mediated if machine.has_pmu() || machine.cpu.is_some() => {}
            Vmm::Mediated => return usage(NO_PMU),
            Vmm::Exec => drop(artifacts::find_preload()?),
            Vmm::Patched => drop(artifacts::find_patched_qemu()?),
            Vmm::Ours => drop(artifacts::find_beside(artifacts::VMM)?),
            Vmm::Theirs { under_exec } => {
                theirs::check_options(self.request)?;
                theirs::put(self.request, under_exec, "", &mut Archive::default())?;
                under_exec.then(artifacts::find_preload).transpose()?;
            }
        }
        qemu::check(machine)
    }

    fn notify(&self) -> Notify {
        match self.vmm {
            Vmm::Stock | Vmm::Mediated | Vmm::Patched => Notify::KvmHost,
            Vmm::Exec | Vmm::Ours | Vmm::Theirs { under_exec: true } => Notify::Doorbell,
            Vmm::Theirs { under_exec: false } => Notify::Tracepoints,
        }
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let Some(images) = parts.images else {
            unreachable!("a KVM host needs images");
        };
        let machine = &self.request.machine;
        let job = folder.join("host.cpio");
        self.job(parts, images, folder)?.write_file(&job)?;
        let initrd = folder.join("initrd");
        concatenate(&[&images.kvm_host(), &job], &initrd)?;
        let boot = Boot {
            kernel: match self.newest_kernel(parts) {
                Some(newest) => newest.kernel(),
                None => images.boot_kernel(machine.arch)?,
            },
            initrd: Some(initrd),
            append: self.host_command_line(),
        };
        let disks = (parts.disk).map(|disk| disk::machine(disk, parts.job.as_deref(), false));
        let mut options = boot.options();
        options.extend(disks.into_iter().flatten());
        let host = Machine {
            vcpus: self.processors(),
            ..machine.clone()
        };
        Ok(qemu::launch(&host, self.memory(), options))
    }

    fn silent_end(&self, records: &[Record]) -> Option<Failure> {
        let host = records.iter().find_map(|record| match record {
            Record::Host(host) => Some(host),
            _ => None,
        });
        match host {
            None => Some(Failure::HostReset),
            Some(Host { status: 0, .. }) => None,
            Some(Host { vmm, status, .. }) => {
                let how = format!("{vmm} ended with status {status}");
                Some(Failure::NoReport(how))
            }
        }
    }

    /// QEMU 10.0 is known to, for nested x86 guests, while it counts instructions.
    fn loses_interrupts(&self) -> bool {
        self.is_counted_pc()
    }

    /// Names QEMU as the likely cause.
    fn explain(&self, failure: Failure) -> Failure {
        if !self.loses_interrupts() {
            return failure;
        }
        match failure {
            // The panic that follows when a register is restored twice.
            Failure::Panic(line) if line.contains("Fatal exception") => {
                Failure::RepeatedInterrupt(line)
            }
            Failure::Stuck => Failure::RepeatedInterrupt(STUCK.to_owned()),
            failure => failure,
        }
    }
}

/// Returns the processor of the patched QEMU's guest, with its PMU.
fn patched_cpu(model: Model) -> String {
    let pmu = match model {
        Model::Auto => "on",
        model => model.name(),
    };
    format!("host,vpmu={pmu}")
}
