//! Counters of one ring, where only a clock counts.
//!
//! A clock knows a thread's time, and not the CPL of its guest. The samples of a [`Sampler`] beside it tell the ring that
//! the guest was in, and so the counter's part of the time that its clock has counted. How much time there is to
//! divide is the clock's to say, and not the number of samples, so the counters of both rings add up to the clock's.
//!
//! A counter that is to overflow kicks the vCPU when its time could be up at the earliest: if the guest were in its
//! ring all the time. If it was not, the rest is waited for, and so on. The overflow is reported only while the guest
//! is in the counter's ring. Until then reads show the last value before it, and the time beyond is carried on.
//! So no interrupt of a counter of user space finds its guest in the kernel, whose addresses it could tell.

use std::fmt;
use std::num::NonZeroU64;

use vpmu::counter::Lost;
use vpmu::x86::{CounterConfig, Ring};

use super::PerfHost;
use super::slot::Slot;
use super::units::to_events;
use crate::choose::Backing;
use crate::event::ENDLESS;
use crate::ring::{PerfRecord, Place};
use crate::sampler::Sampler;

/// ns between two samples. No divisor of a guest's tick, which would be sampled always or never.
const PERIOD: u64 = 94_603;
/// The same for the first [`EARLY`] samples, for commands that are over soon.
const EARLY_PERIOD: u64 = 47_303;
const EARLY: u64 = 64;
/// The longest ns between two looks at the samples, for which their memory has room.
const LOOK: u64 = 20_000_000;
/// The longest wait for the guest's return to a ring, as a multiple of [`PerfHost::FLOOR`].
const PATIENCE: u64 = 4;
/// So many samples of a thread that runs a guest, and none in the guest: this machine does not tell.
const BLIND: u64 = 256;

/// Tells the ring in which the guest of a thread that does not run it was last, if that is known.
#[derive(Default)]
pub(super) struct Whereabouts(Option<Box<dyn Fn() -> Option<Ring> + Send>>);

impl fmt::Debug for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Whereabouts")
            .field(&self.0.is_some())
            .finish()
    }
}

/// Samples in a ring, and in all.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    own: u64,
    all: u64,
}

impl Seen {
    /// Returns the own part of `time`, or `None` without a sample.
    fn part(self, time: u64) -> Option<u64> {
        let own = u128::from(time) * u128::from(self.own);
        own.checked_div(u128::from(self.all)).map(|own| own as u64)
    }
}

/// The part of a clock's time that a counter of one ring has.
#[derive(Debug)]
pub(super) struct Share {
    ring: Ring,
    /// The clock's total up to the last sample that was looked at, ns, and the ring's part of it.
    clock: u64,
    own: u64,
    /// Samples since then.
    fresh: Seen,
    /// Samples up to then.
    before: Seen,
    /// The last value given, in the guest's events.
    given: u64,
    /// The value that is an overflow, which is not given before it is reported.
    limit: Option<u64>,
    /// Events from one overflow to the next, where a period repeats.
    period: u64,
    /// ns of the last wait for the guest's return to the ring.
    wait: u64,
}

impl Share {
    fn new(ring: Ring) -> Self {
        Self {
            ring,
            clock: 0,
            own: 0,
            fresh: Seen::default(),
            before: Seen::default(),
            given: 0,
            limit: None,
            period: 1,
            wait: 0,
        }
    }

    /// Takes samples of the time that the counter's clock has counted.
    fn note(&mut self, taken: Taken) {
        self.fresh.all += taken.user + taken.kernel;
        self.fresh.own += match self.ring {
            Ring::User => taken.user,
            Ring::Kernel => taken.kernel,
        };
    }

    /// Returns the ring's ns of `total`, the clock's. The time since the last sample is divided as the time before.
    fn time(&mut self, total: u64) -> u64 {
        let since = total.wrapping_sub(self.clock);
        if let Some(own) = self.fresh.part(since) {
            self.own = self.own.wrapping_add(own);
            self.clock = total;
            self.before.own += self.fresh.own;
            self.before.all += self.fresh.all;
            self.fresh = Seen::default();
            return self.own;
        }
        self.own.wrapping_add(self.before.part(since).unwrap_or(0))
    }

    /// Returns the counter's value, which never falls, for `events` of the guest's so far.
    fn give(&mut self, events: u64) -> u64 {
        let most = self.limit.map_or(u64::MAX, |limit| limit - 1);
        self.given = self.given.max(events.min(most));
        self.given
    }

    /// Takes note that `value` has reached `limit`, which is reported.
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

/// Samples that were looked at together.
#[derive(Clone, Copy, Debug, Default)]
struct Taken {
    user: u64,
    kernel: u64,
}

/// The samples of the host's thread.
#[derive(Debug)]
pub(super) struct Watch {
    sampler: Sampler,
    /// The guest's ring at the last sample in the guest.
    last: Option<Ring>,
    taken: u64,
    early: bool,
}

impl Watch {
    fn new() -> Result<Self, Lost> {
        let mut sampler = Sampler::of_time(2 * LOOK / EARLY_PERIOD).map_err(|_| Lost::Failed)?;
        match sampler.set_period(EARLY_PERIOD) && sampler.enable() {
            true => Ok(Self {
                sampler,
                last: None,
                taken: 0,
                early: true,
            }),
            false => Err(Lost::Failed),
        }
    }

    fn take(&mut self) -> Taken {
        let mut taken = Taken::default();
        while let Some(record) = self.sampler.next_record() {
            // Samples that were not taken or not kept have no part in the division.
            let PerfRecord::Sample(sample) = record else {
                continue;
            };
            match sample.place {
                Place::GuestUser => {
                    taken.user += 1;
                    self.last = Some(Ring::User);
                }
                Place::GuestKernel => {
                    taken.kernel += 1;
                    self.last = Some(Ring::Kernel);
                }
                // The host works for the guest's kernel: what leaves the guest is privileged, as a rule.
                Place::Host => taken.kernel += 1,
            }
            self.taken = self.taken.saturating_add(1);
        }
        if self.early && self.taken >= EARLY {
            self.early = !self.sampler.set_period(PERIOD);
        }
        taken
    }

    /// Returns whether this machine does not tell where the guest is.
    fn is_blind(&self) -> bool {
        self.last.is_none() && self.taken >= BLIND
    }
}

impl PerfHost {
    /// Has the host ask `ring` for the ring in which the guest was when it last ran, where a counter of one ring is to
    /// overflow. The thread does not run the guest meanwhile. Without it, the last sample is believed, which is some 50
    /// microseconds old.
    pub fn set_ring(&mut self, ring: impl Fn() -> Option<Ring> + Send + 'static) {
        self.whereabouts = Whereabouts(Some(Box::new(ring)));
    }

    /// Returns the share of a counter of one ring, which needs one where a clock counts.
    pub(super) fn share(&mut self, config: &CounterConfig) -> Result<Option<Share>, Lost> {
        let ring = match (config.user, config.kernel) {
            (true, false) => Ring::User,
            (false, true) => Ring::Kernel,
            _ => return Ok(None),
        };
        if self.chooser.backing != Backing::Clock {
            return Ok(None);
        }
        if self.watch.is_none() {
            self.watch = Some(Watch::new()?);
        }
        Ok(Some(Share::new(ring)))
    }

    pub(super) fn has_share(&self, counter: u8) -> bool {
        let slot = self
            .slots
            .get(usize::from(counter))
            .and_then(Option::as_ref);
        slot.is_some_and(|slot| slot.share.is_some())
    }

    /// Stops the samples unless a counter needs them.
    pub(super) fn end_watch(&mut self) {
        let needed = |slot: &Slot| slot.share.is_some();
        if !self.slots.iter().flatten().any(needed) {
            self.watch = None;
        }
    }

    /// Hands the samples so far to the counters that have counted since the last look. Called before any counter
    /// starts or stops.
    pub(super) fn look(&mut self) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let taken = watch.take();
        for slot in self.slots.iter_mut().flatten().filter(|slot| slot.running) {
            if let Some(share) = &mut slot.share {
                share.note(taken);
            }
        }
    }

    /// Returns the guest's events that the last total of `counter` stands for.
    pub(super) fn value(&mut self, counter: u8) -> u64 {
        let hz = self.tsc_hz;
        let Some(slot) = self.slot(counter) else {
            return 0;
        };
        let total = slot.total;
        match &mut slot.share {
            Some(share) => {
                let time = share.time(total);
                share.give(to_events(time, hz))
            }
            None => self.to_guest(total),
        }
    }

    /// Notes that the counter overflows when it has counted `events` more than its last value.
    pub(super) fn expect(&mut self, counter: u8, events: Option<NonZeroU64>) {
        if let Some(share) = self.slot(counter).and_then(|slot| slot.share.as_mut()) {
            // No counter of the guest's has 2^63 events.
            share.period = events.map_or(1, NonZeroU64::get);
            share.limit = events.map(|_| share.given.saturating_add(share.period));
        }
    }

    /// Gives the clock of a counter of one ring, which starts, a period after which its samples are looked at.
    pub(super) fn look_at_times(&mut self, counter: u8) {
        if let Some(slot) = self.slot(counter).filter(|slot| slot.share.is_some())
            && slot.endless
        {
            slot.endless = !slot.event.set_period(LOOK);
        }
    }

    /// Returns the longest period of a counter's clock.
    pub(super) fn longest(slot: &Slot) -> u64 {
        if slot.share.is_some() { LOOK } else { ENDLESS }
    }

    /// The clock of a counter of one ring has reached its period. Returns whether that is an overflow.
    pub(super) fn is_up(&mut self, counter: u8) -> bool {
        self.look();
        let (hz, repeating) = (self.tsc_hz, self.repeating);
        let Some(slot) = self.slot(counter) else {
            return false;
        };
        if let Ok(total) = slot.event.read() {
            slot.take(total);
        }
        let (total, armed) = (slot.total, slot.armed);
        let Some(share) = &mut slot.share else {
            return false;
        };
        let value = to_events(share.time(total), hz);
        let Some(limit) = share.limit.filter(|_| armed) else {
            return false;
        };
        let ring = share.ring;
        if value < limit {
            let rest = self.to_count(limit - value);
            self.wait(counter, rest.min(LOOK));
            return false;
        }
        let told = self.whereabouts.0.as_ref().and_then(|ring| ring());
        let here = told.or(self.watch.as_ref().and_then(|watch| watch.last));
        let Some(share) = self.slot(counter).and_then(|slot| slot.share.as_mut()) else {
            return false;
        };
        if here.is_some_and(|here| here != ring) {
            share.wait = (2 * share.wait).clamp(Self::FLOOR, PATIENCE * Self::FLOOR);
            let wait = share.wait;
            self.wait(counter, wait);
            return false;
        }
        share.pass(value, limit, repeating);
        true
    }

    /// Sets the clock's next period.
    fn wait(&mut self, counter: u8, ns: u64) {
        let ns = ns.max(self.floor());
        if let Some(slot) = self.slot(counter) {
            slot.event.set_period(ns);
            slot.endless = false;
        }
    }

    /// Returns whether the counter counts nothing, as nothing tells the guest's ring.
    pub(super) fn is_blind(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_blind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(user: u64, kernel: u64) -> Taken {
        Taken { user, kernel }
    }

    #[test]
    fn the_rings_divide_the_clocks_time_and_nothing_is_counted_twice() {
        let (mut user, mut kernel) = (Share::new(Ring::User), Share::new(Ring::Kernel));
        let mut clock = 0;
        for (ns, samples) in [
            (1000, taken(0, 0)),
            (9000, taken(3, 1)),
            (700, taken(0, 0)),
            (4300, taken(0, 2)),
            (100, taken(1, 0)),
        ] {
            clock += ns;
            for share in [&mut user, &mut kernel] {
                share.note(samples);
            }
            let both = user.time(clock) + kernel.time(clock);
            assert!(clock == 1000 || clock - both <= 1, "{both} of {clock}");
        }
        // 10,000 of 3 and 1, 5,000 of the kernel alone, 100 of user space.
        assert_eq!((user.time(clock), kernel.time(clock)), (7600, 7500));
    }

    #[test]
    fn a_value_never_falls_and_stays_below_its_overflow() {
        let mut share = Share::new(Ring::User);
        share.note(taken(1, 0));
        let time = share.time(100);
        assert_eq!(share.give(time), 100);
        // The time since is taken for user space's; then it turns out to be the kernel's.
        let time = share.time(140);
        assert_eq!(share.give(time), 140);
        share.note(taken(0, 1));
        let time = share.time(150);
        assert_eq!((time, share.give(time)), (100, 140));
        share.limit = Some(200);
        assert_eq!(
            [180, 250, 300].map(|events| share.give(events)),
            [180, 199, 199]
        );
        share.limit = None;
        assert_eq!(share.give(300), 300);
    }

    #[test]
    fn an_overflow_that_is_reported_is_not_taken_back() {
        for repeating in [false, true] {
            let mut share = Share::new(Ring::User);
            share.note(taken(1, 0));
            share.period = 100;
            share.limit = Some(200);
            let value = share.time(210);
            assert_eq!(share.give(value), 199);
            share.pass(value, 200, repeating);
            // The time since the last sample turns out to be the kernel's.
            share.note(taken(0, 1));
            let value = share.time(211);
            assert!(share.give(value) >= 200, "{repeating}");
        }
    }
}
