//! The counters that the host samples, and the room that their records have.

use super::{Host, Sample, TakenSamples};
use crate::counter::{Counter, CounterSet, FAR, Report, Slots};
use crate::x86::Ring;

/// The least number of records up to the threshold for which sampling pays. Linux has one where it wants an interrupt
/// for each record, and else hundreds.
pub(crate) const MANY: u64 = 16;

/// Samples that are converted at once.
pub(crate) const BATCH: usize = 32;

/// What the room for them has before there are any.
pub(crate) const NOWHERE: Sample = Sample {
    ip: 0,
    ring: Ring::User,
    tsc: 0,
};

/// A counter that the host samples.
#[derive(Clone, Copy, Debug, Default)]
struct Sampled {
    /// The period that the host samples with, in events.
    period: u64,
    /// The host's report is due with the overflow of this number, counted from the next.
    ahead: u64,
    /// How many samples the host keeps.
    capacity: u64,
    /// Periods that are over, of late, and those of them that the host has sampled.
    passed: u64,
    seen: u64,
}

/// The counters that the host samples.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sampling {
    /// Counters that are sampled.
    pub(crate) counters: CounterSet,
    slots: Slots<Sampled>,
    /// Records that fit up to the threshold, as far as is known.
    pub(crate) room: u64,
}

impl Sampling {
    /// The host samples `n` from now on each `period` events, and keeps `capacity` samples.
    pub(crate) fn begin(&mut self, n: Counter, period: u64, capacity: u64) {
        self.counters.insert(n);
        self.slots[n] = Sampled {
            period,
            capacity,
            ..Sampled::default()
        };
    }

    /// The host samples `counters` no more.
    pub(crate) fn end(&mut self, counters: CounterSet) {
        self.counters -= counters;
    }

    /// Returns the period that the host samples `n` with, in events.
    pub(crate) fn period(&self, n: Counter) -> u64 {
        self.slots[n].period
    }

    /// Takes a report of `n`, with which the room is to be divided anew if `n` is sampled. Returns how far to believe the
    /// report. Periods that are over are compared with samples, so they are read and not vouched for: the timer of a host's
    /// clock may gain on its count.
    pub(crate) fn report(&mut self, n: Counter, report: Report) -> Report {
        // A host event that is made anew ends the sampling.
        if report == Report::Moved || !self.counters.contains(n) {
            return report;
        }
        self.slots[n].ahead = 0;
        Report::Unsure
    }

    /// `periods` of `n` are over.
    pub(crate) fn pass(&mut self, n: Counter, periods: u64) {
        let slot = &mut self.slots[n];
        slot.ahead = slot.ahead.saturating_sub(periods);
        slot.passed = slot.passed.saturating_add(periods);
    }

    /// Takes samples of `n`, as many as there are or `samples` has room for. Without a host that samples there are none.
    pub(crate) fn take(
        &mut self,
        n: Counter,
        host: Option<&mut dyn Host>,
        samples: &mut [Sample],
    ) -> TakenSamples {
        let taken = host.map_or(TakenSamples::NONE, |host| host.take_samples(n, samples));
        let periods = [taken.samples as u64, taken.outside, taken.lost];
        let seen = &mut self.slots[n].seen;
        *seen = periods.into_iter().fold(*seen, u64::saturating_add);
        taken
    }

    /// Returns the periods of `n` of which the host has taken no sample, if it misses more than it takes.
    pub(crate) fn missed(&mut self, n: Counter) -> Option<u64> {
        let Sampled { passed, seen, .. } = &mut self.slots[n];
        let missed = passed.saturating_sub(*seen);
        let is_many = missed > *seen && missed >= MANY;
        if *passed >= 4 * MANY {
            // What the host has taken long ago says nothing about now.
            (*passed, *seen) = (0, 0);
        }
        is_many.then_some(missed)
    }

    /// In how many events a report of `n` is due, whose next overflow comes after `distance`.
    pub(crate) fn due(&self, n: Counter, distance: u64) -> u64 {
        if !self.counters.contains(n) {
            return distance;
        }
        let Sampled { period, ahead, .. } = self.slots[n];
        let more = period.saturating_mul(ahead.saturating_sub(1));
        distance.saturating_add(more)
    }

    /// Returns the counters that have used up what they were given of the room, all of them just read or begun. If there
    /// are any, the room must be divided anew.
    pub(crate) fn used_up(&self) -> CounterSet {
        self.counters.filter(|n| self.slots[n].ahead == 0)
    }

    /// Divides the room up to the threshold among the counters.
    pub(crate) fn divide(&mut self) {
        let each = self.room / u64::from(self.counters.len().max(1));
        for n in self.counters {
            let slot = &mut self.slots[n];
            // The host's samples find room for a quarter more: its period is not exactly the counter's.
            let most = (slot.capacity / 4 * 3).min(FAR / slot.period.max(1));
            slot.ahead = each.min(most).max(1);
        }
    }
}
