//! Starts another kernel without the firmware (kexec).

// UNSAFETY: system calls take raw pointers and numbers.
#![expect(unsafe_code, reason = "system calls")]

use core::ffi::CStr;

use crate::arch::{self, syscall};
use crate::sys::{Errno, Fd, check};

/// The magic numbers of reboot(2), and its command to start the kernel that is loaded.
const REBOOT: [usize; 3] = [0xfee1_dead, 0x2812_1969, 0x4558_4543];

/// Loads `kernel` with `initrd` and starts that kernel. Returns only with the reason for a failure.
pub fn start(kernel: Fd, initrd: Fd, command_line: &CStr) -> Errno {
    let line = command_line.to_bytes_with_nul();
    // SAFETY: the kernel reads the line by the length beside it, and checks the descriptors.
    let loaded = check(unsafe {
        syscall(
            arch::KEXEC_FILE_LOAD,
            [kernel.0, initrd.0, line.len(), line.as_ptr() as usize, 0, 0],
        )
    });
    let started = loaded.and_then(|_| {
        let [first, second, command] = REBOOT;
        // SAFETY: no pointers.
        check(unsafe { syscall(arch::REBOOT, [first, second, command, 0, 0, 0]) })
    });
    started.err().unwrap_or(Errno::ENOENT)
}
