//! A virtual machine, from a kernel or a saved machine to the guest's end or the next save.

use std::io;
use std::path::Path;
use std::sync::Arc;

use kvm_bindings::CpuId;
use serde_json::Value;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::hardware::{Hardware, Shape};
use super::machine::Machine;
use super::ports::{COM1_IRQ, Interrupt, Offers, Ports};
use super::saved::{self, Clock, MachineState, Pmu, Reader, VcpuState, VmState};
use super::slot::Memory;
use super::vcpu::{Start, Vcpu};
use super::{Config, Ending, Error, PmuOptions, Restore, boot, cpuid, kvm, threads};
use vpmu_kvm::{Capability, PMU_DOORBELL_MSR, PMU_PAGE_MSR, ParavirtState, detect};

/// Runs a guest, its serial line on standard input and output, until it ends or a signal does.
/// Returns its end and its cost, as JSON.
///
/// # Errors
///
/// When the guest cannot be started or saved, or KVM gives up on it. Nothing is left running.
pub fn run(config: &Config) -> Result<(Ending, Value), Error> {
    let mut hardware = Hardware::new(Shape {
        vcpus: config.vcpus.into(),
        memory: config.memory,
        pmu_msrs: pmu_msrs(config.pmu, None)?,
        lazy_deadline: config.lazy_deadline,
    })?;
    let entry = boot::load(&hardware.memory, config)?;
    let vcpus = vcpus(&mut hardware, |id| match id {
        0 => Start::Entry(entry),
        _ => Start::Wait,
    });
    let interrupt = Interrupt(line(&hardware.interrupt)?);
    let offers = Offers {
        measure: config.measure,
        save: config.save.is_some(),
    };
    let ports = Ports::new(interrupt, io::stdout(), offers);
    Vm {
        hardware,
        vcpus,
        pmu: config.pmu,
        save: config.save.as_deref(),
        measuring: false,
    }
    .go(ports)
}

/// Continues a guest that was saved, as [`run`] does. Its statistics begin anew.
///
/// # Errors
///
/// When the file holds no machine or is damaged, when this host lacks a feature that the guest was
/// told of, or as for [`run`]. The file stays as it is.
pub fn restore(restore: &Restore) -> Result<(Ending, Value), Error> {
    let (state, reader) = Reader::open(&restore.file)?;
    let pmu = state.pmu_options().map(|pmu| PmuOptions {
        policy: restore.policy.unwrap_or(pmu.policy),
        ..pmu
    });
    let mut hardware = Hardware::new(Shape {
        vcpus: state.vcpus.len(),
        memory: state.memory,
        pmu_msrs: pmu_msrs(pmu, state.pmu.map(|pmu| pmu.capability))?,
        lazy_deadline: state.lazy_deadline(),
    })?;
    reader.memory(&hardware.memory)?;
    let counted = pmu.filter(|_| !restore.drop_paravirtual);
    check(&state, counted, &hardware.cpuid)?;
    for (saved, (fd, _)) in state.vcpus.iter().zip(&hardware.vcpus) {
        saved.restore(fd)?;
    }
    state.vm.restore(&hardware.vm)?;
    if let (Some(saved), Some((fd, _))) = (state.vcpus.first(), hardware.vcpus.first()) {
        state.clock.restore(&hardware.vm, fd, saved.tsc_khz())?;
    }
    for (saved, (fd, deadline)) in state.vcpus.iter().zip(&hardware.vcpus) {
        if let (Some(saved), Some(deadline)) = (&saved.deadline, deadline) {
            deadline.restore(saved, &hardware.vm, fd)?;
        }
    }
    let mut vcpus = vcpus(&mut hardware, |_| Start::Saved);
    for (vcpu, saved) in vcpus.iter_mut().zip(&state.vcpus) {
        vcpu.cpuid = saved.cpuid()?;
        vcpu.pmu = saved.pmu.clone();
        vcpu.paravirtual = saved.paravirtual.clone();
        vcpu.drop_paravirtual = restore.drop_paravirtual;
    }
    let interrupt = Interrupt(line(&hardware.interrupt)?);
    let offers = Offers {
        measure: restore.measure,
        save: restore.save.is_some(),
    };
    let ports = Ports::from_state(&state.ports, interrupt, io::stdout(), offers)?;
    Vm {
        hardware,
        vcpus,
        pmu,
        save: restore.save.as_deref(),
        measuring: state.measuring && restore.measure,
    }
    .go(ports)
}

/// Returns the MSRs of a PMU with these options, whose guest was `told` this before. `None`: everything that this host
/// can count.
fn pmu_msrs(options: Option<PmuOptions>, told: Option<Capability>) -> Result<Vec<u32>, Error> {
    let Some(options) = options else {
        return Ok(Vec::new());
    };
    if options.paravirtual {
        return Ok(vec![PMU_PAGE_MSR, PMU_DOORBELL_MSR]);
    }
    let capability = match told {
        Some(capability) => capability,
        None => detect(&options.for_guest(None))?,
    };
    Ok(vpmu_kvm::pmu_msrs(&capability))
}

/// Checks that this host, whose KVM supports `supported`, has the features that the guest was told
/// of.
pub(super) fn check(
    state: &MachineState,
    options: Option<PmuOptions>,
    supported: &CpuId,
) -> Result<(), Error> {
    let Some(first) = state.vcpus.first() else {
        return Ok(());
    };
    let best = options
        .map(|options| detect(&options.for_guest(None)))
        .transpose()?;
    let capability = state.pmu.as_ref().map(|pmu| &pmu.capability);
    let mut here = supported.clone();
    let lazy = state.lazy_deadline();
    let offer = first.paravirtual.as_ref().map(ParavirtState::offer);
    let khz = first.tsc_khz();
    cpuid::guest(&mut here, 0, khz, capability, lazy, offer.as_ref())?;
    Ok(saved::check_host(
        &first.cpuid,
        &here,
        capability.zip(best.as_ref()),
    )?)
}

fn vcpus(hardware: &mut Hardware, start: impl Fn(u8) -> Start) -> Vec<Vcpu> {
    let vcpus = std::mem::take(&mut hardware.vcpus);
    (0..)
        .zip(vcpus)
        .map(|(id, (fd, deadline))| Vcpu {
            fd,
            id,
            start: start(id),
            cpuid: hardware.cpuid.clone(),
            deadline,
            memory: Memory(hardware.memory.clone()),
            pmu: None,
            paravirtual: None,
            drop_paravirtual: false,
        })
        .collect()
}

fn line(interrupt: &EventFd) -> Result<EventFd, Error> {
    interrupt.try_clone().map_err(|e| Error::Os("eventfd", e))
}

/// A machine that is ready to run.
struct Vm<'a> {
    hardware: Hardware,
    vcpus: Vec<Vcpu>,
    pmu: Option<PmuOptions>,
    save: Option<&'a Path>,
    measuring: bool,
}

impl Vm<'_> {
    fn go(self, ports: Ports<io::Stdout>) -> Result<(Ending, Value), Error> {
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
        let deadlines = self.vcpus.iter().filter_map(|vcpu| vcpu.deadline.clone());
        let machine = Arc::new(Machine::new(vm, ports, deadlines.collect()));
        if self.measuring {
            machine.begin_measuring();
        }
        let (ending, vcpus) = threads::run(&machine, self.vcpus, self.pmu, self.save.is_some())?;
        if let (Ending::Saved, Some(file), Some(first)) = (ending, self.save, vcpus.first()) {
            let measuring = machine.measures();
            machine.end_measuring();
            let ports = machine.ports().state();
            // Raised interrupts pass through a work queue of KVM's. This call waits for the queue.
            kvm(
                "KVM_IRQFD",
                machine.vm.unregister_irqfd(&interrupt, COM1_IRQ),
            )?;
            let states = vcpus.iter().map(|vcpu| {
                let pmu = (vcpu.pmu.clone(), vcpu.paravirtual.clone());
                let deadline = vcpu.deadline.as_ref().map(|deadline| deadline.save());
                VcpuState::of(&vcpu.fd, &vcpu.cpuid, pmu, deadline, &msrs)
            });
            let state = MachineState {
                memory: memory.iter().map(GuestMemoryRegion::len).sum(),
                pmu: told(first, self.pmu),
                measuring,
                vcpus: states.collect::<Result<_, _>>()?,
                vm: VmState::of(&machine.vm)?,
                clock: Clock::of(&machine.vm, &first.fd)?,
                ports,
            };
            saved::write(file, &state, &memory)?;
        }
        // All threads have ended, so nobody uses the memory any more.
        drop(memory);
        Ok((ending, machine.report(self.pmu)))
    }
}

/// Returns the PMU that the guest has been told of.
fn told(vcpu: &Vcpu, options: Option<PmuOptions>) -> Option<Pmu> {
    let state = vcpu.pmu.as_ref()?;
    options.map(|options| Pmu {
        capability: state.capability,
        policy: options.policy,
        approximate_instructions: options.approximate_instructions,
    })
}
