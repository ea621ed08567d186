//! A VMM's own MSR filter beside the PMU's.

use core::ffi::c_int;

use vpmu_kvm::Filter;

use super::handle::{answer, failed, needed};
use super::vm::{VMS, VpmuKvmVm};
use crate::room::{Ref, promised};
use crate::status::VpmuStatus;

/// A range of a VMM's own MSR filter, laid out as Linux's `struct kvm_msr_filter_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuKvmFilterRange {
    /// KVM_MSR_FILTER_READ and _WRITE.
    pub flags: u32,
    /// The number of MSRs.
    pub nmsrs: u32,
    /// The first.
    pub base: u32,
    /// A bit for each MSR, which KVM performs where it is set, and hands over where it is clear.
    pub bitmap: *const u8,
}

/// As `vpmu_kvm_intercept`, with a filter of the VMM's own behind it: its flags (KVM_MSR_FILTER_DEFAULT_*) and its ranges.
/// KVM has 16 ranges, of which the MSRs of AMD's PMU take 3 and of Intel's up to 9, and the deadline and RDPMC 3 more. A
/// filter that the VMM sets by itself replaces both.
///
/// Each bitmap has a bit for each of its MSRs.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_kvm_intercept_beside(
    vm: *const VpmuKvmVm,
    vm_fd: c_int,
    flags: u32,
    ranges: Ref<'_, VpmuKvmFilterRange>,
    count: usize,
) -> VpmuStatus {
    const DEFAULT_DENY: u32 = 1;
    const MOST: usize = 16;
    const MOST_MSRS: u32 = 0x600 * 8;
    let what = "ranges at an address that is a multiple of 8, at most 16";
    answer(|| {
        let vm = VMS.find(vm)?;
        let ranges = needed(promised!(ranges.slice(count, MOST)), what)?;
        let mut own = Filter {
            denies_by_default: flags & DEFAULT_DENY != 0,
            ranges: Vec::new(),
        };
        for range in ranges {
            let bytes = range.nmsrs.div_ceil(8) as usize;
            let most = MOST_MSRS.div_ceil(8) as usize;
            let allowed = promised!(Ref::of(range.bitmap).slice(bytes, most));
            let what = "a range without a bitmap, or with too many MSRs";
            own.ranges.push(vpmu_kvm::FilterRange {
                base: range.base,
                count: range.nmsrs,
                reads: range.flags & 1 != 0,
                writes: range.flags & 2 != 0,
                allowed: needed(allowed, what)?.to_vec(),
            });
        }
        vpmu_kvm::intercept_beside(&vm_fd, &vm.msrs(), &own).map_err(failed)
    })
}
