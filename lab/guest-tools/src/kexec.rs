//! Starts another kernel without the firmware (kexec).

// UNSAFETY: system calls take raw pointers and numbers.
#![expect(unsafe_code, reason = "system calls")]

use core::ffi::CStr;

use syscalls::{Errno, Sysno, syscall};

use crate::sys::Fd;

/// The magic numbers of reboot(2), and its command to start the kernel that is loaded.
const REBOOT: [usize; 3] = [0xfee1_dead, 0x2812_1969, 0x4558_4543];

/// Loads `kernel` with `initrd` and starts that kernel. Returns only with the reason for a failure.
pub fn start(kernel: Fd, initrd: Fd, command_line: &CStr) -> Errno {
    let line = command_line.to_bytes_with_nul();
    // SAFETY: the kernel reads the line by the length beside it, and checks the descriptors.
    let loaded = unsafe {
        let (kernel, initrd) = (kernel.0, initrd.0);
        syscall!(
            Sysno::kexec_file_load,
            kernel,
            initrd,
            line.len(),
            line.as_ptr(),
            0
        )
    };
    let started = loaded.and_then(|_| {
        let [first, second, command] = REBOOT;
        // SAFETY: no pointers.
        unsafe { syscall!(Sysno::reboot, first, second, command, 0) }
    });
    started.err().unwrap_or(Errno::ENOENT)
}
