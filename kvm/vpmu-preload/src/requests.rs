//! KVM's requests, as far as this library reads them.

use std::ffi::c_ulong;

use kvm_bindings::{
    kvm_cpuid2, kvm_enable_cap, kvm_msr_filter, kvm_msrs, kvm_regs, kvm_signal_mask, kvm_sregs,
    kvm_sregs2, kvm_userspace_memory_region, kvm_userspace_memory_region2,
};

const KVMIO: c_ulong = 0xae;

pub(crate) const CREATE_VM: c_ulong = none(0x01);
pub(crate) const GET_SUPPORTED_CPUID: c_ulong = both::<kvm_cpuid2>(0x05);
pub(crate) const CREATE_VCPU: c_ulong = none(0x41);
pub(crate) const SET_USER_MEMORY_REGION: c_ulong = write::<kvm_userspace_memory_region>(0x46);
pub(crate) const SET_USER_MEMORY_REGION2: c_ulong = write::<kvm_userspace_memory_region2>(0x49);
pub(crate) const RUN: c_ulong = none(0x80);
pub(crate) const SET_REGS: c_ulong = write::<kvm_regs>(0x82);
pub(crate) const SET_SREGS: c_ulong = write::<kvm_sregs>(0x84);
pub(crate) const GET_MSRS: c_ulong = both::<kvm_msrs>(0x88);
pub(crate) const SET_MSRS: c_ulong = write::<kvm_msrs>(0x89);
pub(crate) const SET_SIGNAL_MASK: c_ulong = write::<kvm_signal_mask>(0x8b);
pub(crate) const SET_CPUID2: c_ulong = write::<kvm_cpuid2>(0x90);
pub(crate) const GET_TSC_KHZ: c_ulong = none(0xa3);
pub(crate) const ENABLE_CAP: c_ulong = write::<kvm_enable_cap>(0xa3);
pub(crate) const SET_MSR_FILTER: c_ulong = write::<kvm_msr_filter>(0xc6);
pub(crate) const SET_SREGS2: c_ulong = write::<kvm_sregs2>(0xcd);

/// Returns what the kernel reads of a request: 32 bits.
pub(crate) fn read(request: c_ulong) -> c_ulong {
    // QEMU before 9.2 passes an `int`, whose sign fills the upper half.
    request & 0xffff_ffff
}

/// Returns whether a request is one of KVM's kind.
pub(crate) fn is_kvms(request: c_ulong) -> bool {
    request >> 8 & 0xff == KVMIO
}

const fn none(number: c_ulong) -> c_ulong {
    KVMIO << 8 | number
}

/// Returns a request in which the kernel reads a `T`.
const fn write<T>(number: c_ulong) -> c_ulong {
    1 << 30 | (size_of::<T>() as c_ulong) << 16 | none(number)
}

/// Returns a request in which the kernel reads and writes a `T`.
const fn both<T>(number: c_ulong) -> c_ulong {
    3 << 30 | (size_of::<T>() as c_ulong) << 16 | none(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_the_kernels() {
        // As strace prints them for QEMU.
        assert_eq!(GET_SUPPORTED_CPUID, 0xc008_ae05);
        assert_eq!(read(0xffff_ffff_c008_ae05), GET_SUPPORTED_CPUID);
        assert_eq!(SET_USER_MEMORY_REGION, 0x4020_ae46);
        assert_eq!(SET_USER_MEMORY_REGION2, 0x40a0_ae49);
        assert_eq!((GET_MSRS, SET_MSRS), (0xc008_ae88, 0x4008_ae89));
        assert_eq!((SET_SREGS, SET_SREGS2), (0x4138_ae84, 0x4140_aecd));
        assert_eq!((SET_SIGNAL_MASK, SET_CPUID2), (0x4004_ae8b, 0x4008_ae90));
        assert_eq!((ENABLE_CAP, SET_MSR_FILTER), (0x4068_aea3, 0x4188_aec6));
        assert!(is_kvms(SET_SREGS2) && !is_kvms(0x5401));
    }
}
