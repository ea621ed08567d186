//! The vCPU's TSC in terms of the host's, and both in terms of nanoseconds.

use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_device_attr};

use crate::error::Error;
use crate::sys;

const IA32_TSC: u32 = 0x10;

/// The vCPU's TSC in terms of the host's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// The rate of both.
    pub(super) khz: u32,
    /// The vCPU's TSC less the host's, modulo 2^64.
    pub(super) offset: u64,
}

impl Clock {
    /// Returns the vCPU's TSC when the host's is `host_tsc`.
    pub(super) fn guest(self, host_tsc: u64) -> u64 {
        host_tsc.wrapping_add(self.offset)
    }

    /// Converts ticks to nanoseconds. Rounds up, so that a timer of this length is not early. A time beyond 64 bits,
    /// some centuries, becomes the longest.
    pub(super) fn nanoseconds(self, ticks: u64) -> u64 {
        // 128 bits: a guest may write any deadline, and the product of 64 bits would wrap.
        let ns = (u128::from(ticks) * 1_000_000).div_ceil(u128::from(self.khz.max(1)));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    /// Converts nanoseconds to ticks. Rounds down.
    pub(super) fn ticks(self, ns: u64) -> u64 {
        (u128::from(ns) * u128::from(self.khz) / 1_000_000) as u64
    }
}

/// Returns the host's TSC.
#[expect(unsafe_code, reason = "an instruction without a safe wrapper")]
pub(super) fn rdtsc() -> u64 {
    // SAFETY: RDTSC reads a counter, and user space may unless it has forbidden that to itself.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Returns [`Clock::offset`] of a vCPU that does not run.
///
/// A KVM before Linux 5.16 does not report the offset. The offset is then somewhat too small and
/// deadlines are somewhat late, because time goes by while KVM is asked for the vCPU's TSC.
pub(crate) fn tsc_offset(vcpu: &impl AsRawFd) -> Result<u64, Error> {
    if let Some(offset) = offset_attribute(vcpu) {
        return Ok(offset);
    }
    Ok(sys::msr(vcpu, IA32_TSC)?.wrapping_sub(rdtsc()))
}

/// Returns the host's rate, kHz, with a vCPU that does not run, which the VMM may have given another rate. The VM's own rate
/// is the host's unless the VMM has set that, too. Then what KVM makes of the host's TSC shows. Linux before 5.19 says
/// neither.
pub(super) fn host_khz(vm: &impl AsRawFd, vcpu: &impl AsRawFd) -> Result<u32, Error> {
    let khz = sys::tsc_khz(vcpu)?;
    if let Ok(host) = sys::tsc_khz(vm)
        && host != khz
    {
        return Ok(host);
    }
    let Some(offset) = offset_attribute(vcpu) else {
        return Ok(khz);
    };
    // This thread may stand still between the three readings.
    let before = rdtsc();
    let scaled = sys::msr(vcpu, IA32_TSC)?.wrapping_sub(offset);
    Ok(unscaled_khz(khz, scaled, before..=rdtsc()))
}

/// Returns the host's rate: that of the guest, `khz`, unless KVM has made `scaled` of a moment of `host`'s TSC.
fn unscaled_khz(khz: u32, scaled: u64, host: RangeInclusive<u64>) -> u32 {
    // KVM leaves a rate alone that differs by less than 0.025 %: after 4 s, the guest's TSC would differ by more than this.
    let ms = u64::from(khz);
    let (first, last) = (
        host.start().saturating_sub(ms),
        host.end().saturating_add(ms),
    );
    if (first..=last).contains(&scaled) {
        return khz;
    }
    let host = u128::from(khz) * u128::from(*host.start()) / u128::from(scaled.max(1));
    u32::try_from(host).unwrap_or(u32::MAX)
}

/// Returns the offset, or `None` before Linux 5.16.
fn offset_attribute(vcpu: &impl AsRawFd) -> Option<u64> {
    let mut offset = 0_u64;
    let attribute = kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: (&raw mut offset).expose_provenance() as u64,
    };
    // Writes 64 bits to `addr`, that of a local.
    let answer = sys::GET_DEVICE_ATTR.set(vcpu, &attribute);
    answer.is_ok().then_some(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_never_early() {
        let at = |khz| Clock { khz, offset: 0 };
        assert_eq!(at(2_000_000).nanoseconds(3), 2);
        assert_eq!(at(2_000_000).nanoseconds(0), 0);
        assert_eq!(at(1).nanoseconds(u64::MAX), u64::MAX);
        assert_eq!(at(2_500_000).ticks(20_000), 50_000);
        for khz in [1, 999_999, 2_100_123, u32::MAX] {
            for ticks in [0, 1, 7, 1_000_003, 1 << 40] {
                let clock = at(khz);
                assert!(clock.ticks(clock.nanoseconds(ticks)) >= ticks);
            }
        }
    }

    #[test]
    fn a_thread_that_stands_still_scales_no_tsc() {
        const DAY: u64 = 86_400 * 2_400_000_000;
        // 40 ms between two readings, and the vCPU's at any moment of them.
        let host = DAY..=DAY + 96_000_000;
        for scaled in [DAY, DAY + 48_000_000, DAY + 96_000_000] {
            assert_eq!(unscaled_khz(2_400_000, scaled, host.clone()), 2_400_000);
        }
        assert_eq!(unscaled_khz(4_800_000, 2 * DAY, host.clone()), 2_400_000);
        assert_eq!(unscaled_khz(2_640_000, DAY / 10 * 11, host), 2_400_000);
    }

    #[test]
    fn a_guest_may_be_younger_or_older_than_its_host() {
        for (host, guest) in [(5, 3), (3, 5), (0, u64::MAX), (u64::MAX, 0)] {
            let offset = u64::wrapping_sub(guest, host);
            let clock = Clock { khz: 1, offset };
            assert_eq!(clock.guest(host), guest);
        }
    }
}
