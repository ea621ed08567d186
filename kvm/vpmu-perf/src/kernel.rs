//! What is asked of the kernel for perf events: each system call of this crate but those of the signal handler.
//!
//! One trait, so that a test can be the kernel and follow perf's rules for machines that are not at hand: fewer
//! counters, other users of the PMU, refusals, throttling.
#![expect(
    unsafe_code,
    reason = "a buffer is unmapped, which its users have to allow"
)]

use std::fmt::Debug;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;

use perf_event_open_sys::bindings::perf_event_attr;

use crate::processor::Processor;

/// The kernel, as far as perf events need one.
pub(crate) trait Kernel: Debug + Sync {
    /// Returns the processor that the kernel runs on. The first call may take some ms.
    fn processor(&self) -> Processor;

    /// Opens the event of `attr` for a thread, 0 for the calling one, as the last of the group of `leader`.
    fn open(
        &self,
        attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<RawFd>,
    ) -> io::Result<RawFd>;

    /// Closes an event, which is not used any more.
    fn close(&self, event: RawFd);

    /// Has `thread` get `signal` for each overflow of `event`.
    fn signal(&self, event: RawFd, thread: libc::pid_t, signal: libc::c_int) -> io::Result<()>;

    fn enable(&self, event: RawFd) -> bool;

    fn disable(&self, event: RawFd) -> bool;

    /// Sets the next overflow to `period` from now, and each further one to `period` from the one before.
    fn set_period(&self, event: RawFd, period: u64) -> bool;

    /// Reads the totals of `event`, in the format of its attributes. Returns the number of bytes.
    fn read(&self, event: RawFd, totals: &mut [u8]) -> io::Result<usize>;

    /// Returns the time, ns since some moment.
    fn now(&self) -> u64;

    /// Maps the buffer of `event`: `length` bytes that stay valid until they are unmapped.
    fn map(&self, event: RawFd, length: usize) -> io::Result<NonNull<u8>>;

    /// Unmaps a buffer.
    ///
    /// # Safety
    ///
    /// [`map`](Self::map) has returned `buffer` for this `length`, and nobody uses it any more.
    unsafe fn unmap(&self, buffer: NonNull<u8>, length: usize);
}
