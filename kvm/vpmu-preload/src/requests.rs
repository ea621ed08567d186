//! KVM's requests, as far as this library reads them.

use kvm_bindings::{
    kvm_cpuid2, kvm_enable_cap, kvm_msr_filter, kvm_msrs, kvm_regs, kvm_signal_mask, kvm_sregs,
    kvm_sregs2, kvm_userspace_memory_region, kvm_userspace_memory_region2,
};
use libc::{_IO, _IOW, _IOWR, Ioctl};

const KVMIO: u32 = 0xae;

pub(crate) const CREATE_VM: Ioctl = _IO(KVMIO, 0x01);
pub(crate) const GET_SUPPORTED_CPUID: Ioctl = _IOWR::<kvm_cpuid2>(KVMIO, 0x05);
pub(crate) const CREATE_VCPU: Ioctl = _IO(KVMIO, 0x41);
pub(crate) const SET_USER_MEMORY_REGION: Ioctl = _IOW::<kvm_userspace_memory_region>(KVMIO, 0x46);
pub(crate) const SET_USER_MEMORY_REGION2: Ioctl = _IOW::<kvm_userspace_memory_region2>(KVMIO, 0x49);
pub(crate) const RUN: Ioctl = _IO(KVMIO, 0x80);
pub(crate) const SET_REGS: Ioctl = _IOW::<kvm_regs>(KVMIO, 0x82);
pub(crate) const SET_SREGS: Ioctl = _IOW::<kvm_sregs>(KVMIO, 0x84);
pub(crate) const GET_MSRS: Ioctl = _IOWR::<kvm_msrs>(KVMIO, 0x88);
pub(crate) const SET_MSRS: Ioctl = _IOW::<kvm_msrs>(KVMIO, 0x89);
pub(crate) const SET_SIGNAL_MASK: Ioctl = _IOW::<kvm_signal_mask>(KVMIO, 0x8b);
pub(crate) const SET_CPUID2: Ioctl = _IOW::<kvm_cpuid2>(KVMIO, 0x90);
pub(crate) const GET_TSC_KHZ: Ioctl = _IO(KVMIO, 0xa3);
pub(crate) const ENABLE_CAP: Ioctl = _IOW::<kvm_enable_cap>(KVMIO, 0xa3);
pub(crate) const SET_MSR_FILTER: Ioctl = _IOW::<kvm_msr_filter>(KVMIO, 0xc6);
pub(crate) const SET_SREGS2: Ioctl = _IOW::<kvm_sregs2>(KVMIO, 0xcd);

/// Returns what the kernel reads of a request: 32 bits.
pub(crate) fn read(request: Ioctl) -> Ioctl {
    // QEMU before 9.2 passes an `int`, whose sign fills the upper half.
    request & 0xffff_ffff
}

/// Returns whether a request is one of KVM's kind.
pub(crate) fn is_kvms(request: Ioctl) -> bool {
    request >> 8 & 0xff == Ioctl::from(KVMIO)
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
