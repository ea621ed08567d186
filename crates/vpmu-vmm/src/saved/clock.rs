//! The guest's two clocks, TSC and kvmclock, which must not drift apart by being saved: Linux
//! compares them, and would give up the TSC.
//!
//! There is no call that reads or writes both. So they are read one after the other here and written
//! one after the other there, in the same order: what passes between them is the same, but for what
//! two calls differ.

use kvm_bindings::kvm_clock_data;
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use crate::tsc::tsc;
use crate::{Error, kvm};

/// One moment in the guest's time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Clock {
    /// By a vCPU's TSC.
    tsc: u64,
    /// By kvmclock, nanoseconds.
    ns: u64,
}

impl Clock {
    /// After everything else: then nobody has seen a later time.
    pub(crate) fn of(vm: &VmFd, vcpu: &VcpuFd) -> Result<Self, Error> {
        Ok(Self {
            tsc: tsc(vcpu)?,
            ns: kvm("KVM_GET_CLOCK", vm.get_clock())?.clock,
        })
    }

    /// Makes kvmclock what it is at the moment that the TSC shows, after that has been restored.
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
