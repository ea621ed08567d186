//! The guest's two clocks, TSC and kvmclock. A save must not make them drift apart: Linux compares
//! them, and would give up the TSC.
//!
//! No call reads or writes both. So the save reads one after the other, and the restore writes them in the same order.
//! The time between the two calls is about the same on both sides.

use kvm_bindings::kvm_clock_data;
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use super::vcpu::tsc;
use crate::{Error, kvm};

/// One moment in the guest's time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Clock {
    /// The time by a vCPU's TSC.
    tsc: u64,
    /// The time by kvmclock, nanoseconds.
    ns: u64,
}

impl Clock {
    /// Reads the clocks, after everything else: then nobody has seen a later time.
    pub(crate) fn of(vm: &VmFd, vcpu: &VcpuFd) -> Result<Self, Error> {
        Ok(Self {
            tsc: tsc(vcpu)?,
            ns: kvm("KVM_GET_CLOCK", vm.get_clock())?.clock,
        })
    }

    /// Sets kvmclock to its value at the moment that the TSC shows. The TSC must be restored before.
    pub(crate) fn restore(self, vm: &VmFd, vcpu: &VcpuFd, khz: u32) -> Result<(), Error> {
        let ticks = tsc(vcpu)?.saturating_sub(self.tsc);
        let clock = kvm_clock_data {
            clock: self.ns.saturating_add(nanoseconds(ticks, khz)),
            ..Default::default()
        };
        kvm("KVM_SET_CLOCK", vm.set_clock(&clock))
    }
}

fn nanoseconds(ticks: u64, khz: u32) -> u64 {
    let ns = u128::from(ticks) * 1_000_000 / u128::from(khz.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_become_nanoseconds() {
        assert_eq!(nanoseconds(5_000_000, 2_500_000), 2_000_000);
        assert_eq!(nanoseconds(u64::MAX, 1), u64::MAX);
        assert_eq!(nanoseconds(1, 0), 1_000_000);
    }
}
