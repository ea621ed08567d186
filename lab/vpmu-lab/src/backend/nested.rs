//! A guest in a stock KVM host, on the machine that QEMU emulates.

use std::path::{Path, PathBuf};

use super::parts::{Boot, command_line};
use super::{Backend, End, Launch, Parts, direct, disk, qemu};
use crate::error::STUCK;
use crate::image::archive::concatenate;
use crate::image::artifacts;
use crate::image::images::unpack_kernel;
use crate::image::job::{self, Exec, HostJob, Notify, settle_ms};
use crate::image::theirs::{self, TheirProgram};
use crate::spec::arch::Arch;
use crate::spec::design::Model;
use crate::spec::{Guest, Machine, Time, Vmm};
use crate::{Failure, Result, usage};
use vpmu_measure::{Host, Record};

/// Memory that a KVM host needs beside its guest's, MiB: its own file tree,
/// twice while it is unpacked, and the guest's.
const KVM_HOST_MEMORY: u32 = 1024;

/// Options of a stock QEMU whose guest rings the doorbell from user space. For its vapic QEMU reads and writes the segments
/// of a guest that runs. KVM calls the task's segment busy, and QEMU below KVM reads the permissions of ports in one that
/// is not: the guest's user space then has no port.
const NO_VAPIC: [&str; 2] = ["-global", "kvm-apic.vapic=off"];

/// A machine whose KVM cannot hand a PMU over.
const NO_PMU: &str = "--pmu mediated needs a processor with AMD's PerfMonV2, which the lab gives to machines in counted time \
    on a QEMU that has it: script/qemu builds one, and --qemu or VPMU_QEMU takes its folder (in real time: --cpu \
    max,perfctr-core=on,perfmon-v2=on)";

/// A guest one level further down than under the other designs.
pub(super) struct Nested<'a> {
    pub(super) machine: &'a Machine,
    pub(super) guest: &'a Guest,
    pub(super) vmm: &'a Vmm,
}

impl Nested<'_> {
    /// Returns the memory of the machine below the host, MiB.
    fn memory(&self) -> u32 {
        let guest = match self.vmm {
            // The saved guest's file and the guest restored from it are both in memory.
            Vmm::Ours(vmm) if vmm.saves() => 3 * self.machine.memory,
            Vmm::Patched(vmm) if vmm.is_disturbed() => 3 * self.machine.memory,
            _ => self.machine.memory,
        };
        guest + KVM_HOST_MEMORY
    }

    /// Tells whether the host is a PC whose instructions QEMU counts.
    fn is_counted_pc(&self) -> bool {
        self.machine.arch == Arch::X86_64 && self.guest.time == Time::Counted
    }

    /// Returns the number of the host's processors.
    fn processors(&self) -> u32 {
        match self.is_counted_pc() {
            // QEMU executes no two processors at once while it counts instructions, but each for long turns. Several
            // PCs' processors also take so many interrupts that it delivers one of them twice.
            true => 1,
            false => self.machine.vcpus,
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
        command_line(self.machine.arch) + one_timer + " nmi_watchdog=0"
    }

    /// Tells whether the host's KVM hands the PMU over to the guest.
    fn mediates(&self) -> bool {
        *self.vmm == Vmm::Mediated
    }

    /// Returns the guest's kernel as an ELF file, where the user's VMM asks for one.
    fn unpacked(&self, parts: &Parts<'_>, folder: &Path) -> Result<Option<PathBuf>> {
        match (self.vmm, parts.own_kernel(), parts.images) {
            (Vmm::Theirs(_), _, _) if !theirs::wants_unpacked(parts.request)? => Ok(None),
            (Vmm::Theirs(_), Some(own), _) => {
                let path = folder.join("vmlinux");
                unpack_kernel(own, &path)?;
                Ok(Some(path))
            }
            (Vmm::Theirs(_), None, Some(images)) => images.boot_kernel(self.machine.arch).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns the options of the stock QEMU in the host, without console and kernel.
    fn stock_arguments(&self, parts: &Parts<'_>) -> Vec<String> {
        let machine = match self.machine.arch {
            Arch::Aarch64 => "virt,gic-version=3",
            Arch::X86_64 => "pc",
        };
        let vcpus = self.machine.vcpus.to_string();
        let memory = format!("{}M", self.machine.memory);
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
}

impl Backend for Nested<'_> {
    fn check(&self) -> Result<()> {
        match self.vmm {
            Vmm::Stock => {}
            Vmm::Mediated if self.machine.has_pmu() || self.machine.cpu.is_some() => {}
            Vmm::Mediated => return usage(NO_PMU),
            Vmm::Exec(_) => drop(artifacts::find_preload()?),
            Vmm::Patched(_) => drop(artifacts::find_patched_qemu()?),
            Vmm::Ours(_) => drop(artifacts::find_beside(artifacts::VMM)?),
            Vmm::Theirs(exec) => drop(exec.as_ref().map(Exec::find).transpose()?),
        }
        qemu::check(self.machine)
    }

    fn notify(&self) -> Notify {
        match self.vmm {
            Vmm::Stock | Vmm::Mediated | Vmm::Patched(_) => Notify::KvmHost,
            Vmm::Exec(_) | Vmm::Ours(_) | Vmm::Theirs(Some(_)) => Notify::Doorbell,
            Vmm::Theirs(None) => Notify::Tracepoints,
        }
    }

    fn construct(&self, parts: &Parts<'_>, folder: &Path) -> Result<Launch> {
        let Some(images) = parts.images else {
            unreachable!("a KVM host needs images");
        };
        let arch = self.machine.arch;
        let append = parts.command_line(arch);
        let (vmm, mut options) = match self.vmm {
            Vmm::Stock | Vmm::Mediated => (
                job::Vmm::Qemu(arch.qemu().program),
                self.stock_arguments(parts),
            ),
            Vmm::Exec(vmm) => {
                let mut options = self.stock_arguments(parts);
                options.extend(NO_VAPIC.map(str::to_owned));
                options.extend(vmm.options.iter().cloned());
                let (qemu, exec) = (arch.qemu().program, Exec::find(vmm)?);
                (job::Vmm::Exec { qemu, exec }, options)
            }
            Vmm::Patched(vmm) => {
                let mut options = self.stock_arguments(parts);
                // QEMU takes the last of several processors.
                options.extend(["-cpu".to_owned(), patched_cpu(vmm.model)]);
                options.extend(vmm.options.iter().cloned());
                (job::Vmm::patched()?, options)
            }
            Vmm::Ours(vmm) => (job::Vmm::ours()?, direct::arguments(self.machine, vmm)),
            Vmm::Theirs(exec) => {
                let program = TheirProgram::find(parts.request, exec.is_some(), &append)?;
                let exec = exec.as_ref().map(Exec::find).transpose()?;
                let options = theirs::options(parts.request, &append);
                (job::Vmm::Theirs { program, exec }, options)
            }
        };
        let kernel = match (parts.own_kernel(), self.vmm) {
            (Some(own), _) => Some(own.to_owned()),
            (None, Vmm::Ours(_)) => Some(images.boot_kernel(arch)?),
            (None, _) => None,
        };
        let unpacked = self.unpacked(parts, folder)?;
        let host_file = folder.join("host.cpio");
        let trace = parts.request.marked;
        HostJob {
            arch,
            settings: vpmu_measure::HostJob {
                vmm: vmm.in_host(&mut options),
                options,
                append,
                vcpus: self.machine.vcpus,
                // A traced guest has no shares, and a host's tick that comes while a handler runs
                // makes QEMU deliver that interrupt twice.
                skew: self.guest.has_fair_shares(self.machine) && !trace,
                trace,
                settle_ms: settle_ms(parts.phase),
                boots_disk: parts.disk.is_some(),
                mediates: self.mediates(),
            },
            vmm,
            guest: parts.job.as_deref().filter(|_| parts.disk.is_none()),
            initrd: parts.own_initrd(),
            kernel: kernel.as_deref(),
            unpacked: unpacked.as_deref(),
            mediates: parts.host_kernel.filter(|_| self.mediates()),
            disk: parts.disk,
        }
        .archive()?
        .write_file(&host_file)?;
        let initrd = folder.join("initrd");
        concatenate(&[&images.kvm_host(), &host_file], &initrd)?;
        let boot = Boot {
            kernel: match parts.host_kernel.filter(|_| self.mediates()) {
                Some(newest) => newest.kernel(),
                None => images.boot_kernel(arch)?,
            },
            initrd: Some(initrd),
            append: self.host_command_line(),
        };
        let disks = (parts.disk).map(|disk| disk::machine(disk, parts.job.as_deref(), false));
        let mut options = boot.options();
        options.extend(disks.into_iter().flatten());
        let host = Machine {
            vcpus: self.processors(),
            ..self.machine.clone()
        };
        qemu::launch(&host, self.memory(), options)
    }

    fn end(&self, records: &[Record]) -> End {
        let host = records.iter().find_map(|record| match record {
            Record::Host(host) => Some(host),
            _ => None,
        });
        match host {
            None => End::HostReset,
            Some(Host { status: 0, .. }) => End::PoweredOff,
            Some(Host { vmm, status, .. }) => End::VmmFailed {
                vmm: vmm.clone(),
                status: *status,
            },
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
