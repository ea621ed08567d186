//! The perf events that are opened: what each counts, and of whom.

use std::io;

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_DUMMY, PERF_COUNT_SW_TASK_CLOCK, PERF_FORMAT_GROUP, PERF_TYPE_SOFTWARE,
    perf_event_attr,
};

use crate::kernel::{Kernel, PerfEvent, TIMES};
use crate::notes::Notes;

/// A period that is longer than any machine runs. The kernel refuses 2^63.
pub(crate) const ENDLESS: u64 = i64::MAX as u64;

/// The event to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub(crate) type_: u32,
    pub(crate) config: u64,
    /// The rings that count, and whose they are. A software clock knows neither.
    pub(crate) rings: Option<Rings>,
}

/// The privilege rings in which an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rings {
    pub(crate) user: bool,
    pub(crate) kernel: bool,
    /// Whether the event counts only while the thread runs a guest.
    pub(crate) guest: bool,
}

impl Kind {
    /// Returns the attributes that say what is counted, and where.
    pub(crate) fn attr(self) -> perf_event_attr {
        let mut attr = perf_event_attr::default();
        attr.type_ = self.type_;
        attr.config = self.config;
        if let Some(rings) = self.rings {
            attr.set_exclude_host(rings.guest.into());
            attr.set_exclude_hv(1);
            attr.set_exclude_user(u64::from(!rings.user));
            attr.set_exclude_kernel(u64::from(!rings.kernel));
        }
        attr
    }
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
        // A pinned group that has no counters is in an error state, and reads nothing.
        members.is_ok() && leader.enable() && leader.read().is_ok()
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
}
