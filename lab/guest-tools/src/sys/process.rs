//! Processes: their beginning, what they do at a signal, and their end.

// UNSAFETY: system calls take raw pointers and numbers.
#![expect(unsafe_code, reason = "system calls")]

use core::ffi::{CStr, c_char};
use core::mem::MaybeUninit;

use syscalls::{Errno, Sysno, syscall};

use super::retry;
use crate::end::End;

const SIGCHLD: usize = 17;
const SIG_IGN: usize = 1;
/// Size in bytes of the kernel's signal set.
const SIGSET_SIZE: usize = 8;

/// The kernel's `struct sigaction`: handler, flags, restorer, mask.
#[derive(Clone, Copy)]
pub struct SignalAction([usize; 4]);

/// Ignores `signal`, and returns the previous action.
pub fn ignore_signal(signal: i32) -> SignalAction {
    let mut before = SignalAction([0; 4]);
    set_signal(signal, &SignalAction([SIG_IGN, 0, 0, 0]), &mut before);
    before
}

/// Sets `signal` to the action that [`ignore_signal`] returned.
pub fn restore_signal(signal: i32, action: SignalAction) {
    set_signal(signal, &action, &mut SignalAction([0; 4]));
}

fn set_signal(signal: i32, action: &SignalAction, before: &mut SignalAction) {
    // SAFETY: both point at a `struct sigaction`; the handler is SIG_IGN or
    // what this process was started with, which is SIG_IGN or SIG_DFL.
    let _ = unsafe {
        let (action, before) = (action.0.as_ptr(), before.0.as_mut_ptr());
        syscall!(Sysno::rt_sigaction, signal, action, before, SIGSET_SIZE)
    };
}

/// A child process.
#[derive(Clone, Copy)]
pub struct Child(usize);

/// Duplicates the process; `None` in the child.
///
/// # Errors
///
/// The system call's.
pub fn fork() -> Result<Option<Child>, Errno> {
    // SAFETY: without CLONE_VM the child has its own memory, so nothing of
    // this process is shared with it.
    let pid = unsafe { syscall!(Sysno::clone, SIGCHLD, 0, 0, 0, 0) }?;
    Ok((pid != 0).then_some(Child(pid)))
}

/// The end of a child, with the time that it and its own children used.
#[derive(Clone, Copy)]
pub struct Ended {
    /// How it ended.
    pub end: End,
    /// Time in user mode, microseconds.
    pub user_us: u64,
    /// Time in the kernel, microseconds.
    pub sys_us: u64,
}

impl Child {
    /// Its process number.
    pub fn id(self) -> usize {
        self.0
    }

    /// Waits for the child to end.
    ///
    /// # Errors
    ///
    /// The system call's.
    pub fn wait(self) -> Result<Ended, Errno> {
        let mut status = 0_i32;
        // struct rusage: two timevals and 14 longs.
        let mut usage = MaybeUninit::<[u64; 18]>::zeroed();
        // SAFETY: both are as large as the kernel's structures.
        retry(|| unsafe {
            syscall!(Sysno::wait4, self.0, &raw mut status, 0, usage.as_mut_ptr())
        })?;
        // SAFETY: zeroed above, so initialised in any case.
        let usage = unsafe { usage.assume_init() };
        Ok(Ended {
            end: End::from_wait_status(status),
            user_us: usage[0] * 1_000_000 + usage[1],
            sys_us: usage[2] * 1_000_000 + usage[3],
        })
    }
}

/// Replaces the program. Returns only with the reason for a failure.
///
/// `arguments` and `environment` come from [`crate::start::Process`].
pub fn execute(
    path: &CStr,
    arguments: *const *const c_char,
    environment: *const *const c_char,
) -> Errno {
    // SAFETY: all three are terminated; the kernel copies them, and gives
    // EFAULT for pointers that are not.
    let result = unsafe { syscall!(Sysno::execve, path.as_ptr(), arguments, environment) };
    result.err().unwrap_or(Errno::ENOENT)
}

/// Ends the process.
pub fn exit(status: i32) -> ! {
    loop {
        // SAFETY: no pointers; does not return.
        let _ = unsafe { syscall!(Sysno::exit_group, status) };
    }
}
