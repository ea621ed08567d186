//! Where a guest that is followed has stopped, and what it has taken until there.

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_vcpu_events};

use super::trace::{Taken, Trace, are};
use crate::guest::{registers, ring};

/// A vCPU that has stopped.
pub(super) struct Stopped<'a> {
    pub(super) regs: &'a kvm_regs,
    pub(super) sregs: &'a kvm_sregs,
    /// CR2 and CR3 with which the guest set out.
    pub(super) before: (u64, u64),
}

impl Stopped<'_> {
    /// Returns the branches that the guest has taken on its trace; `None`: it is not seen where it was to be.
    pub(super) fn branches<'a>(&self, trace: &'a Trace, is_break: bool) -> Option<Taken<'a>> {
        let (cr2, cr3) = self.before;
        let leaf = trace.leaves.iter().find(|leaf| leaf.ip == self.regs.rip);
        let is_same_space = trace.is_opaque || self.sregs.cr3 == cr3;
        match leaf.filter(|_| is_break) {
            Some(leaf) => {
                let is_ring = ring(self.sregs, self.regs) == leaf.ring;
                let is_faultless = leaf.is_fault || self.sregs.cr2 == cr2;
                let is_expected = are(&leaf.general, &registers(self.regs).general) && is_ring;
                (is_expected && is_faultless && is_same_space).then(|| trace.taken(leaf))
            }
            None => {
                let is_here = is_same_space && self.sregs.cr2 == cr2;
                trace.taken_at(self.regs.rip).filter(|_| is_here)
            }
        }
    }
}

/// Returns whether no event is about to be delivered.
pub(super) fn are_over(events: &kvm_vcpu_events) -> bool {
    let exception = events.exception;
    let is_delivered = exception.injected | exception.pending | events.interrupt.injected;
    (is_delivered | events.nmi.injected | events.smi.pending) == 0
}
