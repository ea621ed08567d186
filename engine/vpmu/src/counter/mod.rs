//! What the engine asks of a host: counters that can be created, paused, resumed and read.
//!
//! A guest counter that counts needs something real behind it: a hardware counter that a hypervisor
//! owns, a `perf_event_open` descriptor, a test's number. The engine knows only this trait, so one
//! register model serves all hosts, and a test can count every operation. The cost of a virtual PMU
//! *is* the number of these calls: creating a host event takes microseconds on Linux, pausing one a
//! fraction of that.
//!
//! Calls name guest counters by number. The host decides which host counter stands behind a number, from
//! [`create`](CounterHost::create) to [`release`](CounterHost::release).
//!
//! [`HostEvents`] decides when the calls are made, under a [`Policy`].
//!
//! # The life of a host event
//!
//! For each sample a guest profiler stops all counters, reads one, rewrites it and starts them again.
//! Each step touches host events, and on a host like Linux making an event is ten times as dear as
//! pausing one. Which calls can be left out depends on the life of the event alone, and is the same
//! for every architecture:
//!
//! ```text
//!                      start (create)                 resume_started
//!      +--------+   ----------------->  +----------+  ------------->  +---------+
//!      |  none  |                       |  paused  |                  | running |
//!      +--------+   <-----------------  +----------+  <-------------  +---------+
//!                     slice without        |    ^        stop, touch      |  ^
//!                     use, release         |    |                         |  | a report that is due
//!                                    read once: drained                   +--+
//! ```
//!
//! A paused event is *drained* once its total has been read. A drained event is neither paused nor
//! read again, and its period is set when it is resumed, not before. [`Policy::ReusePaused`] adds
//! this memory to [`Policy::Reuse`]; [`Policy::Recreate`] has no paused state at all.

mod bank;
mod host_events;
mod policy;
mod repeats;
mod set;
mod slots;
mod statistics;

use core::fmt;
use core::num::NonZeroU64;

pub(crate) use bank::{Bank, FAR, Model};
pub use host_events::HostEvents;
pub use policy::{Policy, Report};
pub use set::{Counter, CounterSet, Iter};
pub use slots::Slots;
pub use statistics::Statistics;
pub(crate) use statistics::count;

/// Real counters behind guest counters. `E` describes what is to be counted:
/// [`arm::CounterConfig`](crate::arm::CounterConfig) on Arm,
/// [`x86::CounterConfig`](crate::x86::CounterConfig) on x86.
///
/// The engine keeps the order of calls for each counter: `create`, then any of `set_period`,
/// `resume`, `pause` and `read`, then `release`. The engine never resumes a running counter. Only under
/// [`Policy::Reuse`], as in the published original, does it pause a paused counter again; that must change nothing.
pub trait CounterHost<E> {
    /// Backs `counter` with a host event that counts `event`: stopped, with a total of zero and no
    /// report wanted.
    ///
    /// # Errors
    ///
    /// Says why the host cannot. The guest's counter then stands still and is
    /// [`CounterState::Lost`] until it is configured anew.
    fn create(&mut self, counter: Counter, event: &E) -> Result<(), Lost>;

    /// Asks for one overflow report when `events` more have been counted from now; `None`: no report is wanted. A
    /// request replaces the one before, stays in force over `pause` and `resume`, and ends with its report.
    ///
    /// The engine tolerates a report that comes late or for nothing. A report that never comes is a lost interrupt in
    /// the guest.
    // Not zero: a report that is due now is an overflow, which the engine counts by itself. perf refuses it, too.
    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>);

    /// Starts these counters. A set, because a hardware host does it in one register write.
    // Counters that the guest starts together must count the same time.
    fn resume(&mut self, counters: CounterSet);

    /// Stops these counters. Their totals stay readable.
    fn pause(&mut self, counters: CounterSet);

    /// Returns the number of events counted since `create`, modulo 2^64.
    fn read(&mut self, counter: Counter) -> u64;

    /// Releases the host event. The engine has paused the event before.
    fn release(&mut self, counter: Counter);

    /// Stops these counters and puts the total of each into its slot of `totals`, if that is one operation for this
    /// host. Returns whether it is. If not, nothing was done, and the engine calls [`pause`](Self::pause). Counted as a
    /// pause.
    #[inline(always)]
    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        let _ = (counters, totals);
        false
    }

    /// Returns what a PMU with PEBS ([`x86::pebs`](crate::x86::pebs)) needs beside counters. `None`: every record is lost.
    fn support_pebs(&mut self) -> Option<&mut dyn crate::x86::pebs::Host> {
        None
    }

    /// Returns whether the embedder hands branches over only while
    /// [`Pmu::branches_awaited`](crate::x86::Pmu::branches_awaited) says that a PMI waits for them. `false`: the
    /// embedder hands over all branches, or offers no [last branch records](crate::x86::lbr).
    fn follows_branches(&self) -> bool {
        false
    }

    /// Returns whether each report that is due reaches the PMU before the guest's next access does: for example by a
    /// signal to the vCPU's own thread that is checked for at every exit. Then a counter whose report has not come has
    /// not overflowed, and the overflow status can be read without reading counters.
    fn reports_promptly(&self) -> bool {
        false
    }

    /// Returns whether reports repeat: after each report the same period begins again, until
    /// [`set_period`](Self::set_period) replaces the period, also over `pause` and `resume`.
    fn repeats(&self) -> bool {
        false
    }

    // By the number of counters that wait: a bound on interrupts is the vCPU's, not the counter's.
    /// Returns the shortest period while `sharing` counters wait for a report. The host lengthens shorter periods to
    /// this.
    fn shortest_period(&self, sharing: u32) -> u64 {
        let _ = sharing;
        1
    }

    /// Returns why the total of `counter` is too low, as the last read, pause or resume has shown:
    /// [`Lost::Multiplexed`] if the host event had to share its counter since `create`. The engine calls this after
    /// each total that it takes. The call must cost nothing, and is not counted.
    fn deficit(&self, counter: Counter) -> Option<Lost> {
        let _ = counter;
        None
    }
}

/// A host that is not there yet, as before a vCPU has a thread: it backs no counter, and counts nothing.
impl<E, H: CounterHost<E>> CounterHost<E> for Option<H> {
    fn create(&mut self, counter: Counter, event: &E) -> Result<(), Lost> {
        match self {
            Some(host) => host.create(counter, event),
            // The counter is asked for again when its vCPU is loaded.
            None => Err(Lost::Busy),
        }
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        if let Some(host) = self {
            host.set_period(counter, events);
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        if let Some(host) = self {
            host.resume(counters);
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        if let Some(host) = self {
            host.pause(counters);
        }
    }

    fn read(&mut self, counter: Counter) -> u64 {
        self.as_mut().map_or(0, |host| host.read(counter))
    }

    fn release(&mut self, counter: Counter) {
        if let Some(host) = self {
            host.release(counter);
        }
    }

    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        let host = self.as_mut();
        host.is_some_and(|host| host.pause_and_read(counters, totals))
    }

    fn support_pebs(&mut self) -> Option<&mut dyn crate::x86::pebs::Host> {
        self.as_mut()?.support_pebs()
    }

    fn follows_branches(&self) -> bool {
        // Without a host no branch is handed over, and the records stay as they are.
        self.as_ref().is_none_or(H::follows_branches)
    }

    fn reports_promptly(&self) -> bool {
        // Without a host there is no report that could be late.
        self.as_ref().is_none_or(H::reports_promptly)
    }

    fn repeats(&self) -> bool {
        self.as_ref().is_some_and(H::repeats)
    }

    fn shortest_period(&self, sharing: u32) -> u64 {
        let host = self.as_ref();
        host.map_or(1, |host| host.shortest_period(sharing))
    }

    fn deficit(&self, counter: Counter) -> Option<Lost> {
        self.as_ref()?.deficit(counter)
    }
}

/// Why a guest counter has no host counter behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Lost {
    /// The host has no such event, or cannot restrict it as asked.
    // Not 0: `None` of it is zero then, and so is all of a counter that has nothing.
    Unsupported = 1,
    /// Every host counter that could count it is taken.
    Busy,
    /// The host would count it only part of the time.
    Multiplexed,
    // Apart from `Multiplexed`: here a longer period helps, there a smaller number of counters.
    /// The host stopped it for a while, because it overflowed too often.
    Throttled,
    /// The host failed for a reason of its own.
    Failed,
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unsupported => "event not supported by the host",
            Self::Busy => "no host counter free",
            Self::Multiplexed => "host counter shared in time",
            Self::Throttled => "stopped by the host for too many overflows",
            Self::Failed => "host failure",
        })
    }
}

impl core::error::Error for Lost {}

/// What a guest counter is doing, for the embedder. The guest cannot see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CounterState {
    /// Events are being counted for it.
    Counting,
    /// Nothing is counted: disabled, filtered away, or its vCPU is not running.
    Paused,
    /// It should count and does not, or not all the time: its value is wrong.
    Lost(Lost),
}

/// An observer of what happens. Each method does nothing unless the embedder implements it.
// A trait with empty methods, not a log: without an observer the compiler leaves nothing of it.
pub trait Events {
    /// `counter` overflowed, by counting, by carry or by software increment. If the counter overflowed several times
    /// since the engine last read it, this is called once.
    fn overflowed(&mut self, counter: Counter) {
        let _ = counter;
    }

    /// The host cannot back `counter`.
    fn lost(&mut self, counter: Counter, reason: Lost) {
        let _ = (counter, reason);
    }
}

impl Events for () {}
