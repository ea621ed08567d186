//! CPUID on its way: what KVM supports, and what a vCPU gets.

use std::ffi::{c_int, c_void};
use std::ptr;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_cpuid2};
use vpmu_kvm::{CpuidEntry, Offer};

use crate::{next, requests};

/// Returns `entries` as those of a processor with the PMU.
fn with_pmu(
    offer: &Offer,
    entries: impl Iterator<Item = kvm_cpuid_entry2>,
    tsc_khz: u32,
) -> Vec<kvm_cpuid_entry2> {
    let mut leaves: Vec<CpuidEntry> = entries.map(|entry| CpuidEntry::from(&entry)).collect();
    offer.set_cpuid(&mut leaves, tsc_khz);
    leaves.into_iter().map(Into::into).collect()
}

/// Answers KVM_GET_SUPPORTED_CPUID.
///
/// # Safety
///
/// `argument` is that request's: as much room as it says.
pub(crate) unsafe fn supported(offer: &Offer, fd: c_int, argument: *mut c_void) -> c_int {
    let Ok(mut all) = CpuId::new(KVM_MAX_CPUID_ENTRIES) else {
        return next::fail(libc::E2BIG);
    };
    let place = all.as_mut_fam_struct_ptr().cast();
    let answer = next::ioctl(fd, requests::GET_SUPPORTED_CPUID, place);
    if answer < 0 {
        return answer;
    }
    let found = all.as_slice().iter().copied();
    // No guest sees these rates: there is no vCPU yet whose TSC has one.
    let leaves = with_pmu(offer, found, 0);
    let head: *mut kvm_cpuid2 = argument.cast();
    // SAFETY: the caller's promise.
    let room = unsafe { (*head).nent } as usize;
    if leaves.len() > room {
        return next::fail(libc::E2BIG);
    }
    // SAFETY: the caller's promise, for the head and as many entries as there is room for.
    unsafe {
        (*head).nent = leaves.len() as u32;
        let entries: *mut kvm_cpuid_entry2 = head.add(1).cast();
        entries.copy_from_nonoverlapping(leaves.as_ptr(), leaves.len());
    }
    answer
}

/// Answers KVM_SET_CPUID2.
///
/// # Safety
///
/// `argument` is that request's: as many entries as it says.
pub(crate) unsafe fn set(offer: &Offer, vcpu: c_int, argument: *mut c_void) -> c_int {
    let head: *const kvm_cpuid2 = argument.cast();
    // SAFETY: the caller's promise.
    let count = unsafe { (*head).nent } as usize;
    if count > KVM_MAX_CPUID_ENTRIES {
        return next::fail(libc::E2BIG);
    }
    // SAFETY: the caller's promise.
    let entry = |at| unsafe { head.add(1).cast::<kvm_cpuid_entry2>().add(at).read() };
    let tsc_khz = next::ioctl(vcpu, requests::GET_TSC_KHZ, ptr::null_mut());
    let tsc_khz = u32::try_from(tsc_khz).unwrap_or(0);
    let leaves = with_pmu(offer, (0..count).map(entry), tsc_khz);
    match CpuId::from_entries(&leaves) {
        Ok(mut all) => {
            let place = all.as_mut_fam_struct_ptr().cast();
            next::ioctl(vcpu, requests::SET_CPUID2, place)
        }
        Err(_) => next::fail(libc::E2BIG),
    }
}
