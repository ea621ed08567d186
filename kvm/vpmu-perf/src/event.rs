//! A perf event: the ways in which one is opened, and what an open one is asked.

use std::io;
use std::os::fd::RawFd;

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_DUMMY, PERF_COUNT_SW_TASK_CLOCK, PERF_FORMAT_GROUP,
    PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_SOFTWARE,
    perf_event_attr,
};
use vpmu::counter::Counter;

use crate::kernel::Kernel;
use crate::kind::Kind;
use crate::notes::Notes;
use crate::periods::ENDLESS;

/// The format of an event's totals.
pub(crate) const TIMES: u64 =
    PERF_FORMAT_TOTAL_TIME_ENABLED as u64 | PERF_FORMAT_TOTAL_TIME_RUNNING as u64;

/// A total, with the ns for which it was counted and for which it should have been.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Total {
    pub(crate) value: u64,
    pub(crate) enabled: u64,
    pub(crate) running: u64,
}

/// An open perf event of one thread.
#[derive(Debug)]
pub(crate) struct PerfEvent {
    fd: RawFd,
    kernel: &'static dyn Kernel,
}

impl PerfEvent {
    /// Opens a stopped event for the thread of `notes`, which gets `signal` for each overflow. Its first period is
    /// endless. With a `leader`, which is the same thread's, the event is the last of that group.
    pub(crate) fn open(
        kernel: &'static dyn Kernel,
        kind: Kind,
        notes: &Notes,
        signal: libc::c_int,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        let event = Self::of(kernel, kind, notes.target(), leader)?;
        kernel.signal(event.fd(), notes.thread(), signal)?;
        Ok(event)
    }

    /// Opens a group of clocks of the thread of `notes`, stopped.
    pub(crate) fn open_group(kernel: &'static dyn Kernel, notes: &Notes) -> io::Result<Self> {
        let mut attr = perf_event_attr::default();
        // A clock, too: with a leader of another kind, Linux from 6.12 on starts a member that is enabled by itself
        // only when the thread is next scheduled.
        attr.type_ = PERF_TYPE_SOFTWARE;
        attr.config = PERF_COUNT_SW_TASK_CLOCK.into();
        attr.read_format = TIMES | u64::from(PERF_FORMAT_GROUP);
        // So the leader takes no rights.
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        Self::of_attr(kernel, attr, notes.target(), None)
    }

    /// Opens an event of the calling thread that never counts.
    pub(crate) fn open_spare(kernel: &'static dyn Kernel) -> io::Result<Self> {
        let mut attr = perf_event_attr::default();
        attr.type_ = PERF_TYPE_SOFTWARE;
        attr.config = PERF_COUNT_SW_DUMMY.into();
        // So it takes no rights.
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        Self::of_attr(kernel, attr, 0, None)
    }

    /// Opens a stopped event of the calling thread, whose overflows nobody gets.
    pub(crate) fn open_here(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<Self> {
        Self::of(kernel, kind, 0, None)
    }

    /// Checks that the event can be opened.
    pub(crate) fn try_open(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<()> {
        Self::open_here(kernel, kind).map(drop)
    }

    /// Checks that the event can be opened where it counts the host alone.
    pub(crate) fn try_open_for_host(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<()> {
        Self::open_for_host(kernel, kind).map(drop)
    }

    /// Opens a stopped event of the calling thread that counts the host alone.
    pub(crate) fn open_for_host(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<Self> {
        let mut attr = kind.attr();
        attr.read_format = TIMES;
        attr.set_exclude_host(0);
        attr.set_exclude_guest(1);
        Self::of_attr(kernel, attr, 0, None)
    }

    /// Returns whether so many events of `kind` count together, beside all that others count on the calling thread's
    /// processor.
    pub(crate) fn can_pin(kernel: &'static dyn Kernel, kind: Kind, number: u8) -> bool {
        let mut attr = kind.attr();
        attr.read_format = TIMES;
        let mut pinned = attr;
        pinned.set_pinned(1);
        let Ok(leader) = Self::of_attr(kernel, pinned, 0, None) else {
            return false;
        };
        // Enabled, so that they count with their leader.
        let member = || Self::open_attr(kernel, attr, 0, Some(&leader));
        let members: io::Result<Vec<Self>> = (1..number).map(|_| member()).collect();
        // A pinned group that has no counters is in an error state, and reads nothing. On a core of the other kind it waits.
        let counts = |total: Total| total.running == total.enabled;
        members.is_ok() && leader.enable() && leader.read().is_ok_and(counts)
    }

    fn of(
        kernel: &'static dyn Kernel,
        kind: Kind,
        thread: libc::pid_t,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        let mut attr = kind.attr();
        attr.read_format = TIMES;
        attr.__bindgen_anon_1.sample_period = ENDLESS;
        // The kernel signals each overflow.
        attr.__bindgen_anon_2.wakeup_events = 1;
        Self::of_attr(kernel, attr, thread, leader)
    }

    /// Opens the event of `attr`, stopped, for a thread.
    pub(crate) fn of_attr(
        kernel: &'static dyn Kernel,
        mut attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        attr.set_disabled(1);
        Self::open_attr(kernel, attr, thread, leader)
    }

    /// Opens the event of `attr` for a thread.
    pub(crate) fn open_attr(
        kernel: &'static dyn Kernel,
        attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        let fd = kernel.open(attr, thread, leader.map(Self::fd))?;
        Ok(Self { fd, kernel })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    pub(crate) fn enable(&self) -> bool {
        self.kernel.enable(self.fd)
    }

    pub(crate) fn disable(&self) -> bool {
        self.kernel.disable(self.fd)
    }

    /// Sets the next overflow to `period` from now.
    pub(crate) fn set_period(&self, period: u64) -> bool {
        self.kernel.set_period(self.fd, period)
    }

    pub(crate) fn read(&self) -> io::Result<Total> {
        let mut bytes = [0; 24];
        // An event in an error state reads nothing (perf_read), and that is no total.
        if self.kernel.read(self.fd, &mut bytes)? != bytes.len() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Total {
            value: word(&bytes, 0),
            enabled: word(&bytes, 1),
            running: word(&bytes, 2),
        })
    }

    /// Reads a group of `members` members: their totals in the order in which they were opened.
    pub(crate) fn read_group(
        &self,
        members: usize,
    ) -> io::Result<impl Iterator<Item = Total> + use<>> {
        // The head has the number of events, both times, and the leader's total.
        const HEAD: usize = 4;
        let mut bytes = [0; 8 * (HEAD + Counter::COUNT)];
        let read = self.kernel.read(self.fd, &mut bytes)?;
        if read != 8 * (HEAD + members) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((0..members).map(move |n| Total {
            value: word(&bytes, HEAD + n),
            enabled: word(&bytes, 1),
            running: word(&bytes, 2),
        }))
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        self.kernel.close(self.fd);
    }
}

fn word(bytes: &[u8], n: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[8 * n..8 * n + 8]);
    u64::from_ne_bytes(word)
}
