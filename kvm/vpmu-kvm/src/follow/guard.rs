//! The timer that ends a run which has lost its guest: no interrupt reaches the guest during a run.
//!
//! UNSAFETY: POSIX timers are a C interface.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::mem::zeroed;
use std::ptr;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use vpmu_perf::ALARM;

use crate::error::Error;

/// Returns the time that the calling thread has run.
pub(super) fn time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// A timer of the time that a thread has run, in its guest or not: a busy host does not end a run. Its signal takes the thread
/// that made it out of the guest, within a tick of the host's kernel.
#[derive(Debug)]
pub(super) struct Guard(libc::timer_t);

// SAFETY: a timer belongs to the process, and any thread may set or delete it.
unsafe impl Send for Guard {}
// SAFETY: as above; the calls are the kernel's to order.
unsafe impl Sync for Guard {}

impl Guard {
    /// Makes a timer for the calling thread. `signal` is the overflows'.
    pub(super) fn new(signal: i32) -> Result<Self, Error> {
        // SAFETY: integers and a pointer, of which the kernel reads those set below.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_value.sival_ptr = ptr::without_provenance_mut(ALARM as u32 as usize);
        // The call itself, because musl's function is null in a static program with link-time optimization.
        // SAFETY: takes nothing.
        event.sigev_notify_thread_id = unsafe { libc::syscall(libc::SYS_gettid) } as libc::pid_t;
        let mut timer: libc::timer_t = ptr::null_mut();
        // SAFETY: both are locals; the kernel reads one and fills the other.
        let result = unsafe {
            libc::timer_create(
                libc::CLOCK_THREAD_CPUTIME_ID,
                &raw mut event,
                &raw mut timer,
            )
        };
        match result {
            0 => Ok(Self(timer)),
            _ => Err(Error::last("timer_create")),
        }
    }

    /// Has the signal come once, after `time`; zero: not at all.
    pub(super) fn set(&self, time: Duration) -> Result<(), Error> {
        // SAFETY: integers.
        let mut value: libc::itimerspec = unsafe { zeroed() };
        value.it_value.tv_sec = time.as_secs().cast_signed();
        value.it_value.tv_nsec = time.subsec_nanos().into();
        // SAFETY: the timer is this object's, `value` is a local that the kernel reads, and no old value is asked for.
        let result = unsafe { libc::timer_settime(self.0, 0, &raw const value, ptr::null_mut()) };
        match result {
            0 => Ok(()),
            _ => Err(Error::last("timer_settime")),
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // SAFETY: the timer is this object's.
        unsafe { libc::timer_delete(self.0) };
    }
}
