//! The perf events behind the counters: which there are, which count, and what they have counted.
//!
//! # A clock's events are a group
//!
//! A guest that switches tasks stops all its counters, reads them, and starts them again. For each counter this takes
//! three system calls, for a group three in all: its leader, an event of no counter, is disabled, read and enabled. A
//! member that is stopped while others count is disabled by itself.
//!
//! Hardware events are no group. A hardware group counts only while all of its members fit, so a busy host would count
//! none of them, where it counts each for a part of the time.
//!
//! # Counters that stand by
//!
//! They do not count although their events do. To stop and start a group takes two system calls, each of which has the
//! kernel schedule all events of the thread anew, and a third reads the totals. So counters that only count are not
//! stopped: they stand by. A read when they are to stop, and another when they go on, show what lies between, which is
//! not theirs. All clocks of a thread go on together, so where the leader's page has its time, no system call is left.
//! A counter that waits for an overflow is stopped, or its event would report one for time that is not the counter's.

use std::io;
use std::sync::Arc;

use vpmu::counter::{Counter, CounterSet, Lost, Slots};

use crate::buffer::{Overflows, RingBuffer};
use crate::kernel::{Kernel, PerfEvent, Total};
use crate::kind::Kind;
use crate::notes::Notes;

/// The ns by which a clock's total may differ from the time for which it has counted: both are read one after the other.
const MOST_AHEAD: u64 = 1_000_000;

/// Whether a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its event does not count.
    Stopped,
    /// Its event counts.
    Counting,
    /// It does not count although its event does.
    StandingBy,
}

/// The event of one counter.
#[derive(Debug)]
pub(crate) struct Event {
    /// The event's overflows, which the kernel writes into memory. A signal says that there was an overflow, and not how
    /// many there were. And only the log says that the kernel has throttled the event: it stops until the next tick or the
    /// next period that it is given (perf_event_overflow). `None`: nobody asks for them, or the kernel had no memory for
    /// them. Dropped first: an event stays open, and on its counter, while it is mapped.
    log: Option<RingBuffer>,
    /// What has been read of them and nobody has taken.
    overflows: Overflows,
    /// Whether the event has ever been throttled, as far as they were read.
    throttled: bool,
    event: PerfEvent,
    is_clock: bool,
    state: State,
    /// How far the event is ahead of the group's clock. `None`: not known since the event was last enabled.
    ahead: Option<u64>,
    /// What the last read has found.
    seen: Total,
    /// The last total of the counter, in the event's unit, for when a read fails.
    pub(crate) total: u64,
    /// The ns for which the event has counted, and those for which it should have, at the last read.
    pub(crate) times: (u64, u64),
    /// What the event has counted while the counter stood by.
    skipped: u64,
    /// The reason why the total is not all that happened.
    pub(crate) deficit: Option<Lost>,
    /// Of an event that counts whenever its thread runs: where it last advanced.
    advance: Option<Advance>,
    /// The ns that the event has been running since then.
    pub(crate) stuck_ns: u64,
}

/// A count, and what its clock said, when the count last advanced.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Advance {
    count: u64,
    clock: u64,
}

impl Advance {
    /// Returns the ns of the clock since the count last advanced, or since it last had a `reason` to stand still.
    pub(crate) fn stuck_ns(&mut self, count: u64, clock: u64, reason: bool) -> u64 {
        if count != self.count || reason {
            *self = Self { count, clock };
        }
        clock.saturating_sub(self.clock)
    }
}

impl Event {
    /// Takes what a read of this event alone has found.
    fn take_own(&mut self, total: Total) {
        self.take(total);
        // A group's read has the leader's times only.
        if let Some(advance) = &mut self.advance {
            self.stuck_ns = advance.stuck_ns(total.value, total.running, false);
        }
    }

    fn take(&mut self, total: Total) {
        // The page has the value alone.
        if total.enabled != 0 {
            self.times = (total.running, total.enabled);
        }
        if total.enabled != total.running {
            self.deficit = self.deficit.or(Some(Lost::Multiplexed));
        }
        let is_wrong = match self.is_clock {
            // Linux 6.1's tick has a clock that it starts again count once more what it had counted (task_clock_event_start).
            true => total.enabled != 0 && total.value > total.running.saturating_add(MOST_AHEAD),
            // A throttled event does not count, although its time goes on.
            false => {
                self.read_log();
                self.throttled
            }
        };
        if is_wrong {
            self.deficit = Some(Lost::Throttled);
        }
        let total = total.value.wrapping_sub(self.skipped);
        // By the clock's page and by a system call a total differs by the time of the call. A counter must not go back by
        // that: whoever divides the time since the last total would see nearly 2^64 ns.
        let grows = total.wrapping_sub(self.total) <= u64::MAX / 2;
        if self.state != State::StandingBy && grows {
            self.total = total;
        }
    }

    fn read_log(&mut self) {
        if let Some(log) = &mut self.log {
            log.take_overflows(&mut self.overflows);
            self.throttled |= self.overflows.throttled;
        }
    }
}

/// The group of a clock's events.
#[derive(Debug)]
struct Group {
    /// The leader's page, from which its time is read without a system call, and its records. Dropped first: an event stays
    /// open while it is mapped.
    page: Option<RingBuffer>,
    leader: PerfEvent,
    /// Whether the leader is enabled. Then enabled members count, too.
    runs: bool,
    /// Members that are enabled by themselves.
    enabled: CounterSet,
    /// Counters in the order in which the kernel reads them.
    members: Vec<Counter>,
}

impl Group {
    /// Opens the group. `logged`: with room for its leader's records.
    fn open(kernel: &'static dyn Kernel, notes: &Notes, logged: bool) -> io::Result<Self> {
        let leader = PerfEvent::open_group(kernel, notes)?;
        let map = |size| RingBuffer::map(kernel, leader.fd(), size).ok();
        let log = logged.then(|| map(RingBuffer::size_for(0))).flatten();
        Ok(Self {
            page: log.or_else(|| map(0)),
            leader,
            runs: false,
            enabled: CounterSet::EMPTY,
            members: Vec::with_capacity(Counter::COUNT),
        })
    }

    /// Returns whether the events behind all of `counters` count.
    fn counts(&self, counters: CounterSet) -> bool {
        self.runs && (counters - self.enabled).is_empty()
    }

    /// Reads each member's counter and total, by one system call.
    fn read(&self) -> io::Result<impl Iterator<Item = (Counter, Total)> + use<'_>> {
        let totals = self.leader.read_group(self.members.len())?;
        Ok(self.members.iter().copied().zip(totals))
    }
}

/// The perf events of one thread's counters.
#[derive(Debug)]
pub(crate) struct Events {
    kernel: &'static dyn Kernel,
    /// The notes of the thread, which gets `signal` for each overflow.
    notes: Arc<Notes>,
    signal: libc::c_int,
    /// Whether the events are a group.
    grouped: bool,
    /// Whether their overflows are logged.
    logged: bool,
    events: Slots<Option<Event>>,
    /// Counters that have one. A search of all slots costs each exit as much as the work itself.
    open: CounterSet,
    /// Made with the first event.
    group: Option<Group>,
}

impl Events {
    pub(crate) fn new(
        kernel: &'static dyn Kernel,
        notes: Arc<Notes>,
        signal: libc::c_int,
        grouped: bool,
        logged: bool,
    ) -> Self {
        Self {
            kernel,
            notes,
            signal,
            grouped,
            logged,
            events: Slots::from_fn(|| None),
            open: CounterSet::EMPTY,
            group: None,
        }
    }

    /// Opens an event of `kind` behind `counter`, stopped. It is `steady` if it counts whenever its thread runs the guest.
    /// Returns whether its overflows are counted one by one.
    pub(crate) fn open(&mut self, counter: Counter, kind: Kind, steady: bool) -> io::Result<bool> {
        if self.grouped && self.group.is_none() {
            self.group = Some(Group::open(self.kernel, &self.notes, self.logged)?);
        }
        let leader = self.group.as_ref().map(|group| &group.leader);
        let event = PerfEvent::open(self.kernel, kind, &self.notes, self.signal, leader)?;
        if let Some(group) = &mut self.group {
            group.members.push(counter);
        }
        // Throttling is recorded nowhere else.
        let log = || RingBuffer::map(self.kernel, event.fd(), RingBuffer::size_for(0)).ok();
        let log = self.logged.then(log).flatten();
        self.notes.watch(counter, Some(event.fd()));
        let counted = log.is_some();
        self.open.insert(counter);
        self.events[counter] = Some(Event {
            log,
            overflows: Overflows::default(),
            throttled: false,
            event,
            is_clock: self.grouped,
            state: State::Stopped,
            ahead: None,
            seen: Total::default(),
            total: 0,
            times: (0, 0),
            skipped: 0,
            deficit: None,
            advance: steady.then(Advance::default),
            stuck_ns: 0,
        });
        Ok(counted)
    }

    pub(crate) fn close(&mut self, counter: Counter) {
        self.notes.watch(counter, None);
        self.events[counter] = None;
        self.open.remove(counter);
        if let Some(group) = &mut self.group {
            group.members.retain(|&member| member != counter);
            group.enabled -= counter.alone();
        }
    }

    /// Returns the counters that count.
    pub(crate) fn counting(&self) -> CounterSet {
        self.which(|state| state == State::Counting)
    }

    /// Returns what was found at the last read of the event behind `counter`, if it has one.
    pub(crate) fn last(&self, counter: Counter) -> Option<&Event> {
        self.events[counter].as_ref()
    }

    /// Returns whether `counter` counts.
    pub(crate) fn counts(&self, counter: Counter) -> bool {
        let event = self.events[counter].as_ref();
        event.is_some_and(|event| event.state == State::Counting)
    }

    /// Returns the counters that have an event.
    pub(crate) fn open_events(&self) -> CounterSet {
        self.open
    }

    /// Sets the next overflow of the event behind `counter`, in its unit from now on.
    pub(crate) fn set_period(&self, counter: Counter, period: u64) -> bool {
        let event = self.events[counter].as_ref();
        event.is_some_and(|event| event.event.set_period(period))
    }

    /// Takes the overflows of the event behind `counter` since the last time.
    pub(crate) fn take_overflows(&mut self, counter: Counter) -> Overflows {
        let mut taken = Overflows::default();
        if let Some(event) = &mut self.events[counter] {
            event.read_log();
            taken = std::mem::take(&mut event.overflows);
        }
        // From Linux 6.16 on a member's throttling stops the whole group, and its leader has the record.
        if let Some(page) = self.group.as_mut().and_then(|group| group.page.as_mut()) {
            page.take_overflows(&mut taken);
        }
        taken
    }

    /// Has `counters` count.
    pub(crate) fn resume(&mut self, counters: CounterSet) {
        let standing_by = self.standing_by();
        if !(standing_by & counters).is_empty() {
            self.wake(standing_by & counters);
        }
        let counting = self.counting() | counters;
        if let Some(group) = &self.group {
            // They were stopped with the whole group, and would count again with it.
            let stale = group.enabled - counting - self.standing_by();
            stale.iter().for_each(|counter| self.disable(counter));
        }
        let group = self.group.as_ref();
        let enabled = group.map_or(CounterSet::EMPTY, |group| group.enabled);
        for counter in counters {
            let Some(event) = &mut self.events[counter] else {
                continue;
            };
            if !enabled.contains(counter) && !event.event.enable() {
                event.state = State::Stopped;
                continue;
            }
            event.state = State::Counting;
            if let Some(group) = &mut self.group {
                group.enabled |= counter.alone();
            }
        }
        if let Some(group) = &mut self.group {
            // Last: members that are enabled before their leader begin together, by one call of the kernel's.
            group.runs = group.runs || group.leader.enable();
        }
    }

    /// Reads the total of `counter`, in its event's unit. An event in an error state reads nothing: its total stands
    /// still.
    pub(crate) fn read(&mut self, counter: Counter) -> u64 {
        let only = counter.alone();
        let counts = self.group.as_ref().is_some_and(|group| group.counts(only));
        if counts {
            let seen = self.read_totals(only);
            if let Some(event) = self.events[counter].as_mut().filter(|_| seen) {
                event.take(event.seen);
            }
        } else if let Some(event) = &mut self.events[counter]
            && let Ok(total) = event.event.read()
        {
            event.take_own(total);
        }
        self.last(counter).map_or(0, |event| event.total)
    }

    /// Returns the counters whose event is in a state as `wanted`.
    fn which(&self, wanted: impl Fn(State) -> bool) -> CounterSet {
        let state = |counter| self.events[counter].as_ref().map(|event| event.state);
        self.open
            .filter(|counter| state(counter).is_some_and(&wanted))
    }

    fn standing_by(&self) -> CounterSet {
        self.which(|state| state == State::StandingBy)
    }

    /// Stops `counters`. Their totals stay to be read. Returns whether they were stopped together, so that
    /// [`read_group`](Self::read_group) reads them all.
    pub(crate) fn stop(&mut self, counters: CounterSet) -> bool {
        let counting = self.counting();
        let whole = self.stop_group(counters, counting);
        if whole {
            for counter in self.open {
                if let Some(event) = &mut self.events[counter] {
                    event.ahead = None;
                }
            }
        }
        for counter in counters {
            if !whole {
                self.disable(counter);
            }
            if let Some(event) = &mut self.events[counter]
                && event.state == State::Counting
            {
                event.state = State::Stopped;
            }
        }
        whole
    }

    /// Stops the group if `counters`, and several, are all that counts.
    fn stop_group(&mut self, counters: CounterSet, counting: CounterSet) -> bool {
        let Some(group) = &mut self.group else {
            return false;
        };
        // For one counter its own event is as cheap, and the others' relation to the clock stays known.
        let whole = group.runs && counting.len() > 1 && (counting - counters).is_empty();
        if whole {
            group.runs = !group.leader.disable();
        }
        // The members stay enabled: their leader, which stands still, keeps them from counting.
        whole && !group.runs
    }

    /// Stops the perf event by itself.
    fn disable(&mut self, counter: Counter) {
        if let Some(event) = &mut self.events[counter] {
            event.event.disable();
            event.ahead = None;
        }
        if let Some(group) = &mut self.group {
            group.enabled -= counter.alone();
        }
    }

    /// Reads the totals of all events by one system call, if they are a group.
    pub(crate) fn read_group(&mut self) -> bool {
        let Some(Ok(totals)) = self.group.as_ref().map(Group::read) else {
            return false;
        };
        for (counter, total) in totals {
            if let Some(event) = &mut self.events[counter] {
                event.take(total);
            }
        }
        true
    }

    /// Takes the totals of `counters`, and lets them stand by. `false`: they have to be stopped, and nothing was done.
    pub(crate) fn stand_by(&mut self, counters: CounterSet) -> bool {
        let counts = self
            .group
            .as_ref()
            .is_some_and(|group| group.counts(counters));
        if !counts || !self.read_totals(counters) {
            return false;
        }
        for counter in counters {
            if let Some(event) = &mut self.events[counter] {
                event.take(event.seen);
                event.state = State::StandingBy;
            }
        }
        true
    }

    /// Lets `counters`, which stand by, go on from their last totals.
    fn wake(&mut self, counters: CounterSet) {
        let seen = self.read_totals(counters);
        for counter in counters {
            if let Some(event) = &mut self.events[counter] {
                match seen {
                    true => event.skipped = event.seen.value.wrapping_sub(event.total),
                    // Nobody knows how much of the total is not the counter's.
                    false => event.deficit = Some(Lost::Failed),
                }
                event.state = State::Counting;
            }
        }
    }

    /// Reads the totals of the events behind `counters`: by the group's clock where it is known how far each is ahead
    /// of that, and otherwise by a system call. Returns whether each is seen.
    fn read_totals(&mut self, counters: CounterSet) -> bool {
        let Some(group) = &self.group else {
            return false;
        };
        // The page has the time of a thread that runs, and an event that does not count falls behind the clock.
        let page = group
            .page
            .as_ref()
            .filter(|_| group.counts(counters) && self.notes.is_here());
        let now = page.and_then(RingBuffer::running);
        let events = &mut self.events;
        let ahead = |event: &Event| Some(now?.wrapping_add(event.ahead?));
        if counters
            .iter()
            .all(|counter| events[counter].as_ref().and_then(ahead).is_some())
        {
            for counter in counters {
                if let Some(event) = &mut events[counter] {
                    event.seen = Total {
                        value: ahead(event).unwrap_or(event.seen.value),
                        ..Total::default()
                    };
                }
            }
            return true;
        }
        let Ok(totals) = group.read() else {
            return false;
        };
        for (counter, total) in totals {
            if let Some(event) = &mut events[counter]
                && counters.contains(counter)
            {
                event.seen = total;
                event.ahead = now.map(|now| total.value.wrapping_sub(now));
            }
        }
        true
    }
}
