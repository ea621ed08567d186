//! A virtual machine, from a kernel or a saved machine to the guest's end or the next save.

use std::io;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use kvm_bindings::CpuId;
use kvm_ioctls::VcpuFd;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::hardware::Hardware;
use super::machine::Machine;
use super::ports::{COM1_IRQ, Offers, Ports, PortsState};
use super::saved::{self, Clock, MachineState, Reader, VcpuState, VmState};
use super::vcpu::Vcpu;
use super::{Config, Ending, Error, PmuOptions, Restore, boot, cpuid, kvm, threads};
use vpmu_kvm::{Freeze, Offer, Options, Rdpmc, detect};
use vpmu_measure::{About, Measurement};

/// Runs a guest, its serial line on standard input and output, until it ends or a signal does.
/// Returns its end and its cost, as JSON.
///
/// # Errors
///
/// When the guest cannot be started or saved, or KVM gives up on it. Nothing is left running.
pub fn run(config: &Config) -> Result<(Ending, String), Error> {
    let pmu = config.pmu.as_ref();
    let offer = Offer {
        deadline: config.lazy_deadline,
        ..best(pmu)?
    };
    let rdpmc = rdpmc(pmu);
    let mut hardware = Hardware::new(config.vcpus.into(), config.memory, &offer, rdpmc.is_some())?;
    let entry = boot::load(&hardware.memory, config)?;
    let options = pmu.map_or_else(Options::default, |pmu| pmu.options.clone());
    if let Some(warning) = offer.warning(&options) {
        eprintln!("vpmu-vmm: warning: {warning}");
    }
    let mut vcpus = vcpus(&mut hardware, rdpmc.as_ref(), |hardware, _, fd| {
        let memory = Arc::new(hardware.memory.clone());
        vpmu_kvm::Vcpu::attach(&hardware.vm, fd, &offer, &options, memory)
    })?;
    for vcpu in &mut vcpus {
        vcpu.set_up((vcpu.id == 0).then_some(entry))?;
    }
    Vm {
        hardware,
        vcpus,
        rdpmc,
        pmu,
        save: config.save.as_deref(),
        measure: config.measure,
        ports: PortsState::default(),
        measuring: false,
    }
    .go()
}

/// Continues a guest that was saved, as [`run`] does. Its statistics begin anew.
///
/// # Errors
///
/// When the file holds no machine or is damaged, when this host lacks a feature that the guest was
/// found, or as for [`run`]. The file stays as it is.
pub fn restore(restore: &Restore) -> Result<(Ending, String), Error> {
    let (state, reader) = Reader::open(&restore.file)?;
    let mut pmu = state.pmu_options();
    if let Some(pmu) = &mut pmu {
        pmu.options.policy = restore.policy.unwrap_or(pmu.options.policy);
        pmu.options.skid = restore.skid;
    }
    let pmu = pmu.as_ref();
    let offer = state.offer();
    let rdpmc = rdpmc(pmu);
    if let (Some(rdpmc), Some(saved)) = (&rdpmc, &state.rdpmc) {
        rdpmc.restore(saved);
    }
    let mut hardware = Hardware::new(state.vcpus.len(), state.memory, &offer, rdpmc.is_some())?;
    reader.memory(&hardware.memory)?;
    let leaves = restore.drop_paravirtual && pmu.is_some_and(PmuOptions::is_paravirtual);
    check(&state, pmu.filter(|_| !leaves), &hardware.cpuid)?;
    for (saved, fd) in state.vcpus.iter().zip(&hardware.vcpus) {
        saved.restore(fd)?;
    }
    state.vm.restore(&hardware.vm)?;
    if let (Some(saved), Some(fd)) = (state.vcpus.first(), hardware.vcpus.first()) {
        state.clock.restore(&hardware.vm, fd, saved.tsc_khz())?;
    }
    let options = pmu.map_or_else(Options::default, |pmu| pmu.options.clone());
    let attach = |hardware: &Hardware, n: usize, fd: &VcpuFd| {
        let memory = Arc::new(hardware.memory.clone());
        let saved = &state.vcpus[n].parts;
        if leaves {
            return vpmu_kvm::Vcpu::leave(&hardware.vm, fd, saved, memory);
        }
        let mut parts = vpmu_kvm::Vcpu::attach(&hardware.vm, fd, &offer, &options, memory)?;
        parts.restore(saved).map(|()| parts)
    };
    let mut vcpus = vcpus(&mut hardware, rdpmc.as_ref(), attach)?;
    for (vcpu, saved) in vcpus.iter_mut().zip(&state.vcpus) {
        vcpu.cpuid = saved.cpuid()?;
    }
    Vm {
        hardware,
        vcpus,
        rdpmc,
        pmu,
        save: restore.save.as_deref(),
        measure: restore.measure,
        ports: state.ports,
        measuring: state.measuring && restore.measure,
    }
    .go()
}

/// Returns the best PMU with these options that this host can count for.
fn best(pmu: Option<&PmuOptions>) -> Result<Offer, Error> {
    match pmu {
        None => Ok(Offer::default()),
        Some(pmu) => Ok(detect(pmu.model, &pmu.options)?),
    }
}

/// Returns the record of the places by which RDPMC comes here, if the guest's kernel is not rewritten at load.
fn rdpmc(pmu: Option<&PmuOptions>) -> Option<Arc<Rdpmc>> {
    let pmu = pmu.filter(|pmu| !pmu.is_paravirtual())?;
    match pmu.rdpmc {
        super::Rdpmc::Load => None,
        super::Rdpmc::Run => Some(Arc::default()),
    }
}

/// Checks that this host, whose KVM supports `supported`, has the features that the guest has found
/// of.
pub(super) fn check(
    state: &MachineState,
    pmu: Option<&PmuOptions>,
    supported: &CpuId,
) -> Result<(), Error> {
    let Some(first) = state.vcpus.first() else {
        return Ok(());
    };
    let had = state.offer();
    let mut here = supported.clone();
    cpuid::guest(&mut here, 0, first.tsc_khz(), &had)?;
    let capabilities = had.capability().zip(best(pmu)?.capability());
    saved::check_host(&first.cpuid, &here, capabilities)
}

/// Gives each vCPU its parts, which `attach` makes, with the way of its RDPMC.
fn vcpus(
    hardware: &mut Hardware,
    rdpmc: Option<&Arc<Rdpmc>>,
    attach: impl Fn(&Hardware, usize, &VcpuFd) -> Result<vpmu_kvm::Vcpu, vpmu_kvm::Error>,
) -> Result<Vec<Vcpu>, Error> {
    let fds = std::mem::take(&mut hardware.vcpus);
    fds.into_iter()
        .zip(0..)
        .map(|(fd, id)| {
            let mut parts = attach(hardware, id.into(), &fd)?;
            if let Some(rdpmc) = rdpmc {
                parts.set_rdpmc(Arc::clone(rdpmc));
            }
            Ok(Vcpu {
                parts,
                fd,
                id,
                cpuid: hardware.cpuid.clone(),
            })
        })
        .collect()
}

/// A machine that is ready to run.
struct Vm<'a> {
    hardware: Hardware,
    vcpus: Vec<Vcpu>,
    rdpmc: Option<Arc<Rdpmc>>,
    pmu: Option<&'a PmuOptions>,
    save: Option<&'a Path>,
    /// Whether the guest may measure, and whether it has begun to.
    measure: bool,
    measuring: bool,
    ports: PortsState,
}

impl Vm<'_> {
    fn go(self) -> Result<(Ending, String), Error> {
        if let Some(file) = self.save {
            saved::check_place(file)?;
        }
        let Hardware {
            vm,
            memory,
            interrupt,
            msrs,
            ..
        } = self.hardware;
        let offers = Offers {
            measure: self.measure,
            save: self.save.is_some(),
        };
        let ports = Ports::new(&self.ports, interrupt, io::stdout(), offers)?;
        let parts = self.vcpus.iter().map(|vcpu| &vcpu.parts);
        let machine = Arc::new(Machine {
            vm,
            stop: AtomicBool::new(false),
            ports: Mutex::new(ports),
            measurement: Measurement::default(),
            deadlines: parts.clone().filter_map(vpmu_kvm::Vcpu::deadline).collect(),
        });
        parts.for_each(|parts| machine.measurement.add(parts));
        // Each vCPU is offered the same.
        let first = &self.vcpus[0].parts;
        let (offer, backing) = (first.offer(), first.backing());
        if self.measuring {
            machine.measurement.begin();
        }
        let (ending, mut vcpus) = threads::run(&machine, self.vcpus, self.save.is_some())?;
        if let (Ending::Saved, Some(file)) = (ending, self.save) {
            let measuring = machine.measurement.is_under_way();
            machine.measurement.end();
            let ports = machine.ports();
            let interrupt = ports.interrupt();
            // Raised interrupts pass through a work queue of KVM's. This call waits for the queue.
            kvm(
                "KVM_IRQFD",
                machine.vm.unregister_irqfd(interrupt, COM1_IRQ),
            )?;
            let states = vcpus.iter_mut().map(|vcpu| {
                let parts = vcpu.parts.save();
                VcpuState::of(&vcpu.fd, &vcpu.cpuid, parts, &msrs)
            });
            let states: Vec<_> = states.collect::<Result<_, _>>()?;
            let state = MachineState {
                memory: memory.iter().map(GuestMemoryRegion::len).sum(),
                backing: self.pmu.map(Into::into),
                rdpmc: self.rdpmc.as_ref().map(|rdpmc| rdpmc.save()),
                measuring,
                vcpus: states,
                vm: VmState::of(&machine.vm)?,
                clock: Clock::of(&machine.vm, &vcpus[0].fd)?,
                ports: ports.state(),
            };
            saved::write(file, &state, &memory)?;
        }
        // All threads have ended, so nobody uses the memory any more.
        drop(memory);
        let about = About {
            policy: self.pmu.map(|pmu| pmu.options.policy),
            offer: &offer,
            backing,
            freeze: self.pmu.map_or(Freeze::Vm, |pmu| pmu.options.freeze),
        };
        Ok((ending, machine.measurement.line(&about)))
    }
}
