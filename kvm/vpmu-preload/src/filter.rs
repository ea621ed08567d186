//! The program's own MSR filter, which stays behind the PMU's.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{
    KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_MSR_FILTER_DEFAULT_DENY,
    KVM_MSR_FILTER_MAX_BITMAP_SIZE, KVM_MSR_FILTER_READ, KVM_MSR_FILTER_WRITE, kvm_enable_cap,
    kvm_msr_filter,
};
use vpmu_kvm::{Error, Filter, FilterRange};

use crate::{next, requests};

/// The MSRs that come to this library, and what the program has asked for.
#[derive(Debug)]
pub(crate) struct Filters {
    msrs: Vec<u32>,
    /// Why the program wants MSRs (KVM_CAP_X86_USER_SPACE_MSR).
    reasons: AtomicU64,
}

impl Filters {
    /// Has KVM hand `msrs` over.
    pub(crate) fn begin(vm: c_int, msrs: Vec<u32>) -> Result<Self, Error> {
        vpmu_kvm::intercept(&vm, &msrs)?;
        Ok(Self {
            msrs,
            reasons: AtomicU64::new(0),
        })
    }

    /// Sets the program's filter behind the PMU's.
    ///
    /// # Safety
    ///
    /// `argument` is that of the program's KVM_X86_SET_MSR_FILTER.
    pub(crate) unsafe fn set(&self, vm: c_int, argument: *mut c_void) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        let own = unsafe { read(argument.cast()) };
        vpmu_kvm::intercept_beside(&vm, &self.msrs, &own)?;
        let reasons = self.reasons.load(Ordering::Relaxed);
        if reasons != 0 {
            // The library has asked for its own reason only.
            enable(vm, reasons);
        }
        Ok(())
    }

    /// Answers the program's KVM_ENABLE_CAP.
    ///
    /// # Safety
    ///
    /// `argument` is that call's.
    pub(crate) unsafe fn enable(&self, vm: c_int, argument: *mut c_void) -> c_int {
        // SAFETY: the caller's promise.
        let cap = unsafe { argument.cast::<kvm_enable_cap>().read_unaligned() };
        if cap.cap != KVM_CAP_X86_USER_SPACE_MSR || cap.flags != 0 {
            return next::ioctl(vm, requests::ENABLE_CAP, argument);
        }
        let answer = enable(vm, cap.args[0]);
        if answer == 0 {
            self.reasons.store(cap.args[0], Ordering::Relaxed);
        }
        answer
    }
}

/// Asks for MSRs for these reasons, and the PMU's.
fn enable(vm: c_int, reasons: u64) -> c_int {
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        args: [reasons | u64::from(KVM_MSR_EXIT_REASON_FILTER), 0, 0, 0],
        ..Default::default()
    };
    next::ioctl(vm, requests::ENABLE_CAP, (&raw mut cap).cast())
}

/// Reads a filter.
///
/// # Safety
///
/// `filter` is a whole one, and each bitmap has a bit for each of its MSRs.
unsafe fn read(filter: *const kvm_msr_filter) -> Filter {
    const LARGEST: u32 = KVM_MSR_FILTER_MAX_BITMAP_SIZE * u8::BITS;
    // SAFETY: the caller's promise.
    let filter = unsafe { filter.read_unaligned() };
    // KVM takes no range without MSRs for one.
    let ranges = filter.ranges.iter().filter(|range| range.nmsrs != 0);
    Filter {
        denies_by_default: filter.flags & KVM_MSR_FILTER_DEFAULT_DENY != 0,
        ranges: ranges
            .map(|range| {
                let bytes = match range.nmsrs > LARGEST || range.bitmap.is_null() {
                    // Which the library refuses, as KVM does.
                    true => 0,
                    false => range.nmsrs.div_ceil(u8::BITS) as usize,
                };
                // SAFETY: the caller's promise.
                let byte = |at: usize| unsafe { range.bitmap.add(at).read() };
                FilterRange {
                    base: range.base,
                    count: range.nmsrs,
                    reads: range.flags & KVM_MSR_FILTER_READ != 0,
                    writes: range.flags & KVM_MSR_FILTER_WRITE != 0,
                    allowed: (0..bytes).map(byte).collect(),
                }
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_read_as_kvm_reads_it() {
        let mut bitmap = [0b10_u8];
        let mut filter = kvm_msr_filter::default();
        filter.ranges[1].flags = KVM_MSR_FILTER_READ;
        filter.ranges[1].base = 0x35;
        filter.ranges[1].nmsrs = 2;
        filter.ranges[1].bitmap = bitmap.as_mut_ptr();
        // SAFETY: whole, and two bits fit into a byte.
        let read = unsafe { read(&raw const filter) };
        assert!(!read.denies_by_default);
        assert_eq!(
            read.ranges,
            [FilterRange {
                base: 0x35,
                count: 2,
                reads: true,
                writes: false,
                allowed: vec![0b10],
            }]
        );
    }
}
