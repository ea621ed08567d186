//! The kernel, as far as perf events need one, and the events that it has opened.
//!
//! One trait has each system call of this crate but those of the signal handler, so that a test can be the kernel and
//! follow perf's rules for machines that are not at hand: fewer counters, other users of the PMU, refusals, throttling.
//!
//! UNSAFETY: perf_event_open, its ioctls, fcntl and mmap are C interfaces.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::fmt::Debug;
use std::hint;
use std::io;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, OnceLock};
use std::time::Instant;

use perf_event_open_sys::bindings::{
    self, PERF_COUNT_SW_DUMMY, PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_GROUP, PERF_TYPE_RAW,
    PERF_TYPE_SOFTWARE, perf_event_attr,
};
use perf_event_open_sys::{ioctls, perf_event_open};
use vpmu::counter::Counter;

use crate::kind::{ENDLESS, Kind, Rings, probe};
use crate::notes::Notes;
use crate::options::Backing;
use crate::processor::{P0_CYCLES, Processor};

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

/// How often the trial of an event spins: some ms.
const SPINS: u32 = 100_000;

/// Perf events of this process that are open.
pub(crate) static OPEN: AtomicU64 = AtomicU64::new(0);

/// The kernel of this machine.
#[derive(Debug)]
pub(crate) struct Linux;

impl Kernel for Linux {
    fn processor(&self) -> Processor {
        static PROCESSOR: OnceLock<Processor> = OnceLock::new();
        let work = || (0..SPINS).for_each(|_| hint::spin_loop());
        *PROCESSOR.get_or_init(|| Processor::of_host(|| p0_cycles_count(&Self, work)))
    }

    fn open(
        &self,
        mut attr: perf_event_attr,
        thread: libc::pid_t,
        leader: Option<RawFd>,
    ) -> io::Result<RawFd> {
        attr.size = size_of::<perf_event_attr>() as u32;
        // A program that the VMM starts is not to have its guests' counters.
        let (group, flags) = (leader.unwrap_or(-1), PERF_FLAG_FD_CLOEXEC.into());
        // SAFETY: `attr` is initialised and its size is in it.
        match unsafe { perf_event_open(&mut attr, thread, -1, group, flags) } {
            fd if fd < 0 => Err(io::Error::last_os_error()),
            fd => {
                OPEN.fetch_add(1, Ordering::Relaxed);
                Ok(fd)
            }
        }
    }

    fn close(&self, event: RawFd) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: takes no memory. The caller owns the descriptor.
        unsafe { libc::close(event) };
    }

    fn signal(&self, event: RawFd, thread: libc::pid_t, signal: libc::c_int) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            pid: libc::pid_t,
        }
        const F_SETOWN_EX: libc::c_int = 15;
        const F_SETSIG: libc::c_int = 10;
        const F_OWNER_TID: libc::c_int = 0;
        let owner = Owner {
            kind: F_OWNER_TID,
            pid: thread,
        };
        const ASYNC: libc::c_int = libc::O_ASYNC | libc::O_NONBLOCK;
        // SAFETY: none of these takes memory but F_SETOWN_EX, which reads `owner`.
        let done = unsafe {
            // To the thread and not to the process: each vCPU's overflows take that vCPU out of its guest.
            libc::fcntl(event, F_SETOWN_EX, &raw const owner) == 0
                // Without a signal of its own it would be SIGIO, which is not queued and names no event.
                && libc::fcntl(event, F_SETSIG, signal) == 0
                // The call itself: musl's fcntl adds O_LARGEFILE, which the rules for seccomp filters do not allow.
                && libc::syscall(libc::SYS_fcntl, event, libc::F_SETFL, ASYNC) == 0
        };
        match done {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    }

    fn enable(&self, event: RawFd) -> bool {
        // SAFETY: an ioctl of an open perf event; it takes no memory.
        unsafe { ioctls::ENABLE(event, 0) == 0 }
    }

    fn disable(&self, event: RawFd) -> bool {
        // SAFETY: as above.
        unsafe { ioctls::DISABLE(event, 0) == 0 }
    }

    fn set_period(&self, event: RawFd, period: u64) -> bool {
        // The crate's wrapper does not fit: it hands over the number where the kernel wants its address.
        // A request is an unsigned long for glibc and an int for musl. This one is positive as both.
        let request = bindings::PERIOD.cast_signed() as libc::Ioctl;
        // SAFETY: the kernel reads `period`.
        unsafe { libc::ioctl(event, request, &raw const period) == 0 }
    }

    fn read(&self, event: RawFd, totals: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the kernel writes no more than the length of `totals`.
        let read = unsafe { libc::read(event, totals.as_mut_ptr().cast(), totals.len()) };
        usize::try_from(read).map_err(|_| io::Error::last_os_error())
    }

    fn now(&self) -> u64 {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        // Differences alone are used, and 64 bits of ns last for centuries.
        START.elapsed().as_nanos() as u64
    }

    fn map(&self, event: RawFd, length: usize) -> io::Result<NonNull<u8>> {
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let at = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, event, 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    unsafe fn unmap(&self, buffer: NonNull<u8>, length: usize) {
        // SAFETY: the caller promises that the mapping is whole and unused.
        unsafe { libc::munmap(buffer.as_ptr().cast(), length) };
    }
}

/// Returns whether [`P0_CYCLES`] counts while the calling thread does `work`: an event that no manual names may count
/// nothing, or something else.
fn p0_cycles_count(kernel: &'static dyn Kernel, work: impl FnOnce()) -> bool {
    let kind = Kind {
        type_: PERF_TYPE_RAW,
        config: P0_CYCLES,
        rings: Some(Rings::USER),
    };
    let Ok(event) = PerfEvent::open_for_host(kernel, kind) else {
        return false;
    };
    if !event.enable() {
        return false;
    }
    work();
    event.read().is_ok_and(|total| total.value > 0)
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
        // A clock, too: with a leader of another kind, Linux from 6.12 on starts a member that is enabled by itself
        // only when the thread is next scheduled.
        let clock = Kind {
            rings: Some(Rings::USER),
            ..probe(Backing::Clock, false)
        };
        let mut attr = clock.attr();
        attr.read_format |= u64::from(PERF_FORMAT_GROUP);
        Self::of_attr(kernel, attr, notes.target(), None)
    }

    /// Opens an event of the calling thread that never counts.
    pub(crate) fn open_spare(kernel: &'static dyn Kernel) -> io::Result<Self> {
        let dummy = Kind {
            type_: PERF_TYPE_SOFTWARE,
            config: PERF_COUNT_SW_DUMMY.into(),
            rings: Some(Rings::USER),
        };
        Self::of_attr(kernel, dummy.attr(), 0, None)
    }

    /// Opens a stopped event of the calling thread, whose overflows nobody gets.
    pub(crate) fn open_here(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<Self> {
        Self::of(kernel, kind, 0, None)
    }

    /// Checks that the event can be opened.
    pub(crate) fn try_open(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<()> {
        Self::open_here(kernel, kind).map(drop)
    }

    /// Opens a stopped event of the calling thread that counts the host alone.
    pub(crate) fn open_for_host(kernel: &'static dyn Kernel, kind: Kind) -> io::Result<Self> {
        let mut attr = kind.attr();
        attr.set_exclude_host(0);
        attr.set_exclude_guest(1);
        Self::of_attr(kernel, attr, 0, None)
    }

    /// Returns whether so many events of `kind` count together, beside all that others count on the calling thread's
    /// processor.
    pub(crate) fn can_pin(kernel: &'static dyn Kernel, kind: Kind, number: u8) -> bool {
        let (mut pinned, mut attr) = (kind.attr(), kind.attr());
        pinned.set_pinned(1);
        let Ok(leader) = Self::of_attr(kernel, pinned, 0, None) else {
            return false;
        };
        // Enabled, so that they count with their leader.
        attr.set_disabled(0);
        let member = || Self::of_attr(kernel, attr, 0, Some(&leader));
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
        attr.__bindgen_anon_1.sample_period = ENDLESS;
        // The kernel signals each overflow.
        attr.__bindgen_anon_2.wakeup_events = 1;
        Self::of_attr(kernel, attr, thread, leader)
    }

    /// Opens the event of `attr` for a thread.
    pub(crate) fn of_attr(
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
    u64::from_ne_bytes(bytes.as_chunks().0[n])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake::{Fake, Machine};

    #[test]
    fn an_event_that_no_manual_names_has_to_count() {
        for (machine, counts) in [
            (Machine::default(), true),
            (
                Machine {
                    dead: Some(P0_CYCLES),
                    ..Machine::default()
                },
                false,
            ),
            // Without a counter the trial proves nothing.
            (
                Machine {
                    counters: 1,
                    pinned: 1,
                    ..Machine::default()
                },
                false,
            ),
        ] {
            let kernel = Fake::new(machine);
            let found = p0_cycles_count(kernel, || kernel.pass(1_000_000));
            assert_eq!(found, counts, "{machine:?}");
        }
    }
}
