//! Linux on x86-64: process entry and system calls.
//!
//! The numbers are those of the kernel's
//! `arch/x86/entry/syscalls/syscall_64.tbl`.

// UNSAFETY: the process entry and the `syscall` instruction have no safe form.
#![expect(unsafe_code, reason = "process entry, system calls")]

use core::arch::{asm, naked_asm};

pub(crate) const READ: usize = 0;
pub(crate) const WRITE: usize = 1;
pub(crate) const OPENAT: usize = 257;
pub(crate) const CLOSE: usize = 3;
pub(crate) const DUP3: usize = 292;
pub(crate) const EXIT_GROUP: usize = 231;
pub(crate) const CLOCK_GETTIME: usize = 228;
pub(crate) const RT_SIGACTION: usize = 13;
pub(crate) const CLONE: usize = 56;
pub(crate) const EXECVE: usize = 59;
pub(crate) const NANOSLEEP: usize = 35;
pub(crate) const GETDENTS64: usize = 217;
pub(crate) const SCHED_SETAFFINITY: usize = 203;
pub(crate) const WAIT4: usize = 61;
pub(crate) const IOPERM: usize = 173;
pub(crate) const MMAP: usize = 9;
pub(crate) const PERF_EVENT_OPEN: usize = 298;
pub(crate) const REBOOT: usize = 169;
pub(crate) const KEXEC_FILE_LOAD: usize = 320;

/// Enters the program from the kernel. The stack pointer points at `argc`,
/// and is a multiple of 16, as the ABI wants it before a call.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn _start() -> ! {
    naked_asm!(
        "xor ebp, ebp",
        "mov rdi, rsp",
        "call {enter}",
        "ud2",
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
    // SAFETY: the instruction itself overwrites RCX and R11, the kernel keeps
    // every other register but RAX; memory is the caller's duty.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a[0],
            in("rsi") a[1],
            in("rdx") a[2],
            in("r10") a[3],
            in("r8") a[4],
            in("r9") a[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}
