//! One vCPU's PMU on KVM.
//!
//! # What KVM hands over, and what not
//!
//! With an MSR filter, RDMSR and WRMSR of the PMU's MSRs come to the VMM. The local APIC stays in
//! the kernel, so the VMM reads LVTPC there when it has an interrupt to deliver, and delivers what
//! LVTPC asks for. RDPMC never comes: the guest's kernel has been rewritten to execute
//! `out 0xe6, al` instead (`vpmu-kernel`), which does.
//!
//! LVTPC's mask bit is not set with the delivery as an Intel processor would (SDM vol. 3A,
//! 11.5.1): the only way to is KVM_SET_LAPIC, which writes the whole APIC and could lose an
//! interrupt that another vCPU sends meanwhile. Between delivery and the handler's write of LVTPC a
//! second PMI may thus be delivered. It is an NMI that the guest's processor keeps until the first
//! one's handler is through, and that finds nothing to do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::{ReadMsrExit, SyncReg, VcpuFd, VmFd, WriteMsrExit};
use vpmu::counter::{CounterHost, Report};
use vpmu::x86::intel::{Pmu, PmuConfig, PmuState, RestoreError};
use vpmu::x86::{CounterConfig, Outcome, Ring};
use vpmu_perf::PerfHost;

use crate::error::{Error, kvm};
use crate::lapic::{self, Delivery, Lapic};
use crate::{Exit, Statistics};

/// A rewritten RDPMC writes to this port. Two bytes of code, as RDPMC: `e6 e6`.
pub const RDPMC_PORT: u16 = 0xe6;

/// Has `vcpu` give its registers with each exit, so that RDPMC costs no further system call.
pub fn prepare(vcpu: &mut VcpuFd) {
    vcpu.set_sync_valid_reg(SyncReg::Register);
}

/// One vCPU's PMU and its host.
#[derive(Debug)]
pub struct VcpuPmu<H> {
    pmu: Pmu,
    host: H,
    account: Arc<Mutex<Statistics>>,
}

impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// A PMU out of reset.
    ///
    /// # Errors
    ///
    /// When there can be no such PMU.
    pub fn new(config: PmuConfig, host: H) -> Result<Self, Error> {
        Ok(Self {
            pmu: Pmu::new(config).map_err(Error::Config)?,
            host,
            account: Arc::default(),
        })
    }

    /// What counts.
    pub fn host(&mut self) -> &mut H {
        &mut self.host
    }

    /// What the guest has, up to this moment, in which it does not run. Nothing stops: it can go on.
    ///
    /// Overflows that the host has reported must have been handed over before.
    pub fn save(&mut self) -> PmuState {
        let state = self.pmu.save(&mut self.host);
        self.count_calls();
        state
    }

    /// Goes on from `state`, in place of what was here: what is enabled counts at once. The account
    /// is not the guest's, and stays.
    ///
    /// # Errors
    ///
    /// Refuses the state of a PMU that this one is not. This one is then as it was.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), RestoreError> {
        self.pmu.restore(state, &mut self.host)?;
        self.count_calls();
        Ok(())
    }

    /// The engine, for looking.
    pub fn pmu(&mut self) -> (&mut Pmu, &mut H) {
        (&mut self.pmu, &mut self.host)
    }

    /// The account, which any thread may look into. A VMM may count exits of its own in it.
    pub fn account(&self) -> Arc<Mutex<Statistics>> {
        Arc::clone(&self.account)
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.account.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Host events that the guest has not used since the last call are given back: for any regular
    /// moment, as this host's events follow the vCPU's thread.
    pub fn end_slice(&mut self) {
        self.pmu.end_slice(&mut self.host);
        self.count_calls();
    }

    /// Completes an RDMSR. `false`: no MSR of the PMU, and the guest gets #GP unless the caller
    /// knows better.
    pub fn rdmsr(&mut self, exit: &mut ReadMsrExit<'_>) -> bool {
        self.statistics().count(Exit::MsrRead(exit.index));
        let outcome = self.pmu.rdmsr(exit.index, &mut self.host);
        self.count_calls();
        let (value, error) = match outcome {
            Outcome::Value(value) => (value, 0),
            Outcome::Done | Outcome::GeneralProtection | Outcome::NotHandled => (0, 1),
        };
        *exit.data = value;
        *exit.error = error;
        outcome != Outcome::NotHandled
    }

    /// Completes a WRMSR. `false`: no MSR of the PMU, and the guest gets #GP unless the caller knows
    /// better.
    pub fn wrmsr(&mut self, exit: &mut WriteMsrExit<'_>) -> bool {
        self.statistics().count(Exit::MsrWrite(exit.index));
        let outcome = self.pmu.wrmsr(exit.index, exit.data, &mut self.host);
        self.count_calls();
        *exit.error = u8::from(outcome != Outcome::Done);
        outcome != Outcome::NotHandled
    }

    /// Completes a rewritten RDPMC, which has exited as a write to [`RDPMC_PORT`]. Only the guest's
    /// kernel was rewritten, and user space has no ports, so it is the kernel that executes it.
    ///
    /// # Errors
    ///
    /// When KVM refuses an exception.
    pub fn rdpmc(&mut self, vcpu: &mut VcpuFd) -> Result<(), Error> {
        let index = vcpu.sync_regs().regs.rcx as u32;
        let Some(value) = self.rdpmc_value(index) else {
            return general_protection(vcpu);
        };
        let regs = &mut vcpu.sync_regs_mut().regs;
        regs.rax = value & 0xffff_ffff;
        regs.rdx = value >> 32;
        vcpu.set_sync_dirty_reg(SyncReg::Register);
        Ok(())
    }

    /// What RDPMC gives the guest's kernel with `index` in ECX; `None`: #GP. For a VMM that has
    /// found the instruction by itself.
    pub fn rdpmc_value(&mut self, index: u32) -> Option<u64> {
        self.statistics().count(Exit::Rdpmc);
        let outcome = self.pmu.rdpmc(index, Ring::Kernel, true, &mut self.host);
        self.count_calls();
        match outcome {
            Outcome::Value(value) => Some(value),
            Outcome::Done | Outcome::GeneralProtection | Outcome::NotHandled => None,
        }
    }

    /// A host event has overflowed.
    pub fn overflow(&mut self, counter: u8, report: Report) {
        self.pmu.overflow(counter, report, &mut self.host);
        self.count_calls();
    }

    /// Delivers a PMI that has become due, as LVTPC has it. To be called on the vCPU's thread before
    /// it runs.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn before_run(&mut self, vm: &VmFd, vcpu: &VcpuFd) -> Result<(), Error> {
        if !self.pmu.pmi_due() {
            return Ok(());
        }
        let lapic = Lapic::of(vcpu)?;
        match self.take_pmi(lapic.lvtpc()) {
            None | Some(Delivery::Masked) => Ok(()),
            Some(Delivery::Nmi) => kvm("KVM_NMI", vcpu.nmi()),
            Some(Delivery::Vector(vector)) => lapic::signal(vm, lapic.id(), vector),
        }
    }

    /// How the PMI that is due, if one is, has to be delivered. It is not due any more.
    fn take_pmi(&mut self, lvtpc: u32) -> Option<Delivery> {
        if !self.pmu.take_pmi() {
            return None;
        }
        let delivery = Delivery::of(lvtpc);
        let mut account = self.statistics();
        match delivery {
            Delivery::Masked => account.masked_pmis += 1,
            Delivery::Nmi | Delivery::Vector(_) => account.pmis += 1,
        }
        drop(account);
        Some(delivery)
    }

    fn count_calls(&self) {
        self.statistics().host = self.pmu.statistics();
    }
}

impl VcpuPmu<PerfHost> {
    /// Hands over the overflows that perf has signalled. To be called before the vCPU runs, and after
    /// an exit, before it is completed: what was counted up to the exit comes before the access.
    pub fn take_overflows(&mut self) {
        let overflows = self.host.take_overflows();
        for (counter, report) in overflows {
            self.overflow(counter, report);
        }
    }
}

/// Injects #GP(0) in place of the port write that has exited.
fn general_protection(vcpu: &mut VcpuFd) -> Result<(), Error> {
    const GP: u8 = 13;
    let at = vcpu.sync_regs().regs.rip;
    // KVM steps over the instruction when it is entered again: let it, without running the guest.
    vcpu.set_kvm_immediate_exit(1);
    let _ = vcpu.run();
    vcpu.set_kvm_immediate_exit(0);
    let mut regs = kvm("KVM_GET_REGS", vcpu.get_regs())?;
    regs.rip = at;
    kvm("KVM_SET_REGS", vcpu.set_regs(&regs))?;
    let mut events = kvm("KVM_GET_VCPU_EVENTS", vcpu.get_vcpu_events())?;
    events.exception.injected = 1;
    events.exception.nr = GP;
    events.exception.has_error_code = 1;
    events.exception.error_code = 0;
    kvm("KVM_SET_VCPU_EVENTS", vcpu.set_vcpu_events(&events))
}

#[cfg(test)]
mod tests;
