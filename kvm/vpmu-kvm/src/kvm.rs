//! A vCPU of KVM's: its exits, and the interrupts for it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vpmu::counter::CounterHost;
use vpmu::x86::{CounterConfig, Outcome, Ring};
use vpmu_perf::{Flag, KICKED, PerfHost, PerfOptions};

use crate::deadline::Deadline;
use crate::error::Error;
use crate::guest::{self, VcpuGuest};
use crate::lapic::{self, Lapic, Pmi};
use crate::memory::GuestMemory;
use crate::pmu::VcpuPmu;
use crate::rdpmc::{self, VcpuRdpmc};
use crate::run::{Returned, RunPage};
use crate::stats::{Exit, Shared};
use crate::sys;
use crate::thread::unset;

/// A rewritten RDPMC writes to this port. Two bytes of code, as RDPMC: `e6 e6`.
pub const RDPMC_PORT: u16 = 0xe6;
const RDPMC_LENGTH: u64 = 2;

/// The way on after a KVM_RUN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an exit that is the VMM's is to be handled"]
pub enum AfterRun {
    /// The exit was completed: run the vCPU again.
    Completed,
    /// There was no exit: an overflow has taken the vCPU out of the guest, or kept it from entering, and
    /// `immediate_exit` is not 1. Run the vCPU again. A signal of the VMM's own may have come at the same time.
    Kicked,
    /// The exit, or the interruption by a signal, is the VMM's, and is left as KVM has made it.
    Vmm,
}

/// A vCPU of KVM's, and what answers its guest's accesses beside the PMU.
#[derive(Debug)]
pub(crate) struct OnKvm {
    pub(crate) vm: Arc<OwnedFd>,
    pub(crate) vcpu: Arc<OwnedFd>,
    pub(crate) run: Arc<RunPage>,
    /// The RIP of an exited RDPMC that must fault, once KVM has stepped over it.
    pub(crate) fault: Option<u64>,
    /// The way of RDPMC to the VMM where no kernel is rewritten.
    pub(crate) rdpmc: Option<VcpuRdpmc>,
    /// `None`: the guest has no lazy deadline.
    pub(crate) deadline: Option<Arc<Deadline>>,
    pub(crate) statistics: Shared,
}

impl OnKvm {
    pub(crate) fn new(vm: &impl AsRawFd, vcpu: &impl AsRawFd) -> Result<Self, Error> {
        sys::check_vm(vm)?;
        let (vm, vcpu) = (sys::duplicate(vm)?, sys::duplicate(vcpu)?);
        // Descriptors of other kinds do not have this call.
        sys::lapic(&vcpu).map_err(|error| match error {
            Error::Kvm(_, errno) => Error::NoLapic(errno),
            error => error,
        })?;
        Ok(Self {
            // A mapping of its own: the VMM's binding need not lend its.
            run: Arc::new(RunPage::map(&vcpu)?),
            vm: Arc::new(vm),
            // Shared with what reads the guest's registers in a sample, which may be on its way while this object moves.
            vcpu: Arc::new(vcpu),
            fault: None,
            rdpmc: None,
            deadline: None,
            statistics: Shared::new(),
        })
    }

    /// Makes the host of a PMU on the calling thread. `records`: the guest's memory, where samples become records.
    pub(crate) fn host(
        &self,
        perf: PerfOptions,
        records: Option<Arc<dyn GuestMemory>>,
    ) -> Result<PerfHost, Error> {
        let mut host = PerfHost::new(perf)?;
        let vcpu = Arc::clone(&self.vcpu);
        // Without the vCPU's own answer the ring is that of perf's last sample, some 50 microseconds old.
        host.set_ring(move || guest::ring_of(&vcpu));
        if let Some(memory) = records {
            let (vcpu, run) = (Arc::clone(&self.vcpu), Arc::clone(&self.run));
            host.set_guest(VcpuGuest::new(vcpu, run, memory));
        }
        Ok(host)
    }

    /// Delivers the interrupt that is due, and prepares the page for the next KVM_RUN.
    pub(crate) fn before_run<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<(), Error> {
        if let Some(pmu) = pmu
            && pmu.pmi_is_due()
        {
            // A paravirtual PMU's interrupt is an NMI, whatever LVTPC says.
            let lapic = match pmu.is_architectural() {
                true => Some(Lapic::of(&self.vcpu)?),
                false => None,
            };
            let lvtpc = lapic.as_ref().map_or(lapic::NMI, Lapic::lvtpc);
            match (pmu.take_pmi(lvtpc), lapic) {
                // KVM_NMI asks no local APIC, so that it also reaches a vCPU whose APIC is disabled.
                (Some(Pmi::Nmi), _) => sys::nmi(&self.vcpu)?,
                (Some(Pmi::Vector(vector)), Some(lapic)) => {
                    lapic::signal(&self.vm, lapic.id(), vector)?;
                }
                (Some(Pmi::Vector(_)), None) | (None, _) => {}
            }
        }
        self.run.before_run();
        if self.fault.is_some() {
            // The VMM's own request has the same effect.
            let flag = self.run.flag();
            let _ = flag.compare_exchange(0, KICKED, Ordering::SeqCst, Ordering::Relaxed);
            self.run.expect_regs();
        }
        Ok(())
    }

    /// Completes the exit if it is one of the parts'. `overflowed`: an overflow was signalled during the run.
    pub(crate) fn after_run<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
        overflowed: bool,
    ) -> Result<AfterRun, Error> {
        let completed = match self.run.returned() {
            Returned::NoExit => {
                self.statistics.lock().count(Exit::Kick);
                return self.no_exit(overflowed);
            }
            // An access that no part knows stays as KVM has made it, so that the VMM's own handler finds it untouched.
            Returned::Rdmsr(index) => {
                let outcome = self.rdmsr(index, pmu)?;
                self.run.complete_msr(outcome)
            }
            Returned::Wrmsr(index, value) => {
                let outcome = self.wrmsr(index, value, pmu)?;
                self.run.complete_msr(outcome)
            }
            Returned::Out(RDPMC_PORT) => self.rdpmc(pmu)?,
            Returned::Out(rdpmc::ENTRY_PORT) => match &self.rdpmc {
                Some(rdpmc) => rdpmc.entered(&self.vcpu, &self.run, pmu)?,
                None => false,
            },
            Returned::Out(_) | Returned::Debug | Returned::Other => false,
        };
        Ok(match completed {
            true => AfterRun::Completed,
            false => AfterRun::Vmm,
        })
    }

    /// Forgets what was to become of the last exit.
    pub(crate) fn reset(&mut self) {
        if self.fault.take().is_some() {
            unset(&*self.run);
        }
    }

    fn no_exit(&mut self, overflowed: bool) -> Result<AfterRun, Error> {
        // Read before a fault takes its own request back.
        let flag = self.run.flag().load(Ordering::SeqCst);
        self.inject_fault()?;
        Ok(match flag {
            KICKED => AfterRun::Kicked,
            // Another kick than the flag's leaves no trace there.
            // A 1 is the VMM's, whatever else has happened: it must see EINTR, or its pause would be lost.
            0 if overflowed => AfterRun::Kicked,
            _ => AfterRun::Vmm,
        })
    }

    fn rdmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: u32,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<Outcome, Error> {
        if !self.permits(msr)? {
            return Ok(Outcome::GeneralProtection);
        }
        if let Some(rdpmc) = &self.rdpmc {
            let outcome = rdpmc.rdmsr(msr, &self.vcpu, &self.run, pmu);
            if outcome != Outcome::NotHandled {
                return Ok(outcome);
            }
        }
        let of_pmu = pmu.as_mut().map(|pmu| pmu.rdmsr(msr));
        Ok(self.or_of_deadline(of_pmu, Exit::MsrRead(msr), |deadline| deadline.rdmsr(msr)))
    }

    fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        msr: u32,
        value: u64,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<Outcome, Error> {
        if !self.permits(msr)? {
            return Ok(Outcome::GeneralProtection);
        }
        let of_pmu = pmu.as_mut().map(|pmu| pmu.wrmsr(msr, value));
        Ok(
            self.or_of_deadline(of_pmu, Exit::MsrWrite(msr), |deadline| {
                deadline.wrmsr(msr, value)
            }),
        )
    }

    /// Returns whether the guest may have this register: only with RDPMC it has a PMU.
    fn permits(&mut self, msr: u32) -> Result<bool, Error> {
        match &mut self.rdpmc {
            Some(rdpmc) => rdpmc.permits(msr, &self.vcpu),
            None => Ok(true),
        }
    }

    /// Returns the outcome of an access that the PMU was asked for first, as nearly all accesses are for it.
    fn or_of_deadline(
        &self,
        of_pmu: Option<Outcome>,
        exit: Exit,
        of_deadline: impl FnOnce(&Deadline) -> Outcome,
    ) -> Outcome {
        let (None | Some(Outcome::NotHandled), Some(deadline)) = (of_pmu, &self.deadline) else {
            return of_pmu.unwrap_or(Outcome::NotHandled);
        };
        let outcome = of_deadline(deadline);
        // The PMU counts its own accesses.
        if outcome != Outcome::NotHandled {
            self.statistics.lock().count(exit);
        }
        outcome
    }

    /// Completes a rewritten RDPMC. Only the guest's kernel was rewritten: from a process that has been given ports (iopl,
    /// ioperm) the write is none, and CR4.PCE does not matter. Returns `false` for it, and where no PMU has RDPMC: the port
    /// is the VMM's.
    fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        pmu: &mut Option<VcpuPmu<H>>,
    ) -> Result<bool, Error> {
        let Some(pmu) = pmu else {
            return Ok(false);
        };
        let (rcx, rip) = self.run.rcx_and_rip();
        // Processes have the lower half. The question would take a system call for each RDPMC of a kernel.
        let is_upper = rip >> 63 != 0;
        if !is_upper && sys::sregs(&self.vcpu)?.ss.dpl != 0 {
            return Ok(false);
        }
        // RDPMC takes ECX, whatever the high half of RCX holds (SDM vol. 2B).
        match pmu.rdpmc(rcx as u32, Ring::Kernel) {
            Outcome::NotHandled => return Ok(false),
            // RDPMC clears the high halves of RAX and RDX in 64-bit mode.
            Outcome::Value(value) => self.run.set_rax_and_rdx(value & 0xffff_ffff, value >> 32),
            Outcome::Done | Outcome::GeneralProtection => self.fault = Some(rip),
        }
        Ok(true)
    }

    /// Injects #GP(0) in place of the RDPMC that KVM has stepped over.
    fn inject_fault(&mut self) -> Result<(), Error> {
        const GP: u8 = 13;
        let Some(at) = self.fault else {
            return Ok(());
        };
        if !self.run.has_regs() {
            // The VMM has not called KVM_RUN.
            return Ok(());
        }
        self.fault = None;
        unset(&*self.run);
        let mut regs = sys::regs(&self.vcpu)?;
        // Where KVM's emulator has decoded the port write, RIP was behind the instruction at the exit already, and has not
        // moved since; else KVM has stepped over it in the KVM_RUN that has just returned.
        regs.rip = match regs.rip == at {
            true => at.wrapping_sub(RDPMC_LENGTH),
            false => at,
        };
        sys::set_regs(&self.vcpu, &regs)?;
        sys::inject(&self.vcpu, GP, Some(0))
    }
}

#[cfg(test)]
mod tests;
