//! KVM's interface, as far as this crate uses it: ioctls on the VMM's descriptors.
//!
//! Raw calls, because a binding's types would tie the VMM to the binding's version.
//!
//! UNSAFETY: ioctl is a C interface. Each wrapper names its request once, by the type that the kernel reads
//! or writes, so that the size in the request and the memory are the same.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

#[cfg(feature = "lbr")]
pub(crate) mod debug;
#[cfg(feature = "lbr")]
pub(crate) mod keys;

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use kvm_bindings::{
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SMM, kvm_clock_data, kvm_cpuid_entry2,
    kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_enable_cap, kvm_lapic_state, kvm_mp_state,
    kvm_msi, kvm_msr_entry, kvm_msr_filter, kvm_msrs, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xsave,
};

use crate::error::Error;

const KVMIO: u64 = 0xae;
pub(crate) const CHECK_EXTENSION: u64 = none(0x03);
pub(crate) const SIGNAL_MSI: u64 = write::<kvm_msi>(0xa5);
pub(crate) const GET_TSC_KHZ: u64 = none(0xa3);
pub(crate) const NMI: u64 = none(0x9a);
pub(crate) const GET_LAPIC: u64 = read::<kvm_lapic_state>(0x8e);
pub(crate) const GET_REGS: u64 = read::<kvm_regs>(0x81);
pub(crate) const SET_REGS: u64 = write::<kvm_regs>(0x82);
pub(crate) const GET_MP_STATE: u64 = read::<kvm_mp_state>(0x98);
pub(crate) const GET_VCPU_EVENTS: u64 = read::<kvm_vcpu_events>(0x9f);
pub(crate) const SET_VCPU_EVENTS: u64 = write::<kvm_vcpu_events>(0xa0);
pub(crate) const GET_SREGS: u64 = read::<kvm_sregs>(0x83);
pub(crate) const GET_DEBUGREGS: u64 = read::<kvm_debugregs>(0xa1);
pub(crate) const SET_DEBUGREGS: u64 = write::<kvm_debugregs>(0xa2);
pub(crate) const GET_CPUID2: u64 =
    KVMIO << 8 | 3 << 30 | (size_of::<kvm_cpuid2>() as u64) << 16 | 0x91;
pub(crate) const GET_XSAVE: u64 = read::<kvm_xsave>(0xa4);
pub(crate) const GET_CLOCK: u64 = read::<kvm_clock_data>(0x7c);
pub(crate) const ENABLE_CAP: u64 = write::<kvm_enable_cap>(0xa3);
pub(crate) const GET_MSRS: u64 = KVMIO << 8 | 3 << 30 | (size_of::<kvm_msrs>() as u64) << 16 | 0x88;
pub(crate) const GET_DEVICE_ATTR: u64 = write::<kvm_device_attr>(0xe2);
pub(crate) const CREATE_VM: u64 = none(0x01);
pub(crate) const CREATE_VCPU: u64 = none(0x41);
pub(crate) const RUN: u64 = none(0x80);
pub(crate) const SET_USER_MEMORY_REGION: u64 = write::<kvm_userspace_memory_region>(0x46);
pub(crate) const SET_SREGS: u64 = write::<kvm_sregs>(0x84);
pub(crate) const SET_MSR_FILTER: u64 = write::<kvm_msr_filter>(0xc6);

const fn none(number: u64) -> u64 {
    KVMIO << 8 | number
}

/// Returns a request in which the kernel reads a `T`.
const fn write<T>(number: u64) -> u64 {
    1 << 30 | (size_of::<T>() as u64) << 16 | none(number)
}

/// Returns a request in which the kernel writes a `T`.
const fn read<T>(number: u64) -> u64 {
    2 << 30 | (size_of::<T>() as u64) << 16 | none(number)
}

/// Returns a separate descriptor for `fd`, which the VMM may close.
pub(crate) fn duplicate(fd: &impl AsRawFd) -> Result<OwnedFd, Error> {
    let fd = fd.as_raw_fd();
    if fd < 0 {
        return Err(Error::Kvm("fcntl", libc::EBADF));
    }
    // SAFETY: it is used for one call, which duplicates it, or says that it is closed. No number of a
    // descriptor is one that this crate's own calls could not also be handed by the kernel's rules.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    fd.try_clone_to_owned()
        .map_err(|error| match error.raw_os_error() {
            Some(errno @ (libc::EMFILE | libc::ENFILE)) => Error::NoDescriptor(errno),
            _ => Error::last("fcntl"),
        })
}

fn done(call: &'static str, result: libc::c_int) -> Result<u32, Error> {
    u32::try_from(result).map_err(|_| Error::last(call))
}

pub(crate) fn no_memory(
    fd: &impl AsRawFd,
    call: &'static str,
    request: u64,
    argument: libc::c_ulong,
) -> Result<u32, Error> {
    // SAFETY: the callers' requests take a number, and no memory.
    done(call, unsafe {
        libc::ioctl(fd.as_raw_fd(), request as _, argument)
    })
}

fn get<T: Default>(fd: &impl AsRawFd, call: &'static str, request: u64) -> Result<T, Error> {
    let mut value = T::default();
    fill(fd, call, request, &mut value)?;
    Ok(value)
}

fn fill<T>(
    fd: &impl AsRawFd,
    call: &'static str,
    request: u64,
    value: &mut T,
) -> Result<(), Error> {
    // SAFETY: the callers' requests have the size of a `T` in them, which the kernel fills: a structure of
    // integers of the kernel's interface.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, &raw mut *value) };
    done(call, result).map(drop)
}

pub(crate) fn set<T>(
    fd: &impl AsRawFd,
    call: &'static str,
    request: u64,
    value: &T,
) -> Result<u32, Error> {
    // SAFETY: the callers' requests have the size of a `T` in them, which the kernel reads.
    done(call, unsafe {
        libc::ioctl(fd.as_raw_fd(), request as _, &raw const *value)
    })
}

/// Returns the answer of a VM's KVM about a capability; 0: KVM lacks it.
pub(crate) fn check_extension(vm: &impl AsRawFd, capability: u32) -> u32 {
    let capability = libc::c_ulong::from(capability);
    no_memory(vm, "KVM_CHECK_EXTENSION", CHECK_EXTENSION, capability).unwrap_or(0)
}

/// Checks that the descriptor is a VM's: others have no clock.
pub(crate) fn check_vm(vm: &impl AsRawFd) -> Result<(), Error> {
    match get::<kvm_clock_data>(vm, "KVM_GET_CLOCK", GET_CLOCK) {
        // A call that takes a number would answer for /dev/kvm, too.
        Err(Error::Kvm(_, errno)) => Err(Error::NoVm(errno)),
        result => result.map(drop),
    }
}

pub(crate) fn enable_cap(vm: &impl AsRawFd, cap: u32, argument: u64) -> Result<(), Error> {
    let cap = kvm_enable_cap {
        cap,
        args: [argument, 0, 0, 0],
        ..Default::default()
    };
    set(vm, "KVM_ENABLE_CAP", ENABLE_CAP, &cap).map(drop)
}

pub(crate) fn tsc_khz(vcpu: &impl AsRawFd) -> Result<u32, Error> {
    no_memory(vcpu, "KVM_GET_TSC_KHZ", GET_TSC_KHZ, 0)
}

/// Reads an MSR of a vCPU that does not run.
pub(crate) fn msr(vcpu: &impl AsRawFd, index: u32) -> Result<u64, Error> {
    let mut msrs = OneMsr {
        head: kvm_msrs {
            nmsrs: 1,
            ..Default::default()
        },
        entry: kvm_msr_entry {
            index,
            ..Default::default()
        },
    };
    // SAFETY: the kernel reads the head, then reads and writes as many entries as the head says: one.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), GET_MSRS as _, &raw mut msrs) };
    match done("KVM_GET_MSRS", result)? {
        1 => Ok(msrs.entry.data),
        _ => Err(Error::Kvm("KVM_GET_MSRS", libc::ENOENT)),
    }
}

#[repr(C)]
struct OneMsr {
    head: kvm_msrs,
    entry: kvm_msr_entry,
}

pub(crate) fn nmi(vcpu: &impl AsRawFd) -> Result<(), Error> {
    no_memory(vcpu, "KVM_NMI", NMI, 0).map(drop)
}

/// Sends the message, whether anybody takes it or not.
pub(crate) fn signal_msi(vm: &impl AsRawFd, message: &kvm_msi) -> Result<(), Error> {
    match set(vm, "KVM_SIGNAL_MSI", SIGNAL_MSI, message) {
        // KVM's -1 for "nobody".
        Err(Error::Kvm(_, libc::EPERM)) => Ok(()),
        result => result.map(drop),
    }
}

pub(crate) fn lapic(vcpu: &impl AsRawFd) -> Result<kvm_lapic_state, Error> {
    get(vcpu, "KVM_GET_LAPIC", GET_LAPIC)
}

pub(crate) fn regs(vcpu: &impl AsRawFd) -> Result<kvm_regs, Error> {
    get(vcpu, "KVM_GET_REGS", GET_REGS)
}

pub(crate) fn sregs(vcpu: &impl AsRawFd) -> Result<kvm_sregs, Error> {
    get(vcpu, "KVM_GET_SREGS", GET_SREGS)
}

/// Reads the state. Fails for a guest whose state is larger than 4 KiB.
pub(crate) fn xsave(vcpu: &impl AsRawFd, state: &mut kvm_xsave) -> Result<(), Error> {
    fill(vcpu, "KVM_GET_XSAVE", GET_XSAVE, state)
}

pub(crate) fn set_regs(vcpu: &impl AsRawFd, regs: &kvm_regs) -> Result<(), Error> {
    set(vcpu, "KVM_SET_REGS", SET_REGS, regs).map(drop)
}

pub(crate) fn events(vcpu: &impl AsRawFd) -> Result<kvm_vcpu_events, Error> {
    get(vcpu, "KVM_GET_VCPU_EVENTS", GET_VCPU_EVENTS)
}

/// Returns whether the vCPU waits for an interrupt, in an HLT that it has executed.
#[cfg(feature = "lbr")]
pub(crate) fn is_halted(vcpu: &impl AsRawFd) -> Result<bool, Error> {
    use kvm_bindings::KVM_MP_STATE_HALTED;
    let state: kvm_mp_state = get(vcpu, "KVM_GET_MP_STATE", GET_MP_STATE)?;
    Ok(state.mp_state == KVM_MP_STATE_HALTED)
}

/// Injects an exception, perhaps with an error code.
pub(crate) fn inject(vcpu: &impl AsRawFd, vector: u8, code: Option<u32>) -> Result<(), Error> {
    let mut state = events(vcpu)?;
    // Other threads may send an NMI, an SMI or an INIT meanwhile, which these would take back.
    state.flags &= !(KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SMM);
    // As injected, not pending: a pending exception would first be asked of a nested hypervisor in the guest.
    state.exception.injected = 1;
    state.exception.nr = vector;
    state.exception.has_error_code = code.is_some().into();
    state.exception.error_code = code.unwrap_or(0);
    set(vcpu, "KVM_SET_VCPU_EVENTS", SET_VCPU_EVENTS, &state).map(drop)
}

/// DR6: a single step has ended.
pub(crate) const DR6_BS: u64 = 1 << 14;

/// Injects a #DB for the reasons in `dr6`.
pub(crate) fn inject_debug(vcpu: &impl AsRawFd, dr6: u64) -> Result<(), Error> {
    const DB: u8 = 1;
    /// BS, BD and the four breakpoints.
    const REASONS: u64 = 0x600f;
    let mut debug: kvm_debugregs = get(vcpu, "KVM_GET_DEBUGREGS", GET_DEBUGREGS)?;
    debug.dr6 |= dr6 & REASONS;
    set(vcpu, "KVM_SET_DEBUGREGS", SET_DEBUGREGS, &debug)?;
    inject(vcpu, DB, None)
}

/// Returns whether the guest finds Hyper-V as its hypervisor.
pub(crate) fn has_hyperv(vcpu: &impl AsRawFd) -> bool {
    const INTERFACE: u32 = 0x4000_0001;
    const HV_1: u32 = u32::from_le_bytes(*b"Hv#1");
    cpuid(vcpu, INTERFACE, 0).is_some_and(|entry| entry.eax == HV_1)
}

/// Returns the guest's CPUID.
fn cpuid(vcpu: &impl AsRawFd, function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
    // KVM keeps no more.
    const MOST: usize = 256;
    /// KVM_CPUID_FLAG_SIGNIFCANT_INDEX.
    const HAS_INDEX: u32 = 1;
    let mut cpuid = Cpuid::<MOST> {
        head: kvm_cpuid2 {
            nent: MOST as u32,
            ..Default::default()
        },
        entries: [kvm_cpuid_entry2::default(); MOST],
    };
    // SAFETY: the kernel writes at most as many entries as the head says: `MOST`.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), GET_CPUID2 as _, &raw mut cpuid) };
    let count = MOST.min(cpuid.head.nent as usize);
    let entries = (result == 0).then(|| cpuid.entries[..count].iter())?;
    entries.copied().find(|entry| {
        let is_index = entry.flags & HAS_INDEX == 0 || entry.index == index;
        entry.function == function && is_index
    })
}

#[repr(C)]
struct Cpuid<const N: usize> {
    head: kvm_cpuid2,
    entries: [kvm_cpuid_entry2; N],
}

pub(crate) fn set_msr_filter(vm: &impl AsRawFd, filter: &kvm_msr_filter) -> Result<(), Error> {
    // The filter's bitmaps are read too: `intercept` keeps them while this runs.
    set(vm, "KVM_X86_SET_MSR_FILTER", SET_MSR_FILTER, filter).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_the_kernels() {
        // As strace prints them for QEMU.
        assert_eq!(CHECK_EXTENSION, 0xae03);
        assert_eq!(SIGNAL_MSI, 0x4020_aea5);
        assert_eq!(NMI, 0xae9a);
        assert_eq!(GET_LAPIC, 0x8400_ae8e);
        assert_eq!((GET_REGS, SET_REGS), (0x8090_ae81, 0x4090_ae82));
        assert_eq!(
            (GET_VCPU_EVENTS, SET_VCPU_EVENTS),
            (0x8040_ae9f, 0x4040_aea0)
        );
        assert_eq!((GET_SREGS, GET_XSAVE), (0x8138_ae83, 0x9000_aea4));
        assert_eq!(GET_MSRS, 0xc008_ae88);
        assert_eq!(GET_CLOCK, 0x8030_ae7c);
        assert_eq!(ENABLE_CAP, 0x4068_aea3);
        assert_eq!(SET_MSR_FILTER, 0x4188_aec6);
        assert_eq!(
            (SET_USER_MEMORY_REGION, SET_SREGS),
            (0x4020_ae46, 0x4138_ae84)
        );
        assert_eq!((CREATE_VM, CREATE_VCPU, RUN), (0xae01, 0xae41, 0xae80));
        assert_eq!(GET_DEVICE_ATTR, 0x4018_aee2);
    }
}
