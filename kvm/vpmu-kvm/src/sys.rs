//! KVM's interface, as far as this crate uses it: ioctls on the VMM's descriptors.
//!
//! Raw calls, because a binding's types would tie the VMM to the binding's version.
//!
//! UNSAFETY: ioctl is a C interface. Each request is named once, with the type that the kernel reads or writes, so that
//! the size in the request and the memory are the same.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

#[cfg(feature = "lbr")]
pub(crate) mod debug;
#[cfg(feature = "lbr")]
pub(crate) mod keys;

use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

#[cfg(feature = "lbr")]
use kvm_bindings::kvm_guest_debug;
use kvm_bindings::{
    KVM_VCPUEVENT_VALID_NMI_PENDING, KVM_VCPUEVENT_VALID_SMM, kvm_clock_data, kvm_cpuid_entry2,
    kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_enable_cap, kvm_lapic_state, kvm_mp_state,
    kvm_msi, kvm_msr_entry, kvm_msr_filter, kvm_msrs, kvm_regs, kvm_sregs,
    kvm_userspace_memory_region, kvm_vcpu_events, kvm_xsave,
};

use crate::error::Error;

/// A request whose argument is an `A`: a number, `*mut T` where the kernel writes a `T`, `*const T` where it reads one, and
/// `[T]` where it reads a `T` and writes what is behind it.
pub(crate) struct Request<A: ?Sized> {
    name: &'static str,
    pub(crate) number: libc::Ioctl,
    argument: PhantomData<A>,
}

macro_rules! requests {
    ($($(#[$condition:meta])? $name:ident = $number:literal: $argument:ty,)*) => {$(
        $(#[$condition])?
        pub(crate) const $name: Request<$argument> =
            Request::<$argument>::new(concat!("KVM_", stringify!($name)), $number);
    )*};
}

requests! {
    CREATE_VM = 0x01: libc::c_ulong,
    CHECK_EXTENSION = 0x03: libc::c_ulong,
    CREATE_VCPU = 0x41: libc::c_ulong,
    SET_USER_MEMORY_REGION = 0x46: *const kvm_userspace_memory_region,
    GET_CLOCK = 0x7c: *mut kvm_clock_data,
    RUN = 0x80: libc::c_ulong,
    GET_REGS = 0x81: *mut kvm_regs,
    SET_REGS = 0x82: *const kvm_regs,
    GET_SREGS = 0x83: *mut kvm_sregs,
    SET_SREGS = 0x84: *const kvm_sregs,
    GET_MSRS = 0x88: [kvm_msrs],
    GET_LAPIC = 0x8e: *mut kvm_lapic_state,
    GET_CPUID2 = 0x91: [kvm_cpuid2],
    GET_MP_STATE = 0x98: *mut kvm_mp_state,
    NMI = 0x9a: libc::c_ulong,
    #[cfg(feature = "lbr")]
    SET_GUEST_DEBUG = 0x9b: *const kvm_guest_debug,
    GET_VCPU_EVENTS = 0x9f: *mut kvm_vcpu_events,
    SET_VCPU_EVENTS = 0xa0: *const kvm_vcpu_events,
    GET_DEBUGREGS = 0xa1: *mut kvm_debugregs,
    SET_DEBUGREGS = 0xa2: *const kvm_debugregs,
    ENABLE_CAP = 0xa3: *const kvm_enable_cap,
    GET_TSC_KHZ = 0xa3: libc::c_ulong,
    // Fails for a guest whose state is larger than 4 KiB.
    GET_XSAVE = 0xa4: *mut kvm_xsave,
    SIGNAL_MSI = 0xa5: *const kvm_msi,
    X86_SET_MSR_FILTER = 0xc6: *const kvm_msr_filter,
    GET_DEVICE_ATTR = 0xe2: *const kvm_device_attr,
}

const KVMIO: u32 = 0xae;

impl<A: ?Sized> Request<A> {
    const fn of(name: &'static str, number: libc::Ioctl) -> Self {
        Self {
            name,
            number,
            argument: PhantomData,
        }
    }

    fn done(&self, result: libc::c_int) -> Result<u32, Error> {
        u32::try_from(result).map_err(|_| Error::last(self.name))
    }
}

impl Request<libc::c_ulong> {
    const fn new(name: &'static str, number: u32) -> Self {
        Self::of(name, libc::_IO(KVMIO, number))
    }

    pub(crate) fn call(&self, fd: &impl AsRawFd, argument: libc::c_ulong) -> Result<u32, Error> {
        // SAFETY: the request takes a number, and no memory.
        self.done(unsafe { libc::ioctl(fd.as_raw_fd(), self.number, argument) })
    }
}

impl<T> Request<*mut T> {
    const fn new(name: &'static str, number: u32) -> Self {
        Self::of(name, libc::_IOR::<T>(KVMIO, number))
    }

    pub(crate) fn get(&self, fd: &impl AsRawFd) -> Result<T, Error>
    where
        T: Default,
    {
        let mut value = T::default();
        self.fill(fd, &mut value)?;
        Ok(value)
    }

    pub(crate) fn fill(&self, fd: &impl AsRawFd, value: &mut T) -> Result<(), Error> {
        // SAFETY: the request has the size of a `T` in it, which the kernel fills: a structure of integers of the
        // kernel's interface.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), self.number, &raw mut *value) };
        self.done(result).map(drop)
    }
}

impl<T> Request<*const T> {
    const fn new(name: &'static str, number: u32) -> Self {
        Self::of(name, libc::_IOW::<T>(KVMIO, number))
    }

    pub(crate) fn set(&self, fd: &impl AsRawFd, value: &T) -> Result<(), Error> {
        // SAFETY: the request has the size of a `T` in it, which the kernel reads.
        let result = unsafe { libc::ioctl(fd.as_raw_fd(), self.number, &raw const *value) };
        self.done(result).map(drop)
    }
}

impl<T> Request<[T]> {
    const fn new(name: &'static str, number: u32) -> Self {
        Self::of(name, libc::_IOWR::<T>(KVMIO, number))
    }
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

/// Returns the answer of a VM's KVM about a capability; 0: KVM lacks it.
pub(crate) fn check_extension(vm: &impl AsRawFd, capability: u32) -> u32 {
    CHECK_EXTENSION.call(vm, capability.into()).unwrap_or(0)
}

/// Checks that the descriptor is a VM's: others have no clock.
pub(crate) fn check_vm(vm: &impl AsRawFd) -> Result<(), Error> {
    match GET_CLOCK.get(vm) {
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
    ENABLE_CAP.set(vm, &cap)
}

/// Returns the rate of the TSC of a vCPU, or of a VM's vCPUs to come, kHz.
pub(crate) fn tsc_khz(fd: &impl AsRawFd) -> Result<u32, Error> {
    GET_TSC_KHZ.call(fd, 0)
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
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), GET_MSRS.number, &raw mut msrs) };
    match GET_MSRS.done(result)? {
        1 => Ok(msrs.entry.data),
        _ => Err(Error::Kvm(GET_MSRS.name, libc::ENOENT)),
    }
}

#[repr(C)]
struct OneMsr {
    head: kvm_msrs,
    entry: kvm_msr_entry,
}

/// Returns whether the vCPU waits for an interrupt, in an HLT that it has executed.
#[cfg(feature = "lbr")]
pub(crate) fn is_halted(vcpu: &impl AsRawFd) -> Result<bool, Error> {
    use kvm_bindings::KVM_MP_STATE_HALTED;
    Ok(GET_MP_STATE.get(vcpu)?.mp_state == KVM_MP_STATE_HALTED)
}

/// Injects an exception, perhaps with an error code.
pub(crate) fn inject(vcpu: &impl AsRawFd, vector: u8, code: Option<u32>) -> Result<(), Error> {
    let mut state = GET_VCPU_EVENTS.get(vcpu)?;
    // Other threads may send an NMI, an SMI or an INIT meanwhile, which these would take back.
    state.flags &= !(KVM_VCPUEVENT_VALID_NMI_PENDING | KVM_VCPUEVENT_VALID_SMM);
    // As injected, not pending: a pending exception would first be asked of a nested hypervisor in the guest.
    state.exception.injected = 1;
    state.exception.nr = vector;
    state.exception.has_error_code = code.is_some().into();
    state.exception.error_code = code.unwrap_or(0);
    SET_VCPU_EVENTS.set(vcpu, &state)
}

/// DR6: a single step has ended.
pub(crate) const DR6_BS: u64 = 1 << 14;

/// Injects a #DB for the reasons in `dr6`.
pub(crate) fn inject_debug(vcpu: &impl AsRawFd, dr6: u64) -> Result<(), Error> {
    const DB: u8 = 1;
    /// BS, BD and the four breakpoints.
    const REASONS: u64 = 0x600f;
    let mut debug = GET_DEBUGREGS.get(vcpu)?;
    debug.dr6 |= dr6 & REASONS;
    SET_DEBUGREGS.set(vcpu, &debug)?;
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
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), GET_CPUID2.number, &raw mut cpuid) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_the_kernels() {
        // An int for musl.
        let is =
            |number: libc::Ioctl, expected| assert_eq!(number as u32, expected, "{expected:#x}");
        // As strace prints them for QEMU.
        is(CHECK_EXTENSION.number, 0xae03);
        is(SIGNAL_MSI.number, 0x4020_aea5);
        is(NMI.number, 0xae9a);
        is(GET_LAPIC.number, 0x8400_ae8e);
        is(GET_REGS.number, 0x8090_ae81);
        is(SET_REGS.number, 0x4090_ae82);
        is(GET_VCPU_EVENTS.number, 0x8040_ae9f);
        is(SET_VCPU_EVENTS.number, 0x4040_aea0);
        is(GET_SREGS.number, 0x8138_ae83);
        is(GET_XSAVE.number, 0x9000_aea4);
        is(GET_MSRS.number, 0xc008_ae88);
        is(GET_CLOCK.number, 0x8030_ae7c);
        is(ENABLE_CAP.number, 0x4068_aea3);
        is(X86_SET_MSR_FILTER.number, 0x4188_aec6);
        is(SET_USER_MEMORY_REGION.number, 0x4020_ae46);
        is(SET_SREGS.number, 0x4138_ae84);
        is(CREATE_VM.number, 0xae01);
        is(CREATE_VCPU.number, 0xae41);
        is(RUN.number, 0xae80);
        is(GET_DEVICE_ATTR.number, 0x4018_aee2);
        assert_eq!(
            GET_XSAVE.get(&-1).map(drop),
            Err(Error::Kvm("KVM_GET_XSAVE", libc::EBADF))
        );
    }
}
