//! The guest's counters and the host's events behind them.

use core::num::NonZeroU64;

use super::EmulatedPmu;
use crate::arm::{
    CHAIN, CPU_CYCLES, CYCLE_COUNTER, CounterConfig, EventKind, ExceptionLevel, SW_INCR, pmcr,
};
use crate::counter::{Bank, Counter, CounterHost, CounterSet, Events, Model};

/// Exception levels of the guest, bit *n* for EL*n*: events may have come from several.
type Levels = u8;

impl<V: Events> Model for EmulatedPmu<V> {
    type Event = CounterConfig;
    type Observer = V;

    fn bank(&self) -> &Bank<CounterConfig, V> {
        &self.bank
    }

    fn bank_mut(&mut self) -> &mut Bank<CounterConfig, V> {
        &mut self.bank
    }

    /// By its own bit and PMCR_EL0.E.
    fn enabled(&self) -> CounterSet {
        if self.pmcr & pmcr::E != 0 {
            self.enabled
        } else {
            CounterSet::EMPTY
        }
    }

    fn event(&self, n: Counter) -> CounterConfig {
        self.config_of(n, self.types[n])
    }

    fn is_countable(&self, n: Counter) -> bool {
        let config = self.event(n);
        let allowed = match config.event {
            EventKind::Cycles => self.config.filter.allows(CPU_CYCLES),
            // The model counts these two by itself: no host event has them.
            EventKind::Event(SW_INCR | CHAIN) => false,
            EventKind::Event(event) => self.config.filter.allows(event),
        };
        allowed && (config.el0 || config.el1)
    }

    fn wanted(&self) -> CounterSet {
        match (self.bank.loaded, self.open) {
            (false, _) => CounterSet::EMPTY,
            (true, false) => self.enabled() & self.bank.countable,
            // The hardware's PMCR_EL0.E is the guest's own, and gates open counters.
            (true, true) => self.enabled & self.bank.countable,
        }
    }

    /// Open counters hold the guest's values themselves.
    fn unsettled(&self) -> CounterSet {
        if self.open {
            CounterSet::EMPTY
        } else {
            self.bank.hosted.unsettled()
        }
    }

    /// In how many events something happens for `n` that raises the line. A distance that a `u64`
    /// cannot say is cut down to one that it can: the report then comes early.
    fn report_wanted(&self, n: Counter) -> Option<NonZeroU64> {
        if !self.asks_for_reports() {
            return None;
        }
        let raises = |n| self.interrupting.contains(n) && !self.overflowed.contains(n);
        let own = self.events_to_overflow(n);
        let events = if raises(n) {
            own
        } else {
            // A counter that raises nothing may carry into one that does.
            let odd = self.carries_to(n).filter(|&odd| raises(odd))?;
            let carries = self.events_to_overflow(odd) - 1;
            // A counter that carries wraps at 2^32, and so does the one above it: `carries` has 32 bits.
            own.saturating_add(carries << 32)
        };
        NonZeroU64::new(if n == CYCLE_COUNTER && self.divides() {
            // No overflow: D divides only where LC is clear, so that `events` is at most 2^32.
            events * 64 - u64::from(self.prescaler)
        } else {
            events
        })
    }

    /// Open counters overflow where the guest's do, and `BackedPmu` says which interrupt.
    fn asks_for_reports(&self) -> bool {
        !self.open
    }

    fn advance(&mut self, n: Counter, events: u64) -> bool {
        self.count_at(n, events, self.levels(n))
    }
}

impl<V: Events> EmulatedPmu<V> {
    /// Settles `counters` and what carries into them: before one is read, or before something that
    /// decides about it changes.
    pub(super) fn settle_with_carries<H: CounterHost<CounterConfig>>(
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
            if n == n.odd() && self.event_number(n) == Some(CHAIN) {
                even.insert(n.even());
            }
        }
        self.settle(even, host);
    }

    /// Settles the counters whose overflows are counted by another one.
    pub(super) fn settle_carries<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let carrying = self.unsettled().filter(|n| self.carries_to(n).is_some());
        self.settle(carrying, host);
    }

    /// Makes the overflow bits right. A counter whose bit is set already cannot change anything.
    pub(super) fn settle_overflows<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_carries(host);
        let open = self.unsettled() - self.overflowed;
        // A report may be out for those that interrupt, and only for them is it their overflow's.
        let doubtful = self.bank.hosted.in_doubt(open & self.interrupting, host);
        self.settle(doubtful | (open - self.interrupting), host);
    }

    /// The levels at which `n` counts.
    fn levels(&self, n: Counter) -> Levels {
        let config = self.event(n);
        u8::from(config.el0) | u8::from(config.el1) << 1
    }

    /// `n` counts a software increment at `level`, if it counts any there.
    pub(super) fn increment(&mut self, n: Counter, level: ExceptionLevel) {
        let levels = self.levels(n) & 1 << level as u8;
        let counts = self.event_number(n) == Some(SW_INCR) && self.enabled().contains(n);
        if counts && levels != 0 {
            self.count_at(n, 1, levels);
        }
    }

    /// `n` counts `events` more, which came from `levels`. Answers whether it overflows.
    fn count_at(&mut self, n: Counter, events: u64, levels: Levels) -> bool {
        let events = if n == CYCLE_COUNTER {
            self.divide(events)
        } else {
            events
        };
        let long = self.is_long(n);
        let counter = &mut self.bank.counters[n];
        let (value, wraps) = add(counter.value, events, long);
        counter.value = if n == CYCLE_COUNTER {
            value
        } else {
            value & self.config.version.counter_mask()
        };
        if wraps == 0 {
            return false;
        }
        self.overflowed.insert(n);
        self.bank.observer.overflowed(n);
        if let Some(odd) = self.carries_to(n) {
            let levels = levels & self.levels(odd);
            if levels != 0 {
                // This ends here: an odd counter carries to none.
                self.count_at(odd, wraps, levels);
            }
        }
        true
    }

    /// Cycles of the processor as counts of the cycle counter.
    fn divide(&mut self, cycles: u64) -> u64 {
        if !self.divides() {
            return cycles;
        }
        // The rest is kept: 64 cycles count once, in however many pieces they come.
        let rest = u64::from(self.prescaler) + cycles % 64;
        self.prescaler = (rest % 64) as u8;
        cycles / 64 + rest / 64
    }

    /// Whether the cycle counter counts every 64th cycle only.
    fn divides(&self) -> bool {
        self.pmcr & (pmcr::D | pmcr::LC) == pmcr::D
    }

    /// Whether `n` overflows at 2^64 rather than at 2^32.
    fn is_long(&self, n: Counter) -> bool {
        let bit = if n == CYCLE_COUNTER {
            pmcr::LC
        } else {
            pmcr::LP
        };
        self.pmcr & bit != 0
    }

    /// The CHAIN counter that counts the overflows of `n` now. With PMCR_EL0.LP set there is none:
    /// only an overflow of 32 bits is a CHAIN event (DDI 0487, J1.1.1,
    /// `AArch64.IncrementEventCounter`).
    fn carries_to(&self, n: Counter) -> Option<Counter> {
        let odd = n.odd();
        (n != odd
            && odd.number() < self.config.counters
            && self.event_number(odd) == Some(CHAIN)
            && !self.is_long(n)
            && self.enabled().contains(odd))
        .then_some(odd)
    }

    /// How many counts bring `n` to its next overflow: 1 to 2^32, or if it is long 1 to 2^64 - 1
    /// and that for 2^64 too.
    fn events_to_overflow(&self, n: Counter) -> u64 {
        let value = self.bank.counters[n].value;
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
        // A host can report more than 2^32 events at once: a counter of 32 bits then wraps several times.
        let low = u64::from(value as u32) + u64::from(events as u32);
        (events >> 32) + (low >> 32)
    };
    (sum, wraps)
}
