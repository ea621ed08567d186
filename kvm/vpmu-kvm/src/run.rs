//! A vCPU of KVM's, and the page that it shares with user space: `struct kvm_run`.
//!
//! The mapping is separate from the VMM's, so the VMM need not hand a reference out, whatever binding it uses. This
//! crate reads and writes only the first page, and does not use the data of port accesses behind it.
//!
//! UNSAFETY: maps and reads memory that the kernel and the VMM write too.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_INTR, KVM_EXIT_IO, KVM_EXIT_UNKNOWN, KVM_EXIT_X86_RDMSR,
    KVM_EXIT_X86_WRMSR, KVM_SYNC_X86_REGS, kvm_regs, kvm_run,
};
#[cfg(feature = "lbr")]
use kvm_bindings::{KVM_SYNC_X86_SREGS, kvm_sregs};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use vpmu::x86::Outcome;
use vpmu_perf::Flag;

use crate::error::Error;
use crate::memory::GuestMemory;
use crate::stats::Shared;
use crate::sys;

const PAGE: usize = 4096;
/// An address that no vCPU's RIP has: it is not canonical.
const NO_RIP: u64 = 1 << 63;
const _: () = assert!(size_of::<kvm_run>() <= PAGE);

/// A vCPU of KVM's. What reads the guest's registers in a sample has a copy.
#[derive(Clone, Debug)]
pub(crate) struct Kvm {
    pub(crate) vm: Arc<OwnedFd>,
    pub(crate) vcpu: Arc<OwnedFd>,
    pub(crate) run: Arc<RunPage>,
    /// The guest's.
    pub(crate) memory: Arc<dyn GuestMemory>,
    pub(crate) statistics: Shared,
}

impl Kvm {
    pub(crate) fn new(
        vm: &impl AsRawFd,
        vcpu: &impl AsRawFd,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        sys::check_vm(vm)?;
        let (vm, vcpu) = (sys::duplicate(vm)?, sys::duplicate(vcpu)?);
        // Descriptors of other kinds do not have this call.
        sys::GET_LAPIC.get(&vcpu).map_err(|error| match error {
            Error::Kvm(_, errno) => Error::NoLapic(errno),
            error => error,
        })?;
        Ok(Self {
            run: Arc::new(RunPage::map(&vcpu)?),
            vm: Arc::new(vm),
            vcpu: Arc::new(vcpu),
            memory,
            statistics: Shared::new(),
        })
    }

    /// Returns the general registers: those that came with the exit, or else KVM's answer.
    #[cfg(feature = "lbr")]
    pub(crate) fn regs(&self) -> Result<kvm_regs, Error> {
        self.run
            .regs()
            .map_or_else(|| sys::GET_REGS.get(&self.vcpu), Ok)
    }
}

/// The mapped page.
#[derive(Debug)]
pub(crate) struct RunPage(NonNull<kvm_run>);

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for RunPage {}
// SAFETY: every access through a shared reference is atomic or volatile, and the page holds integers only: what
// another thread writes meanwhile can be any value, which all readers here expect of a page that a kernel
// shares.
unsafe impl Sync for RunPage {}

/// The reason why KVM_RUN has returned, as far as this crate cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returned {
    /// No exit: a signal, or `immediate_exit`.
    NoExit,
    Rdmsr(u32),
    Wrmsr(u32, u64),
    /// A write of one byte to this port.
    Out(u16),
    /// A breakpoint of the VMM's, or a debug exception of the guest's.
    Debug,
    Other,
}

/// A pointer to a field of the page.
macro_rules! field {
    ($page:expr, $($field:tt)+) => {{
        let page = $page.0.as_ptr();
        // SAFETY: `page` is mapped for reads and writes as long as `self`, a whole kvm_run fits in it, and no
        // reference is made.
        unsafe { &raw mut (*page).$($field)+ }
    }};
}

impl RunPage {
    /// Maps the page of this vCPU.
    pub(crate) fn map(vcpu: &impl AsFd) -> Result<Self, Error> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let page = unsafe { mmap(ptr::null_mut(), PAGE, access, MapFlags::SHARED, vcpu, 0) };
        let page = page.map_err(|error| Error::Kvm("mmap of kvm_run", error.raw_os_error()))?;
        let page = NonNull::new(page.cast()).map(Self);
        let page = page.ok_or(Error::Kvm("mmap of kvm_run", libc::EFAULT))?;
        page.expect_regs();
        Ok(page)
    }

    fn get<T: Copy>(field: *mut T) -> T {
        // SAFETY: `field` comes from `field!`, which see; any bits are a value of the integers there.
        unsafe { field.read_volatile() }
    }

    fn put<T: Copy>(field: *mut T, value: T) {
        // SAFETY: as in `get`.
        unsafe { field.write_volatile(value) }
    }

    /// Makes [`returned`](Self::returned) able to tell a new exit from one that is over, and makes the vCPU give its
    /// general registers with each exit.
    pub(crate) fn before_run(&self) {
        // KVM leaves the old reason when a signal ends KVM_RUN before the guest was entered.
        Self::put(field!(self, exit_reason), KVM_EXIT_INTR);
        let valid = field!(self, kvm_valid_regs);
        let regs = u64::from(KVM_SYNC_X86_REGS);
        // The VMM may use other bits of the field.
        if Self::get(valid) & regs == 0 {
            Self::put(valid, Self::get(valid) | regs);
        }
    }

    /// Returns KVM's number of the last exit's reason.
    pub(crate) fn exit_reason(&self) -> u32 {
        Self::get(field!(self, exit_reason))
    }

    /// Returns the reason since the last [`before_run`](Self::before_run).
    pub(crate) fn returned(&self) -> Returned {
        match Self::get(field!(self, exit_reason)) {
            // Kernels differ in whether they write the reason when there is no exit.
            KVM_EXIT_UNKNOWN | KVM_EXIT_INTR => Returned::NoExit,
            KVM_EXIT_X86_RDMSR => {
                Returned::Rdmsr(Self::get(field!(self, __bindgen_anon_1.msr.index)))
            }
            KVM_EXIT_X86_WRMSR => Returned::Wrmsr(
                Self::get(field!(self, __bindgen_anon_1.msr.index)),
                Self::get(field!(self, __bindgen_anon_1.msr.data)),
            ),
            KVM_EXIT_IO => {
                const OUT: u8 = 1;
                let io = Self::get(field!(self, __bindgen_anon_1.io));
                match (io.direction, io.size, io.count) {
                    (OUT, 1, 1) => Returned::Out(io.port),
                    _ => Returned::Other,
                }
            }
            KVM_EXIT_DEBUG => Returned::Debug,
            _ => Returned::Other,
        }
    }

    /// Completes an RDMSR or a WRMSR. Returns whether the register was handled; where not, the exit is left as KVM has
    /// made it.
    pub(crate) fn complete_msr(&self, outcome: Outcome) -> bool {
        let error = match outcome {
            // Written to, the fields would be the VMM's answer to its own register.
            Outcome::NotHandled => return false,
            Outcome::Value(value) => {
                Self::put(field!(self, __bindgen_anon_1.msr.data), value);
                0
            }
            Outcome::Done => 0,
            Outcome::GeneralProtection => 1,
        };
        Self::put(field!(self, __bindgen_anon_1.msr.error), error);
        true
    }

    /// Returns RCX and RIP of the vCPU that has exited.
    pub(crate) fn rcx_and_rip(&self) -> (u64, u64) {
        (
            Self::get(field!(self, s.regs.regs.rcx)),
            Self::get(field!(self, s.regs.regs.rip)),
        )
    }

    /// Returns the general registers of the vCPU that has exited, if KVM has given them.
    pub(crate) fn regs(&self) -> Option<kvm_regs> {
        self.has_regs()
            .then(|| Self::get(field!(self, s.regs.regs)))
    }

    /// Makes [`has_regs`](Self::has_regs) able to tell whether KVM_RUN has been called since.
    pub(crate) fn expect_regs(&self) {
        let regs = u64::from(KVM_SYNC_X86_REGS);
        // The crate must not spoil registers that the VMM has written for the vCPU.
        if Self::get(field!(self, kvm_dirty_regs)) & regs == 0 {
            Self::put(field!(self, s.regs.regs.rip), NO_RIP);
        }
    }

    /// Returns whether KVM has given registers since [`expect_regs`](Self::expect_regs).
    pub(crate) fn has_regs(&self) -> bool {
        Self::get(field!(self, s.regs.regs.rip)) != NO_RIP
    }

    /// Gives the vCPU this RAX and RDX with its next KVM_RUN.
    pub(crate) fn set_rax_and_rdx(&self, rax: u64, rdx: u64) {
        Self::put(field!(self, s.regs.regs.rax), rax);
        Self::put(field!(self, s.regs.regs.rdx), rdx);
        self.give_regs();
    }

    /// Gives the vCPU these general registers with its next KVM_RUN.
    pub(crate) fn set_regs(&self, regs: &kvm_regs) {
        Self::put(field!(self, s.regs.regs), *regs);
        self.give_regs();
    }

    fn give_regs(&self) {
        let dirty = field!(self, kvm_dirty_regs);
        let regs = u64::from(KVM_SYNC_X86_REGS);
        Self::put(dirty, Self::get(dirty) | regs);
    }
}

/// What the follower alone asks.
#[cfg(feature = "lbr")]
impl RunPage {
    /// Returns the register and the value of an RDMSR that has been answered.
    pub(crate) fn answered(&self) -> Option<(u32, u64)> {
        match self.returned() {
            Returned::Rdmsr(index) if Self::get(field!(self, __bindgen_anon_1.msr.error)) == 0 => {
                Some((index, Self::get(field!(self, __bindgen_anon_1.msr.data))))
            }
            _ => None,
        }
    }

    /// Returns whether the vCPU is in system management mode or in a guest of its own.
    pub(crate) fn is_elsewhere(&self) -> bool {
        /// KVM_RUN_X86_SMM, KVM_RUN_X86_GUEST_MODE.
        const ELSEWHERE: u16 = 0b101;
        Self::get(field!(self, flags)) & ELSEWHERE != 0
    }

    /// Returns DR6 of a debug exception that has exited.
    pub(crate) fn debug_hits(&self) -> u64 {
        Self::get(field!(self, __bindgen_anon_1.debug.arch.dr6))
    }

    /// Makes the vCPU give its system registers with each exit, or no more. Returns whether that is new.
    pub(crate) fn expect_sregs(&self, wanted: bool) -> bool {
        let valid = field!(self, kvm_valid_regs);
        let (before, bit) = (Self::get(valid), u64::from(KVM_SYNC_X86_SREGS));
        let after = if wanted { before | bit } else { before & !bit };
        Self::put(valid, after);
        before != after
    }

    /// Returns the system registers of the vCPU that has exited, where they are expected.
    pub(crate) fn sregs(&self) -> kvm_sregs {
        Self::get(field!(self, s.regs.sregs))
    }
}

impl Flag for RunPage {
    /// Returns `immediate_exit`.
    fn flag(&self) -> &AtomicU8 {
        let byte = field!(self, immediate_exit);
        // SAFETY: mapped as long as `self`; a byte is aligned. This crate accesses it atomically only, and what
        // the VMM writes through its own mapping are single bytes.
        unsafe { AtomicU8::from_ptr(byte) }
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and nobody has a reference any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE) };
    }
}
