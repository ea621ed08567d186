//! One perf event: the system calls.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_DUMMY, PERF_COUNT_SW_TASK_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_GROUP,
    PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_SOFTWARE,
    perf_event_attr,
};
use perf_event_open_sys::{bindings, ioctls, perf_event_open};

use crate::notes::Notes;

/// A period that is longer than any machine runs.
pub(crate) const ENDLESS: u64 = i64::MAX as u64;

/// The most events of a host.
pub(crate) const COUNTERS: usize = 32;

const TIMES: u64 = PERF_FORMAT_TOTAL_TIME_ENABLED as u64 | PERF_FORMAT_TOTAL_TIME_RUNNING as u64;

fn word(bytes: &[u8], n: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[8 * n..8 * n + 8]);
    u64::from_ne_bytes(word)
}

/// The event to open.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) type_: u32,
    pub(crate) config: u64,
    /// The rings that count, and whose they are. A software clock knows neither.
    pub(crate) rings: Option<Rings>,
}

#[derive(Clone, Copy, Debug)]
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

/// A total, with the ns for which it was counted and for which it should have been.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Total {
    pub(crate) value: u64,
    pub(crate) enabled: u64,
    pub(crate) running: u64,
}

/// An open perf event of one thread.
#[derive(Debug)]
pub(crate) struct PerfEvent(File);

#[expect(
    unsafe_code,
    reason = "perf_event_open, its ioctls and fcntl are C interfaces"
)]
impl PerfEvent {
    /// Opens a stopped event for the thread of `notes`, which gets `signal` for each overflow. Its first period is
    /// endless. With a `leader`, which is the same thread's, the event is the last of that group.
    pub(crate) fn open(
        kind: Kind,
        notes: &Notes,
        signal: libc::c_int,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        let event = Self::of(kind, notes.target(), leader)?;
        event.signal_thread(notes.thread(), signal)?;
        Ok(event)
    }

    /// Opens a group of clocks of the thread of `notes`, stopped.
    pub(crate) fn open_group(notes: &Notes) -> io::Result<Self> {
        let mut attr = perf_event_attr::default();
        // A clock, too: with a leader of another kind, Linux from 6.12 on starts a member that is enabled by itself
        // only when the thread is next scheduled.
        attr.type_ = PERF_TYPE_SOFTWARE;
        attr.config = PERF_COUNT_SW_TASK_CLOCK.into();
        attr.read_format = TIMES | u64::from(PERF_FORMAT_GROUP);
        // So the leader takes no rights.
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        Self::of_attr(attr, notes.target(), None)
    }

    /// Opens an event of the calling thread that never counts.
    pub(crate) fn open_spare() -> io::Result<Self> {
        let mut attr = perf_event_attr::default();
        attr.type_ = PERF_TYPE_SOFTWARE;
        attr.config = PERF_COUNT_SW_DUMMY.into();
        // So it takes no rights.
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        Self::of_attr(attr, 0, None)
    }

    /// Checks that the event can be opened.
    pub(crate) fn try_open(kind: Kind) -> io::Result<()> {
        Self::of(kind, 0, None).map(drop)
    }

    fn of(kind: Kind, thread: libc::pid_t, leader: Option<&Self>) -> io::Result<Self> {
        let mut attr = kind.attr();
        attr.read_format = TIMES;
        attr.__bindgen_anon_1.sample_period = ENDLESS;
        // The kernel signals each overflow.
        attr.__bindgen_anon_2.wakeup_events = 1;
        Self::of_attr(attr, thread, leader)
    }

    /// Opens the event of `attr`, stopped, for a thread.
    pub(crate) fn of_attr(
        mut attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<&Self>,
    ) -> io::Result<Self> {
        attr.size = size_of::<perf_event_attr>() as u32;
        attr.set_disabled(1);
        let (group, flags) = (leader.map_or(-1, Self::fd), PERF_FLAG_FD_CLOEXEC.into());
        // SAFETY: `attr` is initialised and its size is in it.
        let fd = unsafe { perf_event_open(&mut attr, thread, -1, group, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, and nobody else's.
        Ok(Self(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    fn signal_thread(&self, thread: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETOWN_EX: libc::c_int = 15;
        const F_SETSIG: libc::c_int = 10;
        const F_OWNER_TID: libc::c_int = 0;
        let fd = self.fd();
        // SAFETY: none of these takes memory but F_SETOWN_EX, which reads `owner`.
        let done = unsafe {
            let owner = Owner {
                kind: F_OWNER_TID,
                pid: thread,
            };
            libc::fcntl(fd, F_SETOWN_EX, &raw const owner) == 0
                && libc::fcntl(fd, F_SETSIG, signal) == 0
                && libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) == 0
        };
        if done {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }

    pub(crate) fn fd(&self) -> libc::c_int {
        self.0.as_raw_fd()
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn enable(&self) -> bool {
        // SAFETY: an ioctl of an open perf event; it takes no memory.
        unsafe { ioctls::ENABLE(self.fd(), 0) == 0 }
    }

    pub(crate) fn disable(&self) -> bool {
        // SAFETY: as above.
        unsafe { ioctls::DISABLE(self.fd(), 0) == 0 }
    }

    /// Sets the next overflow to `period` from now.
    pub(crate) fn set_period(&self, period: u64) -> bool {
        // The crate's wrapper does not fit: it hands over the number where the kernel wants its address.
        // A request is an unsigned long for glibc and an int for musl. This one is positive as both.
        let request = bindings::PERIOD.cast_signed() as libc::Ioctl;
        // SAFETY: the kernel reads `period`.
        unsafe { libc::ioctl(self.fd(), request, &raw const period) == 0 }
    }

    pub(crate) fn read(&self) -> io::Result<Total> {
        let mut bytes = [0; 24];
        (&self.0).read_exact(&mut bytes)?;
        Ok(Total {
            value: word(&bytes, 0),
            enabled: word(&bytes, 1),
            running: word(&bytes, 2),
        })
    }

    /// Reads a group of `members` members: their totals in the order in which they were opened.
    pub(crate) fn read_group(&self, members: usize) -> io::Result<impl Iterator<Item = Total>> {
        // The head has the number of events, both times, and the leader's total.
        const HEAD: usize = 4;
        let mut bytes = [0; 8 * (HEAD + COUNTERS)];
        let read = (&self.0).read(&mut bytes)?;
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
