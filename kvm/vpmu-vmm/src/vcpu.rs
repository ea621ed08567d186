//! One virtual processor: its thread, from the first instruction to the machine's end.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu_kvm::{AfterRun, Exit};

use super::machine::Machine;
use super::ports::Request;
use super::{Ending, Error, boot, cpuid, kvm};

/// A vCPU that does not run.
pub(super) struct Vcpu {
    pub(super) fd: VcpuFd,
    pub(super) id: u8,
    /// KVM's supported features. Once the vCPU is set up or restored, the CPUID that the guest has.
    pub(super) cpuid: CpuId,
    /// Its PMU and its deadline, which continue where they were if they were saved.
    pub(super) parts: vpmu_kvm::Vcpu,
}

impl Vcpu {
    /// Runs the vCPU, on the calling thread, until the machine ends. Then no exit waits for its completion, unless this
    /// vCPU ended the machine.
    pub(super) fn run(&mut self, machine: &Machine) -> Result<Ending, Error> {
        let ending = self.go_round(machine);
        // The machine's own thread saves what is left.
        self.parts.release_thread();
        ending
    }

    fn go_round(&mut self, machine: &Machine) -> Result<Ending, Error> {
        let statistics = self.parts.statistics();
        let count = |exit| {
            let mut statistics = statistics.lock().unwrap_or_else(PoisonError::into_inner);
            statistics.count(exit);
        };
        let mut ending = Ending::Interrupted;
        loop {
            // The others stop when this one has said that the guest is to be saved: the first word decides.
            let saving = matches!(ending, Ending::Saved);
            let stop = saving || machine.stop.load(Ordering::Relaxed);
            self.parts.before_run()?;
            if stop {
                // The previous exit is still to be completed, without the guest going on.
                self.fd.set_kvm_immediate_exit(1);
            }
            let exit = self.fd.run();
            let completed = self.parts.after_run()? == AfterRun::Completed;
            let exit = match exit {
                Ok(_) if completed => continue,
                Ok(exit) => exit,
                // EINTR is a signal. EAGAIN is a vCPU that has not been started.
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {
                    self.fd.set_kvm_immediate_exit(0);
                    if stop {
                        return Ok(ending);
                    }
                    continue;
                }
                Err(error) => return Err(Error::Kvm("KVM_RUN", error)),
            };
            match serve(exit, machine, count)? {
                None => {}
                // Once the exit is completed.
                Some(Ending::Saved) => ending = Ending::Saved,
                Some(ending) => return Ok(ending),
            }
        }
    }

    /// Makes it a new guest's. The boot processor begins at `entry`; the others wait for its call.
    pub(super) fn set_up(&mut self, entry: Option<u64>) -> Result<(), Error> {
        const MISC_ENABLE: u32 = 0x1a0;
        const FAST_STRINGS: u64 = 1 << 0;
        let offer = self.parts.offer();
        let tsc_khz = kvm("KVM_GET_TSC_KHZ", self.fd.get_tsc_khz())?;
        cpuid::guest(&mut self.cpuid, self.id, tsc_khz, &offer)?;
        kvm("KVM_SET_CPUID2", self.fd.set_cpuid2(&self.cpuid))?;
        let misc = kvm_msr_entry {
            index: MISC_ENABLE,
            data: offer.misc_enable(FAST_STRINGS),
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
        if let Some(entry) = entry {
            kvm("KVM_SET_SREGS", boot::set_registers(&self.fd, entry))?;
        }
        Ok(())
    }
}

/// Completes an exit that is not the parts'. Returns how the guest ends by it; `None`: the guest goes on.
fn serve(
    exit: VcpuExit<'_>,
    machine: &Machine,
    count: impl Fn(Exit),
) -> Result<Option<Ending>, Error> {
    match exit {
        VcpuExit::X86Rdmsr(exit) => {
            count(Exit::MsrRead(exit.index));
            *exit.error = 1;
        }
        VcpuExit::X86Wrmsr(exit) => {
            count(Exit::MsrWrite(exit.index));
            *exit.error = 1;
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
                Some(Request::End(ending)) => return Ok(Some(ending)),
                Some(Request::BeginMeasuring) => machine.measurement.begin(),
                Some(Request::EndMeasuring) => machine.measurement.end(),
            }
        }
        VcpuExit::MmioRead(_, data) => {
            count(Exit::Memory);
            data.fill(0xff);
        }
        VcpuExit::MmioWrite(..) => count(Exit::Memory),
        VcpuExit::Shutdown => return Ok(Some(Ending::TripleFault)),
        VcpuExit::SystemEvent(..) => return Ok(Some(Ending::PowerOff)),
        VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen => count(Exit::Other),
        exit => return Err(Error::Stopped(format!("{exit:?}"))),
    }
    Ok(None)
}
