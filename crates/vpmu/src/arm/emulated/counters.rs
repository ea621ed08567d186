//! The guest's counters and the host's events behind them.

use core::num::NonZeroU64;
use core::ops::BitAnd;

use super::EmulatedPmu;
use crate::arm::{CHAIN, CYCLE_COUNTER, CounterConfig, ExceptionLevel, RawPmevtyper, pmcr};
use crate::counter::{CounterHost, CounterSet, Events, Lost, Report, count};

/// A report asked for this far ahead, or further, may come early rather than be asked for again: it
/// lies minutes away. Without this, a 64-bit counter at 0, which is further from its overflow than
/// a period can say, would be asked for again at each look.
const FAR: u64 = 1 << 40;

/// One guest counter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// PMEVTYPERn_EL0 or PMCCFILTR_EL0.
    pub(super) raw: RawPmevtyper,
    /// The guest's counter, without what the host has counted since it was last asked.
    pub(super) value: u64,
    /// Why the value is wrong.
    pub(super) lost: Option<Lost>,
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

        self.hosted.stop(self.hosted.running() - wanted, host);
        let start = wanted - self.hosted.running();
        // What a counter has counted decides how far it is from its overflow. One that goes on as
        // it was need not be asked.
        for n in start & self.hosted.unsettled() {
            if !self
                .hosted
                .keeps_period(n, &self.counter_config(n), self.due(n))
            {
                self.settle(CounterSet::of(n), host);
            }
        }
        for n in start {
            let (config, due) = (self.counter_config(n), self.due(n));
            if let Err(reason) = self.hosted.start(n, config, due, host) {
                self.lose(n, reason);
            }
        }
        for n in self.hosted.running() {
            if let Err(reason) = self.hosted.rearm(n, self.due(n), host) {
                self.lose(n, reason);
            }
        }
        self.hosted.resume_started(host);
    }

    /// Takes note of what the host has counted for `counters` since last time, as far as there can
    /// be anything.
    pub(super) fn settle<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        for n in counters & self.hosted.unsettled() {
            let counted = self.hosted.collect(n, host);
            self.take(n, counted);
        }
    }

    /// The host has counted so many events for `n`.
    fn take(&mut self, n: u8, counted: u64) {
        if !self.implemented().contains(n) {
            return;
        }
        if let Some(reason) = self.hosted.deficit(n)
            && self.slots[n].lost.is_none()
        {
            // It goes on counting: too little is better than nothing, and known to be too little.
            self.slots[n].lost = Some(reason);
            self.events.lost(n, reason);
        }
        if counted != 0 {
            self.advance(n, counted, Levels::of(&self.counter_config(n)));
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
        for n in self.hosted.unsettled() {
            if self.carries_to(n).is_some() {
                even.insert(n);
            }
        }
        self.settle(even, host);
    }

    /// Makes the overflow bits right. A counter whose bit is set already cannot change anything.
    pub(super) fn settle_overflows<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_carries(host);
        let open = self.hosted.unsettled() - self.overflowed;
        // A report may be out for those that interrupt, and only for them is it their overflow's.
        let doubtful = self.hosted.in_doubt(open & self.interrupting, host);
        self.settle(doubtful | (open - self.interrupting), host);
    }

    /// A report for counter `n` has come in.
    pub(super) fn report<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) {
        let before = self.overflowed;
        let counted = self.hosted.report(n, Report::Unsure, host);
        self.take(n, counted);
        if before == self.overflowed {
            count(&mut self.hosted.statistics_mut().spurious_reports);
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

    /// When the host is to report for `n`, from what has been taken on: the report that is wanted,
    /// or the one that its host event has been asked for already if that will do.
    fn due(&self, n: u8) -> Option<NonZeroU64> {
        let wanted = self.report_wanted(n);
        let armed = self
            .hosted
            .armed(n)
            .filter(|&armed| armed.get() >= FAR && wanted.is_none_or(|wanted| armed <= wanted));
        if armed.is_some() && self.hosted.keeps_period(n, &self.counter_config(n), armed) {
            armed
        } else {
            wanted
        }
    }

    /// In how many host events, from what has been taken on, something happens for `n` that raises the line. A
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
