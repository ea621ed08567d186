//! The life of a host event behind a guest counter, which the [module](super) shows.
//!
//! A `due` is always a distance from what the PMU model has taken with [`read`](HostEvents::read) or
//! [`collect`](HostEvents::collect). The model takes first, then says the new distance.

use core::num::NonZeroU64;

use super::repeats::Repeats;
use super::{Counter, CounterHost, CounterSet, Lost, Policy, Report, Slots, Statistics, count};

/// The host events behind the counters of one PMU: which exist, which run, what they have counted.
///
/// A PMU model says what the guest did, and [`HostEvents`] makes the calls that its [`Policy`] wants,
/// always in the order that [`CounterHost`] promises.
///
/// ```
/// # use core::num::NonZeroU64;
/// # use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
/// # #[derive(Default)]
/// # struct Host(u64);
/// # impl CounterHost<&'static str> for Host {
/// #     fn create(&mut self, _: Counter, _: &&'static str) -> Result<(), Lost> { Ok(()) }
/// #     fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
/// #     fn resume(&mut self, _: CounterSet) {}
/// #     fn pause(&mut self, _: CounterSet) {}
/// #     fn read(&mut self, _: Counter) -> u64 { self.0 }
/// #     fn release(&mut self, _: Counter) {}
/// # }
/// use vpmu::counter::{HostEvents, Policy, Report};
///
/// let mut host = Host::default();
/// let mut events = HostEvents::new(Policy::ReusePaused);
/// let counter = Counter::at::<0>();
/// events.start(counter, "cycles", NonZeroU64::new(1000), &mut host)?;
/// events.resume_started(&mut host);
/// assert_eq!(events.statistics().host_operations(), 3); // create, set_period, resume
///
/// host.0 = 1000;
/// assert_eq!(events.report(counter, Report::Due, &mut host), 1000);
/// assert_eq!(events.statistics().host_operations(), 3, "an overflow is free");
/// # Ok::<(), Lost>(())
/// ```
#[derive(Clone, Debug)]
pub struct HostEvents<E> {
    policy: Policy,
    pub(super) slots: Slots<HostEvent<E>>,
    /// Counters that have a host event.
    backed: CounterSet,
    running: CounterSet,
    /// Counters that `start` has prepared, to be resumed together.
    started: CounterSet,
    /// Counters whose host event was paused and not read since.
    undrained: CounterSet,
    /// Counters of which the model has not taken all that was read.
    owing: CounterSet,
    /// Counters that the guest has used since the slice began.
    used: CounterSet,
    // The bank counts spurious reports.
    pub(super) statistics: Statistics,
}

impl<E: Copy + PartialEq> HostEvents<E> {
    /// Makes the host events of a PMU: none yet.
    pub const fn new(policy: Policy) -> Self {
        Self {
            policy,
            slots: Slots::filled(HostEvent::empty()),
            backed: CounterSet::EMPTY,
            running: CounterSet::EMPTY,
            started: CounterSet::EMPTY,
            undrained: CounterSet::EMPTY,
            owing: CounterSet::EMPTY,
            used: CounterSet::EMPTY,
            statistics: Statistics::ZERO,
        }
    }

    /// Follows `policy` from now on, with statistics of zero: for a PMU that begins anew, whose events are released.
    pub(crate) fn restart(&mut self, policy: Policy) {
        self.policy = policy;
        self.statistics = Statistics::ZERO;
    }

    /// Returns the policy that decides about the calls.
    pub const fn policy(&self) -> Policy {
        self.policy
    }

    /// Returns the counters whose host event runs.
    pub const fn running(&self) -> CounterSet {
        self.running
    }

    /// Returns the counters that have a host event.
    pub const fn backed(&self) -> CounterSet {
        self.backed
    }

    /// Returns the counters whose counts may not all be taken: those that run, those that were paused and not read, and
    /// those that were read and not taken.
    pub fn unsettled(&self) -> CounterSet {
        self.running | self.undrained | self.owing
    }

    /// Returns the number of events, from what has been taken on, after which the host will report.
    pub fn armed(&self, counter: Counter) -> Option<NonZeroU64> {
        self.slots[counter].armed
    }

    /// Returns why the host event behind `counter` has missed events since it was made, as far as the counts taken show
    /// that.
    pub fn deficit(&self, counter: Counter) -> Option<Lost> {
        self.slots[counter].deficit
    }

    /// Returns how often the host was called.
    pub const fn statistics(&self) -> Statistics {
        self.statistics
    }

    /// Notes that the guest wrote a register that may change what these counters count, or whether they do. A policy
    /// that does not remember whether an event is paused pauses these events now.
    pub fn touch<H: CounterHost<E>>(&mut self, counters: CounterSet, host: &mut H) {
        let backed = counters & self.backed;
        self.used |= backed;
        if self.policy.forgets_pauses() {
            self.pause(backed, host);
        }
    }

    /// Stops these counters. What they have counted can still be taken.
    pub fn stop<H: CounterHost<E>>(&mut self, counters: CounterSet, host: &mut H) {
        let counters = counters & self.running;
        self.pause(counters, host);
        if self.policy.recreates() {
            self.release(counters, host);
        }
    }

    /// Stops all that runs for a moment, and takes nothing: what goes on as it was need not be read.
    pub(crate) fn hold<H: CounterHost<E>>(&mut self, host: &mut H) {
        if !self.running.is_empty() {
            count(&mut self.statistics.pauses);
            host.pause(self.running);
            self.undrained |= self.running;
            self.running = CounterSet::EMPTY;
        }
    }

    /// Returns whether [`start`](Self::start) with these arguments would leave the period alone: the host event exists,
    /// and its report is due where it has to be. Then no count has to be taken before.
    pub fn keeps_period(&self, counter: Counter, event: &E, due: Option<NonZeroU64>) -> bool {
        let slot = &self.slots[counter];
        self.policy == Policy::ReusePaused
            && slot.event.as_ref() == Some(event)
            && slot.armed == due
    }

    /// Returns those of `counters` that may have overflowed unnoticed. With a host that
    /// [reports promptly](CounterHost::reports_promptly), a counter that waits for its report has not overflowed.
    pub fn in_doubt<H: CounterHost<E>>(&self, counters: CounterSet, host: &H) -> CounterSet {
        let doubtful = counters & self.unsettled();
        if !host.reports_promptly() {
            return doubtful;
        }
        // A report that has not come says that the end has not, unless a read has overtaken it.
        doubtful.filter(|n| self.armed(n).is_none() || self.owing.contains(n))
    }

    /// Prepares `counter`, which does not run, to count `event`, with a report after `due` more
    /// events. It counts from [`resume_started`](Self::resume_started) on.
    ///
    /// # Errors
    ///
    /// The host cannot back `counter`, which then has no host event.
    pub fn start<H: CounterHost<E>>(
        &mut self,
        counter: Counter,
        event: E,
        due: Option<NonZeroU64>,
        host: &mut H,
    ) -> Result<(), Lost> {
        // A host event counts one thing for life: Linux changes the attributes of breakpoints only.
        let same = self.slots[counter].event == Some(event);
        let only = counter.alone();
        self.stop(only, host);
        if same && !self.policy.recreates() {
            self.arm(counter, due, self.policy.forgets_pauses(), host);
        } else {
            self.release(only & self.backed, host);
            count(&mut self.statistics.creates);
            host.create(counter, &event)
                .inspect_err(|_| count(&mut self.statistics.lost))?;
            let slot = &mut self.slots[counter];
            *slot = HostEvent {
                event: Some(event),
                owed: slot.owed,
                ..HostEvent::empty()
            };
            self.backed.insert(counter);
            self.arm(counter, due, false, host);
        }
        self.started.insert(counter);
        Ok(())
    }

    /// Resumes all that was started, in one call.
    pub fn resume_started<H: CounterHost<E>>(&mut self, host: &mut H) {
        let started = core::mem::take(&mut self.started) & self.backed;
        if !started.is_empty() {
            count(&mut self.statistics.resumes);
            host.resume(started);
            self.running |= started;
            self.used |= started;
        }
    }

    /// Sets the report of `counter` to come after `due` more events: the guest has written the counter, or has changed
    /// whether it wants an interrupt.
    ///
    /// # Errors
    ///
    /// The host could not make the host event anew ([`Policy::Recreate`]).
    pub fn rearm<H: CounterHost<E>>(
        &mut self,
        counter: Counter,
        due: Option<NonZeroU64>,
        host: &mut H,
    ) -> Result<(), Lost> {
        let slot = &self.slots[counter];
        let Some(event) = slot.event else {
            return Ok(());
        };
        let runs = self.running.contains(counter);
        // The host would do the same again, and a call costs microseconds.
        if runs && slot.armed == due {
            return Ok(());
        }
        self.used.insert(counter);
        if self.policy.recreates() {
            self.start(counter, event, due, host)?;
            self.resume_started(host);
        } else if runs || self.policy.forgets_pauses() {
            self.arm(counter, due, self.policy.forgets_pauses(), host);
        }
        // Otherwise a paused event gets its period when it is resumed: the guest may change its mind until then.
        Ok(())
    }

    /// Takes what `counter` has counted since the last time, because the guest reads the counter.
    pub fn read<H: CounterHost<E>>(&mut self, counter: Counter, host: &mut H) -> u64 {
        let paused = self.backed - self.running;
        // A counter that the guest reads is in use, even if it stands still.
        self.used |= counter.alone() & self.backed;
        if self.policy.forgets_pauses() && paused.contains(counter) {
            self.read_total(counter, host);
        }
        self.collect(counter, host)
    }

    /// Takes what `counter` has counted since the last time. Reads the host event only if it can have counted.
    pub fn collect<H: CounterHost<E>>(&mut self, counter: Counter, host: &mut H) -> u64 {
        // A paused event that was read has counted nothing since.
        if (self.running | self.undrained).contains(counter) {
            self.read_total(counter, host);
        }
        self.take_owed(counter)
    }

    /// Returns the counters that a pause or a release has read, and whose counts nobody has taken.
    pub const fn owing(&self) -> CounterSet {
        self.owing
    }

    /// Takes what a pause or a release has read of `counter`. Makes no call, unlike [`collect`](Self::collect).
    pub fn take_owed(&mut self, counter: Counter) -> u64 {
        self.owing.remove(counter);
        core::mem::take(&mut self.slots[counter].owed)
    }

    /// Takes the host's report of an overflow of `counter`, and what the counter has counted since the last time. Where
    /// the host event had to be released (see [`Report::Moved`] and [`Policy::Recreate`]), the counter no longer runs,
    /// and the model starts it again.
    pub fn report<H: CounterHost<E>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) -> u64 {
        count(&mut self.statistics.reports);
        let only = counter.alone();
        let slot = &mut self.slots[counter];
        let report = match report {
            // It may be the report of a period that a read has found over or too short, and not of the one since asked for.
            Report::Due if core::mem::take(&mut slot.overtaken) => Report::Unsure,
            report => report,
        };
        let due = slot.armed;
        // A total that is read finds out where a repeated period stands.
        if slot.repeats.period.is_none() {
            slot.armed = None;
        }
        match report {
            // Nobody waits for this period any more.
            Report::Due | Report::Moved if due.is_none() => return self.take_owed(counter),
            Report::Due if !self.policy.recreates() => {
                let due = due.map_or(0, NonZeroU64::get);
                slot.mark = slot.mark.wrapping_add(due);
                slot.owed = slot.owed.wrapping_add(due);
                slot.armed = slot.repeats.period;
                self.used |= only;
                return self.take_owed(counter);
            }
            Report::Unsure if !self.policy.recreates() => {}
            Report::Due | Report::Moved | Report::Unsure => self.release(only & self.running, host),
        }
        self.slots[counter].overtaken = false;
        let counted = self.collect(counter, host);
        let slot = &mut self.slots[counter];
        // A clock may report some microseconds before its total is there. The event that repeats has then begun the next
        // period, and the end of this one would pass without a report.
        let is_over = core::mem::take(&mut slot.overtaken);
        // Where it stands in its period is then not known from a total.
        if !is_over || slot.repeats.is_adrift {
            slot.armed = None;
        }
        counted
    }

    /// Releases the host events that were not used in the slice that ends now, and do not run.
    pub fn end_slice<H: CounterHost<E>>(&mut self, host: &mut H) {
        // What runs is in use whether or not the guest has touched it.
        let idle = self.backed - self.used - self.running;
        self.release(idle, host);
        self.used = CounterSet::EMPTY;
    }

    /// Releases host events, also those that run. What they have counted can still be taken.
    pub fn release<H: CounterHost<E>>(&mut self, counters: CounterSet, host: &mut H) {
        let counters = counters & self.backed;
        self.pause(counters & self.running, host);
        for n in counters {
            if self.undrained.contains(n) {
                self.read_total(n, host);
            }
            count(&mut self.statistics.releases);
            host.release(n);
            // The next event begins at zero. What this one has counted still belongs to the guest.
            let slot = &mut self.slots[n];
            *slot = HostEvent {
                owed: slot.owed,
                deficit: slot.deficit,
                ..HostEvent::empty()
            };
        }
        self.backed -= counters;
        self.started -= counters;
    }

    fn pause<H: CounterHost<E>>(&mut self, counters: CounterSet, host: &mut H) {
        if counters.is_empty() {
            return;
        }
        count(&mut self.statistics.pauses);
        let mut totals = Slots::filled(0);
        if host.pause_and_read(counters, &mut totals) {
            for n in counters {
                self.slots[n].take_total(totals[n], host.deficit(n));
            }
            self.owing |= counters;
            self.undrained -= counters;
        } else {
            host.pause(counters);
            // A total that stands still can be read later, and often need not be.
            self.undrained |= counters & self.running;
        }
        self.running -= counters;
    }

    fn read_total<H: CounterHost<E>>(&mut self, counter: Counter, host: &mut H) {
        count(&mut self.statistics.reads);
        let total = host.read(counter);
        self.slots[counter].take_total(total, host.deficit(counter));
        self.owing.insert(counter);
        self.undrained.remove(counter);
    }

    fn arm<H: CounterHost<E>>(
        &mut self,
        counter: Counter,
        due: Option<NonZeroU64>,
        again: bool,
        host: &mut H,
    ) {
        let slot = &mut self.slots[counter];
        if again || slot.armed != due {
            count(&mut self.statistics.set_periods);
            // The host counts from its total on, and `due` is a distance from the mark.
            let ahead = core::mem::take(&mut slot.ahead);
            let period = due.map(|due| due.saturating_add(ahead));
            host.set_period(counter, period);
            slot.armed = due;
            slot.repeats = Repeats::of(period.filter(|_| host.repeats()));
        }
    }
}

/// The host event behind one counter, if there is one, and what it has counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostEvent<E> {
    /// What the host event counts; `None`: there is none.
    event: Option<E>,
    /// The host's total that has been taken into `owed`.
    mark: u64,
    /// By how many events the next report is to come later, because the mark is that far ahead of the total.
    ahead: u64,
    /// Counted, and not yet given to the PMU model.
    owed: u64,
    /// The host will report when it has counted so many beyond `mark`.
    armed: Option<NonZeroU64>,
    /// What comes after that.
    pub(super) repeats: Repeats,
    /// Whether a read has found a period over, or begun too early, whose report has not come.
    overtaken: bool,
    /// Why the total is not all that happened.
    deficit: Option<Lost>,
}

impl<E> HostEvent<E> {
    const fn empty() -> Self {
        Self {
            event: None,
            mark: 0,
            ahead: 0,
            owed: 0,
            armed: None,
            repeats: Repeats::NEVER,
            overtaken: false,
            deficit: None,
        }
    }

    /// Takes the host's total into `owed`.
    fn take_total(&mut self, total: u64, deficit: Option<Lost>) {
        self.deficit = self.deficit.or(deficit);
        // A total can be lower than the mark: `Report::Due` came before the host's count was visible.
        // The difference was counted then.
        let counted = total.wrapping_sub(self.mark);
        // Modulo 2^64, a total that is lower is a count of more than half of that.
        if counted > u64::MAX / 2 {
            let ahead = counted.wrapping_neg();
            // A timer that gains on the count takes the mark further ahead with each report, and the guest would at last have
            // nothing counted for as long. So the next report is asked for anew, at most a period later. The one that is on
            // its way until then is of less than was asked.
            if let Some(period) = self.repeats.period.map(NonZeroU64::get)
                && ahead >= period / 2
            {
                (self.armed, self.ahead, self.overtaken) = (None, ahead.min(period), true);
            }
            return;
        }
        (self.mark, self.ahead) = (total, 0);
        self.owed = self.owed.wrapping_add(counted);
        self.overtaken |= self.armed.is_some_and(|due| due.get() <= counted);
        self.armed = self.armed.and_then(|due| {
            let Some(beyond) = counted.checked_sub(due.get()) else {
                return NonZeroU64::new(due.get() - counted);
            };
            let period = self.repeats.period?;
            NonZeroU64::new(period.get() - beyond % period)
        });
    }
}
