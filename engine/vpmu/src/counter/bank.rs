//! One bank of guest counters: their values, and the host events behind them.
//!
//! # Why it is apart from the registers
//!
//! What a guest writes to enable a counter, and what a counter does at its end, is the architecture's
//! and differs. In every model a counter's value is a stored value plus what its host event has
//! counted since, and events are started and asked for reports by the same rules. So each
//! PMU is a [`Model`] of its registers over a [`Bank`], and the bank alone calls the host.
//!
//! A model first *settles* what the host has counted for the counters that an access concerns, under
//! the registers it was counted with; then it changes registers; then [`Model::apply`] brings the
//! host to the new state.

use core::num::NonZeroU64;

use super::{
    Counter, CounterHost, CounterSet, CounterState, Events, HostEvents, Lost, Policy, Report,
    Slots, count,
};

/// So many events take minutes. A report that far ahead may come early rather than be asked for
/// again: a 64-bit counter at 0, further from its end than a period can say, would be asked for at
/// each access.
pub(crate) const FAR: u64 = 1 << 40;

/// What one guest counter has counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Count {
    /// Without what the host has counted since it was last asked.
    pub(crate) value: u64,
    /// Why the value is wrong.
    pub(crate) lost: Option<Lost>,
}

impl Count {
    pub(crate) const ZERO: Self = Self {
        value: 0,
        lost: None,
    };
}

/// The counters of one PMU. `E` describes what a host event counts, and `V` receives the events of the PMU.
#[derive(Clone, Debug)]
pub(crate) struct Bank<E, V> {
    pub(crate) hosted: HostEvents<E>,
    /// Every counter there is.
    pub(crate) existing: CounterSet,
    pub(crate) counters: Slots<Count>,
    /// Counters for which a host event is to run when they are enabled.
    pub(crate) countable: CounterSet,
    /// Whether the vCPU runs, so that counters may.
    pub(crate) loaded: bool,
    pub(crate) observer: V,
}

impl<E: Copy + PartialEq, V: Events> Bank<E, V> {
    pub(crate) const fn new(policy: Policy, existing: CounterSet, observer: V) -> Self {
        Self {
            hosted: HostEvents::new(policy),
            existing,
            counters: Slots::filled(Count::ZERO),
            countable: CounterSet::EMPTY,
            loaded: true,
            observer,
        }
    }

    /// All counters are zero, and no host event is left.
    pub(crate) fn reset<H: CounterHost<E>>(&mut self, host: &mut H) {
        self.hosted.release(self.hosted.backed(), host);
        // Without this, the first read after the reset would find counts of the guest before it.
        for n in self.hosted.unsettled() {
            let _ = self.hosted.collect(n, host);
        }
        for (_, counter) in self.counters.iter_mut() {
            *counter = Count::ZERO;
        }
    }

    /// Tells why the host event of `n` has not counted all that happened, when that is first found out.
    fn note_deficit(&mut self, n: Counter) {
        let Some(reason) = self.hosted.deficit(n) else {
            return;
        };
        let lost = &mut self.counters[n].lost;
        if lost.is_none() {
            // The counter goes on counting: too little is better than nothing, and known to be too little.
            *lost = Some(reason);
            count(&mut self.hosted.statistics.part_time);
            self.observer.lost(n, reason);
        }
    }

    /// The host does not count `n`.
    fn lose(&mut self, n: Counter, reason: Lost) {
        self.counters[n].lost = Some(reason);
        // A host that has refused is not asked again at each access: a refusal takes as long as a success.
        self.countable.remove(n);
        self.observer.lost(n, reason);
    }

    /// What `n`, which exists, is doing. `in_software`: the model counts for it.
    pub(crate) fn state(&self, n: Counter, in_software: bool) -> CounterState {
        match self.counters[n].lost {
            Some(reason) => CounterState::Lost(reason),
            None if in_software || self.hosted.running().contains(n) => CounterState::Counting,
            None => CounterState::Paused,
        }
    }
}

/// The registers of a PMU, as its [`Bank`] asks for them.
pub(crate) trait Model {
    /// What a host event counts.
    type Event: Copy + PartialEq;
    /// Receives the events of the PMU.
    type Observer: Events;

    fn bank(&self) -> &Bank<Self::Event, Self::Observer>;

    fn bank_mut(&mut self) -> &mut Bank<Self::Event, Self::Observer>;

    /// Counters that the guest has enabled in every way.
    fn enabled(&self) -> CounterSet;

    /// What `n` is to count.
    fn event(&self, n: Counter) -> Self::Event;

    /// Whether `n` is to have a host event while it is enabled.
    fn is_countable(&self, n: Counter) -> bool;

    /// Why no host can count what `n` is to count, as far as the model itself knows.
    fn unsupported(&self, n: Counter) -> Option<Lost> {
        let _ = n;
        None
    }

    /// Returns after how many more events than the bank has taken the host has to report `n`. `None`: nobody waits for a
    /// report.
    fn report_wanted(&self, n: Counter) -> Option<NonZeroU64>;

    /// Whether somebody waits for an overflow of `n` for which [`report_wanted`](Self::report_wanted) wants no report, as
    /// the guest is about to write the counter.
    fn is_awaited(&self, n: Counter) -> bool {
        let _ = n;
        false
    }

    /// Whether [`report_wanted`](Self::report_wanted) may want any.
    fn asks_for_reports(&self) -> bool {
        true
    }

    /// `n`, which exists, counts `events` more, which are not 0. Answers whether it overflows.
    fn advance(&mut self, n: Counter, events: u64) -> bool;

    /// Does what an overflow asks for beyond the registers, as soon as counts have been taken.
    fn follow_up<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        let _ = host;
    }

    /// Brings the host to what the registers say. Does nothing where nothing changed.
    fn apply<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        self.stop_unwanted(host);
        // What a counter has counted decides how far it is from its overflow, and may even be one,
        // which may stop all others. One that goes on as it was need not be asked.
        let mut owing = (self.wanted() - self.bank().hosted.running()) & self.unsettled();
        for n in owing {
            let (event, due) = (self.event(n), self.due(n));
            if self.bank().hosted.keeps_period(n, &event, due) {
                owing.remove(n);
            }
        }
        // What was settled may have overflowed, and that may have stopped every counter.
        self.settle(owing, host);
        self.stop_unwanted(host);

        for n in self.wanted() - self.bank().hosted.running() {
            let started = match self.unsupported(n) {
                Some(reason) => {
                    count(&mut self.bank_mut().hosted.statistics.unsupported);
                    Err(reason)
                }
                None => {
                    let (event, due) = (self.event(n), self.due(n));
                    self.bank_mut().hosted.start(n, event, due, host)
                }
            };
            if let Err(reason) = started {
                self.bank_mut().lose(n, reason);
            }
        }
        // A report that was asked for before the counts were taken is due at another distance now.
        if self.asks_for_reports() {
            for n in self.bank().hosted.running() {
                self.rearm(n, host);
            }
        }
        // All at once: counters that the guest starts together count the same time.
        self.bank_mut().hosted.resume_started(host);
    }

    fn stop_unwanted<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        let unwanted = self.bank().hosted.running() - self.wanted();
        self.bank_mut().hosted.stop(unwanted, host);
        for n in self.bank().hosted.owing() {
            // It was read with the pause, so its report may never come.
            let counted = self.bank_mut().hosted.take_owed(n);
            self.take(n, counted);
        }
        self.follow_up(host);
    }

    /// Every counter there is.
    fn implemented(&self) -> CounterSet {
        self.bank().existing
    }

    /// Counters for which a host event is to run.
    fn wanted(&self) -> CounterSet {
        if self.bank().loaded {
            self.enabled() & self.bank().countable
        } else {
            CounterSet::EMPTY
        }
    }

    /// Counters of which the host may know more than has been taken.
    fn unsettled(&self) -> CounterSet {
        self.bank().hosted.unsettled()
    }

    /// The report that is wanted of `n`, or the one that its host event has been asked for already
    /// if that will do.
    fn due(&self, n: Counter) -> Option<NonZeroU64> {
        let wanted = self.report_wanted(n);
        let hosted = &self.bank().hosted;
        let will_do = |armed: &NonZeroU64| match wanted {
            // The overflow is further than that.
            None => hosted.slots[n].repeats.may_idle && self.is_awaited(n) && armed.get() < FAR,
            Some(wanted) => {
                let idles = hosted.slots[n].repeats.may_idle && wanted.get() >= FAR;
                *armed <= wanted && (idles || armed.get() >= FAR)
            }
        };
        let armed = hosted.armed(n).filter(will_do);
        if armed.is_some() && hosted.keeps_period(n, &self.event(n), armed) {
            armed
        } else {
            wanted
        }
    }

    /// The guest has given `n` another value or another wish for an interrupt.
    fn rearm<H: CounterHost<Self::Event>>(&mut self, n: Counter, host: &mut H) {
        let due = self.due(n);
        if let Err(reason) = self.bank_mut().hosted.rearm(n, due, host) {
            self.bank_mut().lose(n, reason);
        }
    }

    /// Takes note of what the host has counted for `counters` since last time, as far as there can
    /// be anything.
    fn settle<H: CounterHost<Self::Event>>(&mut self, counters: CounterSet, host: &mut H) {
        for n in counters & self.unsettled() {
            self.collect(n, host);
        }
        self.follow_up(host);
    }

    /// As [`settle`](Self::settle), for those of `counters` that may have overflowed unnoticed.
    fn settle_doubtful<H: CounterHost<Self::Event>>(&mut self, counters: CounterSet, host: &mut H) {
        let doubtful = self.bank().hosted.in_doubt(counters, host);
        self.settle(doubtful, host);
    }

    /// Takes note of what the host has counted for `n` since last time.
    fn collect<H: CounterHost<Self::Event>>(&mut self, n: Counter, host: &mut H) {
        let counted = self.bank_mut().hosted.collect(n, host);
        self.take(n, counted);
    }

    /// As [`settle`](Self::settle), because the guest reads it: a policy may make more of it.
    fn settle_read<H: CounterHost<Self::Event>>(&mut self, n: Counter, host: &mut H) {
        let counted = self.bank_mut().hosted.read(n, host);
        self.take(n, counted);
        self.follow_up(host);
    }

    /// The host has counted so many events for `n`. Answers whether it overflows.
    fn take(&mut self, n: Counter, counted: u64) -> bool {
        // A host may report any number.
        if !self.implemented().contains(n) {
            return false;
        }
        self.bank_mut().note_deficit(n);
        counted != 0 && self.advance(n, counted)
    }

    /// The host reports that `n` has counted as far as was asked.
    fn report<H: CounterHost<Self::Event>>(&mut self, n: Counter, report: Report, host: &mut H) {
        let counted = self.bank_mut().hosted.report(n, report, host);
        let overflowed = self.take(n, counted);
        let hosted = &mut self.bank_mut().hosted;
        if !overflowed {
            count(&mut hosted.statistics.spurious_reports);
        }
        hosted.slots[n].repeats.note_overflow(overflowed);
        self.follow_up(host);
        let due = self.due(n);
        let asked = self.bank().hosted.armed(n);
        let asks = report == Report::Due && due.is_some() && due != asked;
        // Reading the host event again returns more than its report, and the next report is asked for from there. A host
        // event that repeats has then less than a period to count, and repeats that. So after that report it is asked for
        // a whole period, unread: each read would leave less than a period again.
        let reads =
            asks && self.implemented().contains(n) && !self.bank().hosted.slots[n].repeats.is_rest;
        if reads {
            self.settle(n.alone(), host);
        }
        self.apply(host);
        if asks {
            self.bank_mut().hosted.slots[n].repeats.note_asked(reads);
        }
    }

    /// Finds out anew which of `counters` are to have a host event, now that what they count may
    /// have changed. Losses are forgotten: the host is asked again.
    fn reclassify(&mut self, counters: CounterSet) {
        for n in counters {
            let countable = self.is_countable(n);
            let bank = self.bank_mut();
            // What is counted may have changed, so the host may be able to count it now.
            bank.counters[n].lost = None;
            bank.countable.put(n, countable);
        }
    }

    /// Counters that the host could not back for a reason that may pass get a new chance.
    fn ask_again(&mut self) {
        let denied = self.implemented() - self.bank().countable;
        let lost = |n| self.bank().counters[n].lost;
        self.reclassify(denied.filter(|n| matches!(lost(n), Some(Lost::Busy | Lost::Failed))));
    }

    /// The vCPU starts to run.
    fn start_vcpu<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        if !self.bank().loaded {
            // While the vCPU did not run, others may have given counters back.
            self.bank_mut().loaded = true;
            self.ask_again();
            self.apply(host);
        }
    }

    /// The vCPU stops running: nothing counts, and all that was counted is taken.
    fn stop_vcpu<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        if self.bank().loaded {
            self.bank_mut().loaded = false;
            // First stop, then read: totals that stand still are read once.
            self.apply(host);
            self.settle(self.unsettled(), host);
            self.bank_mut().hosted.end_slice(host);
        }
    }

    /// Nothing counts until the vCPU starts to run again, in a moment.
    fn hold_vcpu<H: CounterHost<Self::Event>>(&mut self, host: &mut H) {
        if self.bank().loaded {
            self.bank_mut().loaded = false;
            self.bank_mut().hosted.hold(host);
        }
    }
}
