//! One virtual processor: its thread, from the first instruction to the machine's end.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu_kvm::pebs::misc_enable;
use vpmu_kvm::{Capability, Exit, Options, ParavirtState, State};

use super::boot::{self, Entry};
use super::machine::Machine;
use super::pmu::GuestPmu;
use super::ports::Request;
use super::slot::{Deadline, Memory};
use super::{Ending, Error, PmuOptions, cpuid, kvm};

/// A vCPU that does not run.
pub(super) struct Vcpu {
    pub(super) fd: VcpuFd,
    pub(super) id: u8,
    pub(super) start: Start,
    /// KVM's supported features. Once the vCPU has run, the CPUID that the guest was told.
    pub(super) cpuid: CpuId,
    pub(super) deadline: Option<Deadline>,
    /// The memory that holds the page of a paravirtual PMU.
    pub(super) memory: Memory,
    /// The PMU's state, when the vCPU has run, or continues from a saved one.
    pub(super) pmu: Option<State>,
    /// The paravirtual PMU's state.
    pub(super) paravirtual: Option<ParavirtState>,
    /// Whether the paravirtual PMU leaves its guest.
    pub(super) drop_paravirtual: bool,
}

/// The beginning of a vCPU.
#[derive(Clone, Copy, Debug)]
pub(super) enum Start {
    /// With its first instruction.
    Entry(Entry),
    /// With the boot processor's call.
    Wait,
    /// Where it was saved: KVM has its state, and `pmu` holds its PMU's.
    Saved,
}

impl Vcpu {
    /// Runs the vCPU, on the calling thread, until the machine ends. Then no exit waits for its completion, unless this
    /// vCPU ended the machine.
    pub(super) fn run(
        &mut self,
        machine: &Machine,
        options: Option<PmuOptions>,
        others_are_ready: impl FnOnce() -> bool,
    ) -> Result<Ending, Error> {
        let tsc_khz = kvm("KVM_GET_TSC_KHZ", self.fd.get_tsc_khz())?;
        let mut pmu = match options {
            Some(options) => Some(self.attach_pmu(machine, options)?),
            None => None,
        };
        if let Some(pmu) = &pmu {
            machine.say_pmu(pmu.capability(), pmu.backing());
        }
        if !matches!(self.start, Start::Saved) {
            let lazy = self.deadline.is_some();
            let (capability, offer) = match &pmu {
                Some(pmu) => (pmu.capability(), pmu.offer()),
                None => (None, None),
            };
            let capability = capability.as_ref();
            cpuid::guest(&mut self.cpuid, self.id, tsc_khz, capability, lazy, offer)?;
            kvm("KVM_SET_CPUID2", self.fd.set_cpuid2(&self.cpuid))?;
            self.set_up(capability)?;
        }
        let statistics = match &pmu {
            Some(pmu) => pmu.statistics(),
            None => Arc::default(),
        };
        machine.add_statistics(Arc::clone(&statistics));
        let count = |exit| {
            let mut statistics = statistics.lock().unwrap_or_else(PoisonError::into_inner);
            statistics.count(exit);
        };

        // No vCPU runs before each has all its state: a guest continues whole or not at all.
        if !others_are_ready() {
            return Ok(Ending::Interrupted);
        }
        let mut ending = Ending::Interrupted;
        loop {
            let stop = machine.stop.load(Ordering::Relaxed);
            if let Some(pmu) = &mut pmu {
                pmu.before_run()?;
            }
            if stop {
                // The previous exit is still to be completed, without the guest going on.
                self.fd.set_kvm_immediate_exit(1);
            } else if let Some(deadline) = &self.deadline {
                deadline.before_run(&machine.vm, &self.fd)?;
            }
            let exit = self.fd.run();
            let ours = match &mut pmu {
                Some(pmu) => pmu.after_run()?,
                None => false,
            };
            let exit = match exit {
                Ok(_) if ours => continue,
                Ok(exit) => exit,
                // EINTR is a signal. EAGAIN is a vCPU that has not been started.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    self.fd.set_kvm_immediate_exit(0);
                    if stop {
                        break;
                    }
                    if pmu.is_none() {
                        count(Exit::Kick);
                    }
                    continue;
                }
                Err(error) => return Err(Error::Kvm("KVM_RUN", error)),
            };
            match serve(exit, machine, self.deadline.as_ref(), count)? {
                Served::Yes => {}
                Served::Saving => ending = Ending::Saved,
                Served::Last(ending) => return Ok(ending),
            }
        }
        match &mut pmu {
            None => {}
            Some(GuestPmu::Architectural(pmu)) => self.pmu = Some(pmu.save()),
            Some(GuestPmu::Paravirtual(pmu)) => self.paravirtual = Some(pmu.save()),
        }
        Ok(ending)
    }

    fn set_up(&self, pmu: Option<&Capability>) -> Result<(), Error> {
        const MISC_ENABLE: u32 = 0x1a0;
        const FAST_STRINGS: u64 = 1 << 0;
        let unavailable = match pmu {
            Some(Capability::Intel(pmu)) => pmu.misc_enable(),
            Some(Capability::Amd(_)) | None => {
                misc_enable::BTS_UNAVAILABLE | misc_enable::PEBS_UNAVAILABLE
            }
        };
        let misc = kvm_msr_entry {
            index: MISC_ENABLE,
            data: FAST_STRINGS | unavailable,
            ..Default::default()
        };
        let msrs = Msrs::from_entries(&[misc]).expect("one MSR fits");
        kvm("KVM_SET_MSRS", self.fd.set_msrs(&msrs))?;

        // The 8259s are at LINT0, and the NMI button is at LINT1.
        let mut lapic = kvm("KVM_GET_LAPIC", self.fd.get_lapic())?;
        for (offset, mode) in [(0x350, 0x700_u32), (0x360, 0x400)] {
            for (byte, value) in lapic.regs[offset..].iter_mut().zip(mode.to_le_bytes()) {
                *byte = value.cast_signed();
            }
        }
        kvm("KVM_SET_LAPIC", self.fd.set_lapic(&lapic))?;
        if let Start::Entry(entry) = self.start {
            kvm("KVM_SET_SREGS", boot::set_registers(&self.fd, entry))?;
        }
        Ok(())
    }
}

/// The result of an exit for the guest.
enum Served {
    /// The guest goes on.
    Yes,
    /// The guest is saved, once no vCPU runs.
    Saving,
    /// The guest has ended.
    Last(Ending),
}

/// Completes an exit that is not the PMU's.
fn serve(
    exit: VcpuExit<'_>,
    machine: &Machine,
    deadline: Option<&Deadline>,
    count: impl Fn(Exit),
) -> Result<Served, Error> {
    match exit {
        VcpuExit::X86Rdmsr(exit) => {
            count(Exit::MsrRead(exit.index));
            let value = deadline.and_then(|deadline| deadline.rdmsr(exit.index));
            *exit.error = u8::from(value.is_none());
            *exit.data = value.unwrap_or_default();
        }
        VcpuExit::X86Wrmsr(exit) => {
            count(Exit::MsrWrite(exit.index));
            let done = deadline.and_then(|deadline| deadline.wrmsr(exit.index, exit.data));
            *exit.error = u8::from(done != Some(Ok(())));
        }
        VcpuExit::IoIn(port, data) => {
            count(Exit::Port(port));
            machine.ports().read(port, data);
        }
        VcpuExit::IoOut(port, data) => {
            count(Exit::Port(port));
            let request = machine.ports().write(port, data);
            match request {
                None => {}
                Some(Request::End(ending)) => return Ok(Served::Last(ending)),
                Some(Request::BeginMeasuring) => machine.begin_measuring(),
                Some(Request::EndMeasuring) => machine.end_measuring(),
                Some(Request::Save) => {
                    machine.stop.store(true, Ordering::Relaxed);
                    return Ok(Served::Saving);
                }
            }
        }
        VcpuExit::MmioRead(_, data) => {
            count(Exit::Memory);
            data.fill(0xff);
        }
        VcpuExit::MmioWrite(..) => count(Exit::Memory),
        VcpuExit::Shutdown => return Ok(Served::Last(Ending::TripleFault)),
        VcpuExit::SystemEvent(..) => return Ok(Served::Last(Ending::PowerOff)),
        VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen => count(Exit::Other),
        exit => return Err(Error::Stopped(format!("{exit:?}"))),
    }
    Ok(Served::Yes)
}

impl PmuOptions {
    /// Returns the options for a guest that was told this before. `None`: everything that this host
    /// can count.
    pub(super) fn for_guest(self, told: Option<Capability>) -> Options {
        Options {
            model: self.model,
            perfmon: self.perfmon,
            capability: told,
            policy: self.policy,
            approximate_instructions: self.approximate_instructions,
            pebs: self.pebs,
            ..Options::default()
        }
    }
}
