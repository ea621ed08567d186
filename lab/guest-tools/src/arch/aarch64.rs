//! Linux on AArch64: process entry, system calls, and register accesses that
//! a hypervisor can complete.
//!
//! The numbers are those of the kernel's `include/uapi/asm-generic/unistd.h`.

// UNSAFETY: the process entry, the `svc` instruction and device accesses have
// no safe form.
#![expect(unsafe_code, reason = "process entry, system calls, device accesses")]

use core::arch::{asm, naked_asm};

pub(crate) const READ: usize = 63;
pub(crate) const WRITE: usize = 64;
pub(crate) const OPENAT: usize = 56;
pub(crate) const CLOSE: usize = 57;
pub(crate) const DUP3: usize = 24;
pub(crate) const EXIT_GROUP: usize = 94;
pub(crate) const CLOCK_GETTIME: usize = 113;
pub(crate) const RT_SIGACTION: usize = 134;
pub(crate) const CLONE: usize = 220;
pub(crate) const EXECVE: usize = 221;
pub(crate) const MMAP: usize = 222;
pub(crate) const NANOSLEEP: usize = 101;
pub(crate) const GETDENTS64: usize = 61;
pub(crate) const SCHED_SETAFFINITY: usize = 122;
pub(crate) const WAIT4: usize = 260;

/// Enters the program from the kernel. The stack pointer points at `argc`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    naked_asm!(
        "mov x29, xzr",
        "mov x30, xzr",
        "mov x0, sp",
        "b {enter}",
        enter = sym crate::start::enter,
    )
}

/// Makes one system call. Errors come back as -4095..=-1.
///
/// # Safety
///
/// The arguments must be what the kernel expects of call `number`, and what
/// they point at must stay valid for it.
pub(crate) unsafe fn syscall(number: usize, a: [usize; 6]) -> isize {
    let result: isize;
    // SAFETY: the kernel keeps every register but x0; memory is the caller's
    // duty.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a[0] as isize => result,
            in("x1") a[1],
            in("x2") a[2],
            in("x3") a[3],
            in("x4") a[4],
            in("x5") a[5],
            options(nostack),
        );
    }
    result
}

/// Reads a 32-bit device register.
///
/// Spelled out, because a hypervisor can complete a trapped load only when it
/// has no write-back (ESR_ELx.ISV).
///
/// # Safety
///
/// `register` must be mapped and aligned.
pub(crate) unsafe fn device_read(register: *const u32) -> u32 {
    let value: u32;
    // SAFETY: the caller's duty.
    unsafe {
        asm!("ldr {0:w}, [{1}]", out(reg) value, in(reg) register, options(nostack));
    }
    value
}

/// Writes a 32-bit device register, see [`device_read`].
///
/// # Safety
///
/// `register` must be mapped and aligned.
pub(crate) unsafe fn device_write(register: *mut u32, value: u32) {
    // SAFETY: the caller's duty.
    unsafe {
        asm!("str {0:w}, [{1}]", in(reg) value, in(reg) register, options(nostack));
    }
}
