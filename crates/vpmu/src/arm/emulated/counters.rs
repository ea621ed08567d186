//! The guest's counters and the host's behind them: the only place that calls the host.

use core::num::NonZeroU64;
use core::ops::{BitAnd, Index, IndexMut};

use super::EmulatedPmu;
use crate::arm::{CHAIN, CYCLE_COUNTER, CounterConfig, ExceptionLevel, RawPmevtyper, pmcr};
use crate::counter::{CounterHost, CounterSet, Events, Lost, count};

/// A report asked for this far ahead, or further, may come early rather than be asked for again: it
/// lies minutes away. Without this, a 64-bit counter at 0, which is further from its overflow than
/// a period can say, would be asked for again at each look.
const FAR: u64 = 1 << 40;

/// One guest counter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// PMEVTYPERn_EL0 or PMCCFILTR_EL0.
    pub(super) raw: RawPmevtyper,
    /// The guest's counter when the host's total was `mark`.
    pub(super) value: u64,
    /// Why the host does not back it.
    pub(super) lost: Option<Lost>,
    /// What the host counter counts; `None`: there is no host counter.
    backing: Option<CounterConfig>,
    /// The host's total that `value` includes.
    mark: u64,
    /// How far beyond `mark` a report is due; `None`: none is.
    report_in: Option<NonZeroU64>,
}

/// A [`Slot`] for each bit of a [`CounterSet`]. An index is taken modulo 32, so none is out of
/// range; the PMU itself only uses those of counters that exist.
#[derive(Clone, Debug, Default)]
pub(super) struct Slots([Slot; 32]);

impl Index<u8> for Slots {
    type Output = Slot;
    fn index(&self, n: u8) -> &Slot {
        &self.0[usize::from(n & 31)]
    }
}

impl IndexMut<u8> for Slots {
    fn index_mut(&mut self, n: u8) -> &mut Slot {
        &mut self.0[usize::from(n & 31)]
    }
}

/// Exception levels of the guest, of which events may have come from several.
#[derive(Clone, Copy, Debug)]
pub(super) struct Levels {
    el0: bool,
    el1: bool,
}

impl Levels {
    pub(super) fn of(config: &CounterConfig) -> Self {
        Self {
            el0: config.el0,
            el1: config.el1,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        !self.el0 && !self.el1
    }
}

impl From<ExceptionLevel> for Levels {
    fn from(level: ExceptionLevel) -> Self {
        Self {
            el0: level == ExceptionLevel::El0,
            el1: level == ExceptionLevel::El1,
        }
    }
}

impl BitAnd for Levels {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self {
            el0: self.el0 && other.el0,
            el1: self.el1 && other.el1,
        }
    }
}

impl<V: Events> EmulatedPmu<V> {
    /// Brings the host to what the registers say: pauses, replaces, asks for reports, resumes, in
    /// that order and as sets. Does nothing where nothing changed.
    pub(super) fn apply<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let wanted = if self.loaded && self.pmcr & pmcr::E != 0 {
            self.enabled & self.countable
        } else {
            CounterSet::EMPTY
        };

        self.pause(self.running - wanted, host);
        let mut start = wanted - self.running;
        for n in start {
            if let Err(reason) = self.back(n, host) {
                start.remove(n);
                self.lose(n, reason);
            }
        }
        for n in self.running | start {
            self.ask_for_report(n, host);
        }
        if !start.is_empty() {
            count(&mut self.statistics.resumes);
            host.resume(start);
            self.running |= start;
            self.used |= start;
        }
    }

    /// Stops host counters that run. What they counted stays to be read.
    pub(super) fn pause<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        if !counters.is_empty() {
            count(&mut self.statistics.pauses);
            host.pause(counters);
            self.running -= counters;
            self.unread |= counters;
        }
    }

    /// Sees to it that the right host counter stands behind `n`, which does not run.
    fn back<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) -> Result<(), Lost> {
        let config = self.counter_config(n);
        if self.slots[n].backing == Some(config) {
            return Ok(());
        }
        self.release(CounterSet::of(n) & self.backed(), host);
        count(&mut self.statistics.creates);
        host.create(n, &config)
            .inspect_err(|_| count(&mut self.statistics.lost))?;
        self.slots[n].backing = Some(config);
        Ok(())
    }

    /// Counters with a host counter behind them.
    pub(super) fn backed(&self) -> CounterSet {
        let mut backed = CounterSet::EMPTY;
        for n in self.implemented() {
            if self.slots[n].backing.is_some() {
                backed.insert(n);
            }
        }
        backed
    }

    /// Releases paused host counters. What they counted has been settled, or does not matter any
    /// more.
    pub(super) fn release<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        for n in counters {
            count(&mut self.statistics.releases);
            host.release(n);
            let slot = &mut self.slots[n];
            slot.backing = None;
            slot.mark = 0;
            slot.report_in = None;
            self.unread.remove(n);
        }
    }

    /// Takes note of what the host has counted for `counters` since last time, as far as there can
    /// be anything.
    pub(super) fn settle<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        for n in counters & (self.running | self.unread) {
            count(&mut self.statistics.reads);
            let total = host.read(n);
            self.unread.remove(n);
            let slot = &mut self.slots[n];
            let counted = total.wrapping_sub(slot.mark);
            slot.mark = total;
            slot.report_in = slot
                .report_in
                .and_then(|due| NonZeroU64::new(due.get().saturating_sub(counted)));
            if counted != 0 {
                self.advance(n, counted, Levels::of(&self.counter_config(n)));
            }
        }
    }

    /// Settles `counters` and what carries into them: before one is read, or before something that
    /// decides about it changes.
    pub(super) fn look<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        self.settle_carries_into(counters, host);
        self.settle(counters, host);
    }

    /// Settles the even counters below those of `counters` that are CHAIN counters.
    pub(super) fn settle_carries_into<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        let mut even = CounterSet::EMPTY;
        for n in counters {
            if n & 1 == 1 && self.event(n) == Some(CHAIN) {
                even.insert(n.wrapping_sub(1));
            }
        }
        self.settle(even, host);
    }

    /// Settles the counters whose overflows are counted by another one.
    pub(super) fn settle_carries<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let mut even = CounterSet::EMPTY;
        for n in self.running | self.unread {
            if self.carries_to(n).is_some() {
                even.insert(n);
            }
        }
        self.settle(even, host);
    }

    /// Makes the overflow bits right. A counter whose bit is set already cannot change anything.
    pub(super) fn settle_overflows<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_carries(host);
        self.settle((self.running | self.unread) - self.overflowed, host);
    }

    /// A report for counter `n` has come in.
    pub(super) fn report<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) {
        count(&mut self.statistics.reports);
        let before = self.overflowed;
        self.settle(CounterSet::of(n), host);
        if before == self.overflowed {
            count(&mut self.statistics.spurious_reports);
        }
        if self.implemented().contains(n) {
            self.slots[n].report_in = None;
        }
    }

    /// `n` counts `events` more, which came from `levels`.
    pub(super) fn advance(&mut self, n: u8, events: u64, levels: Levels) {
        let events = if n == CYCLE_COUNTER {
            self.divide(events)
        } else {
            events
        };
        let long = self.is_long(n);
        let slot = &mut self.slots[n];
        let (value, wraps) = add(slot.value, events, long);
        slot.value = if n == CYCLE_COUNTER {
            value
        } else {
            value & self.config.version.counter_mask()
        };
        if wraps == 0 {
            return;
        }
        self.overflowed.insert(n);
        self.events.overflowed(n);
        if let Some(odd) = self.carries_to(n) {
            let levels = levels & Levels::of(&self.counter_config(odd));
            if !levels.is_empty() {
                // This ends here: an odd counter carries to none.
                self.advance(odd, wraps, levels);
            }
        }
    }

    /// Cycles of the processor as counts of the cycle counter.
    fn divide(&mut self, cycles: u64) -> u64 {
        if !self.divides() {
            return cycles;
        }
        let rest = u64::from(self.prescaler) + cycles % 64;
        self.prescaler = (rest % 64) as u8;
        cycles / 64 + rest / 64
    }

    /// Whether the cycle counter counts every 64th cycle only.
    fn divides(&self) -> bool {
        self.pmcr & (pmcr::D | pmcr::LC) == pmcr::D
    }

    /// Whether `n` overflows at 2^64 rather than at 2^32.
    fn is_long(&self, n: u8) -> bool {
        let bit = if n == CYCLE_COUNTER {
            pmcr::LC
        } else {
            pmcr::LP
        };
        self.pmcr & bit != 0
    }

    /// The CHAIN counter that counts the overflows of `n` now.
    fn carries_to(&self, n: u8) -> Option<u8> {
        let odd = n.wrapping_add(1);
        (n & 1 == 0
            && odd < self.config.counters
            && self.event(odd) == Some(CHAIN)
            && !self.is_long(n)
            && self.is_enabled(odd))
        .then_some(odd)
    }

    /// Asks the host for the report that is wanted for `n`, if it is not the one asked for already.
    /// `n` has been settled if anything that decides about it changed.
    fn ask_for_report<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) {
        let wanted = self.report_wanted(n);
        let due = self.slots[n].report_in;
        let keep = match (due, wanted) {
            (Some(due), Some(wanted)) if due.get() >= FAR => due <= wanted,
            (Some(due), None) => due.get() >= FAR,
            _ => due == wanted,
        };
        if !keep {
            count(&mut self.statistics.set_periods);
            host.set_period(n, wanted);
            self.slots[n].report_in = wanted;
        }
    }

    /// In how many host events from `mark` on something happens for `n` that raises the line. A
    /// distance that a `u64` cannot say is cut down to one that it can: the report then comes
    /// early.
    fn report_wanted(&self, n: u8) -> Option<NonZeroU64> {
        let raises = |n| self.interrupting.contains(n) && !self.overflowed.contains(n);
        let own = self.events_to_overflow(n);
        let events = if raises(n) {
            own
        } else {
            let odd = self.carries_to(n).filter(|&odd| raises(odd))?;
            let carries = self.events_to_overflow(odd) - 1;
            own.saturating_add(carries << 32)
        };
        NonZeroU64::new(if n == CYCLE_COUNTER && self.divides() {
            events * 64 - u64::from(self.prescaler)
        } else {
            events
        })
    }

    /// How many counts bring `n` to its next overflow: 1 to 2^32, or if it is long 1 to 2^64 - 1
    /// and that for 2^64 too.
    fn events_to_overflow(&self, n: u8) -> u64 {
        let value = self.slots[n].value;
        if self.is_long(n) {
            match value {
                0 => u64::MAX,
                value => value.wrapping_neg(),
            }
        } else {
            (1 << 32) - u64::from(value as u32)
        }
    }
}

/// `value + events`, and how often that passed the end: of 64 bits if `long`, else of 32.
fn add(value: u64, events: u64, long: bool) -> (u64, u64) {
    let (sum, wrapped) = value.overflowing_add(events);
    let wraps = if long {
        u64::from(wrapped)
    } else {
        let low = u64::from(value as u32) + u64::from(events as u32);
        (events >> 32) + (low >> 32)
    };
    (sum, wraps)
}
