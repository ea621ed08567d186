//! What is executed for the guest ([`super::bridge`]).

use vpmu::x86::{Ring, lbr};
use vpmu_perf::PerfHost;

use super::Follower;
use super::bridge::Start;
use crate::error::Error;
use crate::guest::ring;
use crate::kvm::OnKvm;
use crate::pmu::VcpuPmu;
use crate::stats::Executed;
use crate::sys::{self, debug};

// Registers are given to KVM with the next run, which comes right behind `before_run`: a VMM that saves the vCPU does so with
// neither them nor the memory that goes with them.
impl Follower {
    /// Plans a bridge behind a read of a branch record. Call this when an exit has been completed.
    pub(crate) fn bridge(&mut self, kvm: &OnKvm, pmu: &mut VcpuPmu<PerfHost>) -> Result<(), Error> {
        let Some(bridge) = &mut self.bridge else {
            return Ok(());
        };
        let Some((_, value)) = (kvm.run.answered()).filter(|&(msr, _)| lbr::is_record(msr)) else {
            return Ok(());
        };
        // An interrupt that is due comes first.
        let is_next = self.run.is_none() && !pmu.pmi_is_due() && pmu.branches_awaited() == 0;
        let Some(regs) = kvm.run.regs().filter(|_| is_next && bridge.is_due()) else {
            return Ok(());
        };
        let sregs = sys::sregs(&kvm.vcpu)?;
        let start = Start {
            regs: &regs,
            sregs: &sregs,
            // The kernel's own pages have no keys here.
            pkru: &|| None,
        };
        let read = |msr| pmu.read_record(msr);
        let is_planned = bridge.plan_reads(&start, &*self.memory, value, read);
        // What costs a call is asked last.
        if is_planned && (kvm.run.is_elsewhere() || debug::breakpoints(&kvm.vcpu)? != 0) {
            bridge.forget();
        }
        Ok(())
    }

    /// Takes branches for the guest, as many as are `wanted` and as can be. Nothing is left for KVM to complete.
    pub(super) fn take(
        &mut self,
        kvm: &OnKvm,
        pmu: &mut VcpuPmu<PerfHost>,
        wanted: usize,
    ) -> Result<(), Error> {
        let filter = pmu.branch_filter().filter(|filter| !filter.call_stack);
        let (Some(bridge), Some(filter)) = (&mut self.bridge, filter) else {
            return Ok(());
        };
        let regs = match kvm.run.regs() {
            Some(regs) => regs,
            None => sys::regs(&kvm.vcpu)?,
        };
        let sregs = match &self.run {
            Some(run) if run.exits > 0 => kvm.run.sregs(),
            _ => sys::sregs(&kvm.vcpu)?,
        };
        let start = Start {
            regs: &regs,
            sregs: &sregs,
            pkru: &|| self.keys.pkru(&kvm.vcpu),
        };
        if !bridge.plan_branches(&start, &*self.memory, filter, wanted) {
            return Ok(());
        }
        let is_free = !kvm.run.is_elsewhere() && {
            let events = sys::events(&kvm.vcpu)?;
            let is_shadowed = events.interrupt.shadow != 0;
            !is_shadowed && super::are_over(&events) && debug::breakpoints(&kvm.vcpu)? == 0
        };
        if !is_free {
            bridge.forget();
        }
        let ring = ring(&sregs, &regs);
        let Some(crossed) = bridge.commit(&regs, &*self.memory) else {
            return Ok(());
        };
        match crossed {
            Err(_) => pmu.count_bridge(None, ring),
            Ok((regs, executed)) => {
                kvm.run.set_regs(&regs);
                pmu.count_bridge(Some(executed), ring);
                pmu.take_branches(bridge.taken(executed.taken).iter());
            }
        }
        Ok(())
    }

    /// Crosses the bridge, if there is one. KVM has completed the read before it.
    pub(super) fn cross(&mut self, kvm: &OnKvm, pmu: &mut VcpuPmu<PerfHost>) {
        let (Some(bridge), Some(regs)) = (&mut self.bridge, kvm.run.regs()) else {
            return;
        };
        let Some(crossed) = bridge.commit(&regs, &*self.memory) else {
            return;
        };
        let executed: Option<Executed> = crossed.ok().map(|(regs, executed)| {
            kvm.run.set_regs(&regs);
            executed
        });
        pmu.count_bridge(executed, Ring::Kernel);
    }
}
