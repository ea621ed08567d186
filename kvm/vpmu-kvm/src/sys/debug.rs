//! Breakpoints of the VMM's in its guest.

use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_SET_GUEST_DEBUG2, KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_USE_HW_BP,
    kvm_guest_debug,
};

use super::{GET_DEBUGREGS, GET_VCPU_EVENTS, SET_GUEST_DEBUG, check_extension};
use crate::error::Error;

const BREAK: u32 = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP | KVM_GUESTDBG_BLOCKIRQ;

/// Returns whether KVM has breakpoints for the VMM, and keeps interrupts waiting.
pub(crate) fn can_break(vm: &impl AsRawFd) -> bool {
    check_extension(vm, KVM_CAP_SET_GUEST_DEBUG2) & BREAK == BREAK
}

/// Has the vCPU exit before it executes one of these instructions. Interrupts wait.
pub(crate) fn break_at(vcpu: &impl AsRawFd, places: &[Option<u64>; 4]) -> Result<(), Error> {
    let mut debug = kvm_guest_debug {
        control: BREAK,
        ..Default::default()
    };
    for (n, place) in places.iter().flatten().enumerate() {
        debug.arch.debugreg[n] = *place;
        // A global breakpoint of an instruction.
        debug.arch.debugreg[7] |= 2 << (2 * n);
    }
    SET_GUEST_DEBUG.set(vcpu, &debug)
}

/// Ends what [`break_at`] has begun.
pub(crate) fn no_breaks(vcpu: &impl AsRawFd) -> Result<(), Error> {
    SET_GUEST_DEBUG.set(vcpu, &kvm_guest_debug::default())
}

/// Returns whether the guest takes its next instruction from where it is: nothing is about to be delivered, and its debug
/// registers are unused. `shadowed`: also where an instruction before keeps interrupts from it.
pub(crate) fn is_untouched(vcpu: &impl AsRawFd, shadowed: bool) -> Result<bool, Error> {
    let events = GET_VCPU_EVENTS.get(vcpu)?;
    let exception = events.exception;
    let is_delivered = exception.injected | exception.pending | events.interrupt.injected;
    let is_over = (is_delivered | events.nmi.injected | events.smi.pending) == 0;
    let is_calm = is_over && (shadowed || events.interrupt.shadow == 0);
    Ok(is_calm && breakpoints(vcpu)? == 0)
}

/// Returns the bits of the guest's DR7 that enable breakpoints.
pub(crate) fn breakpoints(vcpu: &impl AsRawFd) -> Result<u64, Error> {
    Ok(GET_DEBUGREGS.get(vcpu)?.dr7 & 0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_the_kernels() {
        assert_eq!(SET_GUEST_DEBUG.number, 0x4048_ae9b);
    }
}
