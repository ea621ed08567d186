//! The pace of overflows: how near to each other they may be, so that the host has time for anything else.
//!
//! A clock's period is a time, so it is never shorter than [`FLOOR`] for each counter that waits for an overflow: a host
//! that counts by a clock has no [`Pace`].
//!
//! A hardware event's period says nothing about time: a thousand cache misses may take a second, and a thousand cycles
//! less than a microsecond. So the bound is a rate, of one overflow each [`FLOOR`] ns on average. Overflows are counted
//! where they happen, in the event's buffer, and each takes [`FLOOR`] from an allowance. While there is allowance
//! left, every period is as the guest asked. A counter whose overflows come too fast when there is none gets a longer
//! period, made of what its own rate has been, and a shorter one again when its overflows have become rarer. A new
//! event may be any, so while the allowance is overdrawn it begins with a period that is safe for one event a cycle.

use std::num::NonZeroU64;

use vpmu::counter::{Counter, Slots};

use crate::kind::ENDLESS;

/// The shortest distance between overflows, ns: see [`PerfHost::FLOOR`](crate::PerfHost::FLOOR).
pub(crate) const FLOOR: u64 = 50_000;
/// The allowance that can be saved up: so many overflows at once.
const BURST: u64 = 32;
/// The most that the allowance is overdrawn, in ns: the time in which a storm is forgotten.
const DEBT: u64 = 50_000_000;

/// What is known of one hardware event.
#[derive(Clone, Copy, Debug)]
struct Rate {
    /// The shortest period, in events. 1: none is too short.
    least: u64,
    /// The moment since which the event has counted towards its next overflow, ns. 0: it has not overflowed yet.
    since: u64,
}

impl Rate {
    const UNKNOWN: Self = Self { least: 1, since: 0 };
}

/// The bound on the overflows of a host's hardware events.
#[derive(Debug)]
pub(crate) struct Pace {
    rates: Slots<Rate>,
    /// The moment at which the whole allowance is there again, ns.
    whole_at: u64,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            rates: Slots::from_fn(|| Rate::UNKNOWN),
            whole_at: 0,
        }
    }

    /// A new event is behind `counter`. Without a buffer to count overflows in, its periods are always those that are
    /// safe for any event.
    pub(crate) fn begin(&mut self, counter: Counter, counted: bool, now: u64) {
        self.rates[counter] = match counted && self.whole_at <= now.saturating_add(BURST * FLOOR) {
            true => Rate::UNKNOWN,
            false => Rate {
                least: FLOOR,
                since: 0,
            },
        };
    }

    /// Returns the period for so many of the guest's events.
    pub(crate) fn period(&self, counter: Counter, events: NonZeroU64) -> u64 {
        events.get().clamp(self.rates[counter].least, ENDLESS)
    }

    /// Takes so many overflows from the allowance.
    pub(crate) fn charge(&mut self, overflows: u64, now: u64) {
        let cost = overflows.saturating_mul(FLOOR);
        self.whole_at = self.whole_at.max(now).saturating_add(cost).min(now + DEBT);
    }

    /// The event behind `counter` has overflowed so many times, at its `period`, while `sharing` counters wait for
    /// overflows. Returns whether the period is too short.
    pub(crate) fn overflowed(
        &mut self,
        counter: Counter,
        overflows: u64,
        period: u64,
        sharing: u64,
        now: u64,
    ) -> bool {
        if overflows == 0 {
            // A late signal of a period that has been replaced, or an event without a buffer: nothing is learned.
            return false;
        }
        self.charge(overflows, now);
        let cost = overflows.saturating_mul(FLOOR);
        let rate = &mut self.rates[counter];
        let took = match rate.since {
            0 => 0,
            since => now.saturating_sub(since),
        };
        rate.since = now;
        // What a fair part of the time allows this counter.
        let fair = cost.saturating_mul(sharing);
        if self.whole_at > now + BURST * FLOOR && took < fair {
            let counted = u128::from(period) * u128::from(overflows);
            let needed = counted * u128::from(FLOOR * sharing) / u128::from(took.max(1));
            let needed = u64::try_from(needed).unwrap_or(ENDLESS);
            // In a storm the interrupts themselves take the time, and the rate seems lower than it is.
            let storm = period.saturating_mul(overflows);
            // One measurement may be of a short burst.
            let longest = storm.max(period.saturating_mul(64)).max(2);
            rate.least = needed.max(storm).clamp(period.saturating_add(1), longest);
            return true;
        }
        // Twice as rare as it may be: half the period is as safe.
        if took > 2 * fair {
            rate.least = (rate.least / 2).max(1);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTER: Counter = Counter::at::<0>();
    const ONE: NonZeroU64 = NonZeroU64::MIN;

    /// Lets an event happen `rate` times a ms, with the guest's wish for a report after `events` each. Returns the
    /// overflows, and the largest period.
    fn storm(pace: &mut Pace, rate: u64, events: NonZeroU64, ns: u64) -> (u64, u64) {
        let (mut now, mut overflows, mut largest) = (1_000_000, 0, 0);
        let end = now + ns;
        while now < end {
            let period = pace.period(COUNTER, events);
            largest = largest.max(period);
            // Until the report has been acted upon, the event overflows again and again.
            let took = (period * 1_000_000 / rate).max(30_000);
            // Each takes the host a microsecond.
            let times = (took * rate / 1_000_000 / period).clamp(1, took / 1000);
            now += took;
            overflows += times;
            pace.overflowed(COUNTER, times, period, 1, now);
        }
        (overflows, largest)
    }

    #[test]
    fn rare_events_have_each_overflow() {
        let mut pace = Pace::new();
        pace.begin(COUNTER, true, 1_000_000);
        // 20,000 events a second, each thousandth of them.
        let (overflows, largest) = storm(&mut pace, 20, NonZeroU64::new(1000).unwrap(), 1 << 32);
        assert_eq!((overflows, largest), ((1 << 32) / 50_000_000 + 1, 1000));
    }

    #[test]
    fn a_storm_is_bounded_and_ends() {
        let mut pace = Pace::new();
        pace.begin(COUNTER, true, 1_000_000);
        let ns = 1_000_000_000;
        let (overflows, _) = storm(&mut pace, 4_000_000, ONE, ns);
        // A shorter period is tried now and then.
        let allowed = ns / FLOOR * 6 / 5;
        assert!(overflows <= allowed, "{overflows} of {allowed}");
        let hot = pace.period(COUNTER, ONE);
        assert!(hot >= 100_000, "{hot}");
        // The same event becomes rare: after some reports, each is as asked.
        let mut now = 2_000_000_000;
        for _ in 0..20 {
            now += 10 * FLOOR;
            pace.overflowed(COUNTER, 1, pace.period(COUNTER, ONE), 1, now);
        }
        assert_eq!(pace.period(COUNTER, ONE), 1);
    }

    #[test]
    fn a_late_signal_tells_no_rate() {
        let mut pace = Pace::new();
        pace.begin(COUNTER, true, 1_000_000);
        pace.overflowed(COUNTER, 100, 1, 1, 1_100_000);
        let least = pace.period(COUNTER, ONE);
        // Its overflow was charged when the period was replaced.
        assert!(!pace.overflowed(COUNTER, 0, least, 1, 1_100_001));
        assert_eq!(pace.period(COUNTER, ONE), least);
    }

    #[test]
    fn after_a_storm_a_new_event_begins_safely() {
        let mut pace = Pace::new();
        pace.begin(COUNTER, true, 1_000_000);
        assert_eq!(pace.period(COUNTER, ONE), 1);
        pace.overflowed(COUNTER, 100, 1, 1, 1_100_000);
        pace.begin(COUNTER, true, 1_200_000);
        assert_eq!(pace.period(COUNTER, ONE), FLOOR);
        pace.begin(COUNTER, true, 2_000_000_000);
        assert_eq!(pace.period(COUNTER, ONE), 1, "forgotten");
        pace.begin(COUNTER, false, 2_000_000_000);
        assert_eq!(pace.period(COUNTER, ONE), FLOOR, "nobody counts them");
    }
}
