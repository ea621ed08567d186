//! Counters of a portion of a clock's time: of one privilege ring, or of the guest without its host's work.
//!
//! A clock knows a thread's time, and not the CPL of its guest. [Samples](crate::rings) beside it show the ring that the
//! guest was in, and so the counter's portion of the time that its clock has counted. How much time there is to
//! divide is the clock's to say, and not the number of samples, so the counters of both rings add up to the clock's.
//! With [`Freeze::Guest`] the host's samples are nobody's, and the sum is less by the host's portion.
//!
//! A counter that is to overflow kicks the vCPU when its time could be up at the earliest: if the guest were in its
//! ring all the time. If it was not, the rest is waited for, and so on. The overflow is reported only while the guest
//! is in the counter's ring. Until then reads show the last value before it, and the time beyond is carried on.
//! So no interrupt of a counter of user space finds its guest in the kernel, whose addresses it could reveal.

use std::num::NonZeroU64;

use vpmu::x86::{CounterConfig, Ring};

use crate::events::Advance;
use crate::options::Freeze;
use crate::pace::FLOOR;
use crate::rings::{BLOCK, RingSamples};

/// The longest wait for the guest's return to a ring, as a multiple of [`FLOOR`].
const PATIENCE: u64 = 4;

/// The portion of its clock's time that a counter has, by where the thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portion {
    user: bool,
    kernel: bool,
    /// While the host works for the guest.
    host: bool,
}

impl Portion {
    /// Returns the portion of a counter that does not have all of its clock's time.
    pub(crate) fn of(config: &CounterConfig, freeze: Freeze) -> Option<Self> {
        let portion = Self {
            user: config.user,
            kernel: config.kernel,
            // The host works for the guest's kernel: what leaves the guest is privileged, as a rule.
            host: config.kernel && freeze == Freeze::Vm,
        };
        // A counter of no ring counts nothing, and asks for no samples.
        let some = portion.user || portion.kernel;
        let all = portion.user && portion.host;
        (some && !all).then_some(portion)
    }

    fn has(self, ring: Ring) -> bool {
        match ring {
            Ring::User => self.user,
            Ring::Kernel => self.kernel,
        }
    }
}

/// A counter's own samples, and all.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    own: u64,
    all: u64,
}

impl Seen {
    /// Returns the own portion of `time`, or `None` without a sample.
    fn portion(self, time: u64) -> Option<u64> {
        let own = u128::from(time) * u128::from(self.own);
        own.checked_div(u128::from(self.all)).map(|own| own as u64)
    }
}

/// What a clock's period that is up means for a counter of a portion of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TimeUp {
    /// The counter overflows.
    Overflow,
    /// The counter does not overflow before so many more of the guest's events.
    Early(u64),
    /// The guest is in another ring: the clock is to report again after so many ns.
    Away(u64),
    /// Nobody waits for an overflow.
    Unwanted,
}

/// The time of a counter that has a portion of its clock's.
#[derive(Debug)]
pub(crate) struct PortionTime {
    portion: Portion,
    /// The clock's total up to the last whole block of samples, ns, and the counter's portion of it.
    clock: u64,
    own: u64,
    /// Samples since then.
    fresh: Seen,
    /// That block.
    before: Seen,
    /// The last value given, in the guest's events.
    given: u64,
    /// The value that is an overflow, which is not given before it is reported.
    limit: Option<u64>,
    /// Events from one overflow to the next, where a period repeats.
    period: u64,
    /// ns of the last wait for the guest's return to the ring.
    wait: u64,
    /// Where the value last advanced, and the samples since the last one that was given.
    advance: Advance,
    since: Seen,
}

impl PortionTime {
    pub(crate) fn new(portion: Portion) -> Self {
        Self {
            portion,
            clock: 0,
            own: 0,
            fresh: Seen::default(),
            before: Seen::default(),
            given: 0,
            limit: None,
            period: 1,
            wait: 0,
            advance: Advance::default(),
            since: Seen::default(),
        }
    }

    /// Notes samples of the time that the counter's clock has counted.
    pub(crate) fn note(&mut self, samples: RingSamples) {
        let RingSamples { user, kernel, host } = samples;
        let own = |has: bool, samples: u64| if has { samples } else { 0 };
        let all = user + kernel + host;
        let own = own(self.portion.user, user)
            + own(self.portion.kernel, kernel)
            + own(self.portion.host, host);
        for seen in [&mut self.fresh, &mut self.since] {
            seen.all += all;
            seen.own += own;
        }
    }

    /// Notes that the counter overflows when it has counted `events` more than its last value.
    pub(crate) fn expect(&mut self, events: Option<NonZeroU64>) {
        // No counter of the guest's has 2^63 events.
        self.period = events.map_or(1, NonZeroU64::get);
        self.limit = events.map(|_| self.given.saturating_add(self.period));
    }

    /// The clock has reached its period, and the counter has counted `value` of the guest's events. `here`: the guest's
    /// ring, if it is known.
    pub(crate) fn is_up(
        &mut self,
        value: u64,
        repeating: bool,
        here: impl FnOnce() -> Option<Ring>,
    ) -> TimeUp {
        let Some(limit) = self.limit else {
            return TimeUp::Unwanted;
        };
        if value < limit {
            return TimeUp::Early(limit - value);
        }
        if here().is_some_and(|here| !self.portion.has(here)) {
            self.wait = (2 * self.wait).clamp(FLOOR, PATIENCE * FLOOR);
            return TimeUp::Away(self.wait);
        }
        self.pass(value, limit, repeating);
        TimeUp::Overflow
    }

    /// Returns the counter's ns of `total`, the clock's. The time since the last block of samples is divided by the samples since and
    /// that block.
    pub(crate) fn own(&mut self, total: u64) -> u64 {
        let since = total.wrapping_sub(self.clock);
        if self.fresh.all >= BLOCK {
            self.own = self
                .own
                .wrapping_add(self.fresh.portion(since).unwrap_or(0));
            self.clock = total;
            self.before = std::mem::take(&mut self.fresh);
            return self.own;
        }
        let seen = Seen {
            own: self.before.own + self.fresh.own,
            all: self.before.all + self.fresh.all,
        };
        self.own.wrapping_add(seen.portion(since).unwrap_or(0))
    }

    /// Returns the counter's value, which never falls, for `events` of the guest's so far.
    pub(crate) fn give(&mut self, events: u64) -> u64 {
        let most = self.limit.map_or(u64::MAX, |limit| limit - 1);
        self.given = self.given.max(events.min(most));
        self.given
    }

    /// Returns the ns of the clock, whose total is `clock`, for which the last value has stood still although the guest may
    /// have been in the counter's portion: all samples would show if it was elsewhere.
    pub(crate) fn stuck_ns(&mut self, clock: u64) -> u64 {
        let since = std::mem::take(&mut self.since);
        let elsewhere = since.all > 0 && since.own == 0;
        self.advance.stuck_ns(self.given, clock, elsewhere)
    }

    /// Notes that `value` has reached `limit`, which is reported.
    fn pass(&mut self, value: u64, limit: u64, repeating: bool) {
        self.wait = 0;
        // It is not taken back, whatever the samples say that come meanwhile.
        self.given = self.given.max(limit);
        // A period that repeats begins again where it ends.
        let periods = (value - limit) / self.period + 1;
        let next = limit.saturating_add(periods.saturating_mul(self.period));
        self.limit = repeating.then_some(next);
    }
}

#[cfg(test)]
mod tests {
    use vpmu::x86::intel::{RawPerfEvtSel, Version};

    use super::*;
    use crate::rings::period;

    const USER: Portion = Portion {
        user: true,
        kernel: false,
        host: false,
    };
    const KERNEL: Portion = Portion {
        user: false,
        kernel: true,
        host: true,
    };

    fn samples(user: u64, kernel: u64) -> RingSamples {
        RingSamples {
            user,
            kernel,
            host: 0,
        }
    }

    #[test]
    fn a_freeze_leaves_out_the_hosts_time() {
        let cycles = |rings| RawPerfEvtSel(0x3c | rings).config(Version::V2);
        let both = cycles(RawPerfEvtSel::USR | RawPerfEvtSel::OS);
        assert_eq!(
            Portion::of(&both, Freeze::Vm),
            None,
            "all of the clock's time"
        );
        assert_eq!(Portion::of(&cycles(0), Freeze::Guest), None);
        let seen = RingSamples {
            user: 2,
            kernel: 4,
            host: 10,
        };
        for (config, freeze, own) in [
            (both, Freeze::Guest, 6),
            (cycles(RawPerfEvtSel::USR), Freeze::Vm, 2),
            (cycles(RawPerfEvtSel::USR), Freeze::Guest, 2),
            (cycles(RawPerfEvtSel::OS), Freeze::Vm, 14),
            (cycles(RawPerfEvtSel::OS), Freeze::Guest, 4),
        ] {
            let mut counter = PortionTime::new(Portion::of(&config, freeze).unwrap());
            counter.note(seen);
            assert_eq!(counter.own(16_000), own * 1000, "{config:?} {freeze:?}");
        }
    }

    #[test]
    fn the_rings_divide_the_clocks_time_and_nothing_is_counted_twice() {
        let (mut user, mut kernel) = (PortionTime::new(USER), PortionTime::new(KERNEL));
        let mut clock = 0;
        for (ns, seen) in [
            (1000, samples(0, 0)),
            (9000, samples(12, 4)),
            (700, samples(0, 0)),
            (4300, samples(0, 16)),
            (100, samples(16, 0)),
        ] {
            clock += ns;
            for counter in [&mut user, &mut kernel] {
                counter.note(seen);
            }
            let both = user.own(clock) + kernel.own(clock);
            assert!(clock == 1000 || clock - both <= 1, "{both} of {clock}");
        }
        // 10,000 of 3 and 1, 5,000 of the kernel alone, 100 of user space.
        assert_eq!((user.own(clock), kernel.own(clock)), (7600, 7500));
    }

    /// A guest spends 100 us in user space and 20 us in the kernel, in turn, and its counter is asked at each change. A time
    /// without a sample of its own must not go to the next sample's ring.
    #[test]
    fn a_short_time_in_the_other_ring_keeps_its_part() {
        for (portion, own) in [(USER, Ring::User), (KERNEL, Ring::Kernel)] {
            let mut counter = PortionTime::new(portion);
            let (mut clock, mut next, mut block, mut taken) = (0, period(0), 0, 0);
            for _ in 0..10_000 {
                for (ring, ns) in [(Ring::User, 100_000), (Ring::Kernel, 20_000)] {
                    clock += ns;
                    while next <= clock {
                        counter.note(match ring {
                            Ring::User => samples(1, 0),
                            Ring::Kernel => samples(0, 1),
                        });
                        taken += 1;
                        block = taken / BLOCK;
                        next += period(block);
                    }
                    counter.own(clock);
                }
            }
            let percent = counter.own(clock) * 100 / clock;
            let right = if own == Ring::User { 82..=84 } else { 15..=17 };
            assert!(
                right.contains(&percent),
                "{own:?}: {percent}, {block} blocks"
            );
        }
    }

    #[test]
    fn a_value_never_falls_and_stays_below_its_overflow() {
        let mut counter = PortionTime::new(USER);
        counter.note(samples(16, 0));
        let time = counter.own(100);
        assert_eq!(counter.give(time), 100);
        // The time since the last block is taken for user space's; then it turns out to be the kernel's.
        let time = counter.own(140);
        assert_eq!(counter.give(time), 140);
        counter.note(samples(0, 16));
        let time = counter.own(150);
        assert_eq!((time, counter.give(time)), (100, 140));
        counter.limit = Some(200);
        assert_eq!(
            [180, 250, 300].map(|events| counter.give(events)),
            [180, 199, 199]
        );
        counter.limit = None;
        assert_eq!(counter.give(300), 300);
    }

    #[test]
    fn a_value_that_stands_still_is_told_unless_the_guest_is_elsewhere() {
        let mut counter = PortionTime::new(USER);
        let mut read = |clock, seen, beyond| {
            counter.note(seen);
            let own = counter.own(clock);
            counter.give(own + beyond);
            counter.stuck_ns(clock)
        };
        assert_eq!(read(1000, samples(16, 0), 0), 0);
        assert_eq!(read(2000, samples(1, 1), 0), 0);
        // As once when a total fell: no time of the guest's comes near that value.
        assert_eq!(read(3000, samples(1, 0), 1 << 62), 0);
        assert_eq!(read(4000, samples(16, 0), 0), 1000);
        assert_eq!(read(9000, samples(16, 4), 0), 6000);
        assert_eq!(read(12_000, samples(0, 16), 0), 0, "in the kernel");
        assert_eq!(read(13_000, samples(0, 0), 0), 1000, "no sampler");
        assert_eq!(read(14_000, samples(3, 0), 0), 2000);
    }

    #[test]
    fn an_overflow_that_is_reported_is_not_taken_back() {
        for repeating in [false, true] {
            let mut counter = PortionTime::new(USER);
            counter.note(samples(1, 0));
            counter.period = 100;
            counter.limit = Some(200);
            let value = counter.own(210);
            assert_eq!(counter.give(value), 199);
            counter.pass(value, 200, repeating);
            // The time since the last sample turns out to be the kernel's.
            counter.note(samples(0, 1));
            let value = counter.own(211);
            assert!(counter.give(value) >= 200, "{repeating}");
        }
    }
}
