//! What stands behind a guest's counter, besides its perf event: what it can be, in which unit it counts, and what is asked
//! of its overflows.
//!
//! # One-shot reports from periodic events
//!
//! The engine asks for one report, but a perf event overflows again and again. Stopping the event after the first
//! overflow (PERF_EVENT_IOC_REFRESH) would stop its counting too, and would cost a system call to undo. So the event
//! continues. The guest's handler usually gives it another period at once. Only if a second overflow comes that
//! nobody waits for is the period made endless.

use std::num::NonZeroU64;

use vpmu::counter::Report;

use crate::kind::{ENDLESS, Kind};
use crate::options::Backing;
use crate::pace::FLOOR;
use crate::portion::{Portion, PortionTime};
use crate::sampler::CounterSampler;

/// What stands behind a guest's counter. The default is that of a counter without a perf event.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    pub(crate) period: Period,
    /// Of a counter that has a portion of its clock's time: that of one ring, or the guest's. Any other counts just what
    /// its perf event counts.
    pub(crate) portion: Option<PortionTime>,
    /// What its samples are taken of. `None`: a portion, which has none.
    pub(crate) sampled: Option<Kind>,
    /// Made when it is first wanted.
    pub(crate) sampler: Option<CounterSampler>,
}

impl Slot {
    pub(crate) fn new(kind: Kind, portion: Option<Portion>) -> Self {
        Self {
            portion: portion.map(PortionTime::new),
            sampled: portion.is_none().then_some(kind),
            ..Self::default()
        }
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.period.is_awaited()
    }

    pub(crate) fn is_portion(&self) -> bool {
        self.portion.is_some()
    }

    pub(crate) fn is_sampled(&self) -> bool {
        self.sampler.as_ref().is_some_and(CounterSampler::is_on)
    }

    /// Returns whether no more is asked of the event than its total.
    pub(crate) fn only_counts(&self) -> bool {
        self.period == Period::Endless && self.portion.is_none() && self.sampler.is_none()
    }

    /// Returns the guest's events that the event's `total` stands for.
    pub(crate) fn value(&mut self, total: u64, units: Units) -> u64 {
        match &mut self.portion {
            None => units.to_guest(total),
            Some(time) => {
                let own = time.own(total);
                time.give(units.to_guest(own))
            }
        }
    }
}

const NS: u64 = 1_000_000_000;

/// The relation of the guest's events to what a perf event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Units {
    /// The perf event counts the guest's events.
    Events,
    /// The perf event counts ns, the guest's event cycles at so many Hz.
    Cycles(u64),
}

impl Units {
    pub(crate) fn new(backing: Backing, tsc_hz: u64) -> Self {
        match backing {
            Backing::Hardware => Self::Events,
            Backing::Clock => Self::Cycles(tsc_hz),
        }
    }

    /// Converts the guest's `events` to the perf event's unit, rounded up.
    pub(crate) fn to_count(self, events: u64) -> u64 {
        match self {
            Self::Events => events,
            Self::Cycles(hz) => {
                let ns = u128::from(events) * u128::from(NS);
                // Rounded up, because a report that comes early vouches for events that have not been.
                u64::try_from(ns.div_ceil(u128::from(hz))).unwrap_or(ENDLESS)
            }
        }
    }

    /// Returns the period of the perf event for so many of the guest's events, while `sharing` counters wait for
    /// overflows and nothing but the period bounds these.
    pub(crate) fn period(self, events: NonZeroU64, sharing: u64) -> u64 {
        self.to_count(events.get()).clamp(FLOOR * sharing, ENDLESS)
    }

    /// Converts the perf event's count to the guest's events. The product is taken modulo 2^64, as every total.
    pub(crate) fn to_guest(self, count: u64) -> u64 {
        match self {
            Self::Events => count,
            // A product of 128 bits: ns of a day by GHz have more than 64.
            Self::Cycles(hz) => (u128::from(count) * u128::from(hz) / u128::from(NS)) as u64,
        }
    }

    /// Converts the perf event's count to the guest's events, rounded up.
    pub(crate) fn to_guest_up(self, count: u64) -> u64 {
        match self {
            Self::Events => count,
            Self::Cycles(hz) => {
                let cycles = u128::from(count) * u128::from(hz);
                u64::try_from(cycles.div_ceil(u128::from(NS))).unwrap_or(ENDLESS)
            }
        }
    }
}

/// The period of one counter's perf event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Period {
    /// Nobody waits for an overflow, and the event's period is endless.
    #[default]
    Endless,
    /// Nobody waits for an overflow, but the event still has a period.
    Stale,
    /// A report is wanted after so many of the guest's events, from the moment on when the counter goes on. Only then is
    /// it known how many events share the processor. `stale`: the event still has an earlier period.
    Planned { events: NonZeroU64, stale: bool },
    /// A report is wanted. The event has `period`, in its own unit, for so many of the guest's events. `certain`: no
    /// signal of an earlier period could come any more when the period was set.
    Set {
        events: NonZeroU64,
        period: u64,
        certain: bool,
    },
}

/// What a signalled overflow means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// The report that the engine waits for.
    Report(Report),
    /// Nobody waited for it. The event's period is to be made endless.
    Unwanted,
    /// The last overflow of a period that has been replaced since.
    Late,
}

impl Period {
    /// Returns whether a report is wanted.
    pub(crate) const fn is_awaited(self) -> bool {
        matches!(self, Self::Planned { .. } | Self::Set { .. })
    }

    /// Returns the guest's events of a report that is wanted and has still to be asked for.
    pub(crate) const fn planned(self) -> Option<NonZeroU64> {
        match self {
            Self::Planned { events, .. } => Some(events),
            _ => None,
        }
    }

    /// Replaces the wish of a counter that stands still: the event is set when the counter goes on.
    pub(crate) fn plan(&mut self, events: Option<NonZeroU64>) {
        let stale = match *self {
            Self::Endless => false,
            Self::Planned { stale, .. } => stale,
            Self::Stale | Self::Set { .. } => true,
        };
        *self = match events {
            Some(events) => Self::Planned { events, stale },
            None if stale => Self::Stale,
            None => Self::Endless,
        };
    }

    /// No report is wanted of a counter that counts. A signal that comes all the same is ignored, and is the last.
    pub(crate) fn drop_wish(&mut self) {
        if self.is_awaited() {
            *self = Self::Stale;
        }
    }

    /// Takes the counter's overflow, which has been signalled. `repeating`: the period goes on after its report.
    pub(crate) fn overflow(&mut self, repeating: bool) -> Overflow {
        match self {
            Self::Set { certain, .. } => {
                let report = match *certain {
                    true => Report::Due,
                    false => Report::Unsure,
                };
                // The engine reads an event whose report is not certain, and then knows where its period stands.
                *certain = true;
                self.pass(repeating);
                Overflow::Report(report)
            }
            Self::Stale => Overflow::Unwanted,
            Self::Endless | Self::Planned { .. } => Overflow::Late,
        }
    }

    /// The report that was wanted is made, although its signal may still come. That signal, which nobody can tell from the
    /// next period's, vouches for nothing.
    pub(crate) fn doubt(&mut self, repeating: bool) {
        if let Self::Set { certain, .. } = self {
            *certain = false;
        }
        self.pass(repeating);
    }

    /// The report that was wanted is made.
    pub(crate) fn pass(&mut self, repeating: bool) {
        if !repeating && matches!(self, Self::Set { .. }) {
            *self = Self::Stale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: Period = Period::Set {
        events: NonZeroU64::MIN,
        period: 50_000,
        certain: true,
    };

    #[test]
    fn a_signal_that_may_be_of_a_report_made_before_vouches_for_nothing() {
        let mut period = SET;
        period.doubt(true);
        assert_eq!(period.overflow(true), Overflow::Report(Report::Unsure));
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
    }

    #[test]
    fn a_report_is_made_once_unless_the_period_repeats() {
        let mut period = SET;
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
        assert_eq!(period.overflow(false), Overflow::Report(Report::Due));
        // The second overflow that nobody waits for is the last.
        assert_eq!(period.overflow(false), Overflow::Unwanted);
        assert!(!period.is_awaited());
    }

    #[test]
    fn only_a_first_report_is_doubted() {
        let mut period = Period::Set {
            events: NonZeroU64::MIN,
            period: 1,
            certain: false,
        };
        assert_eq!(period.overflow(true), Overflow::Report(Report::Unsure));
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
    }

    #[test]
    fn a_wish_that_is_taken_back_leaves_the_event_as_it_was() {
        for (before, after) in [(Period::Endless, Period::Endless), (SET, Period::Stale)] {
            let mut period = before;
            period.plan(NonZeroU64::new(5));
            assert_eq!(period.planned(), NonZeroU64::new(5));
            // A signal while the counter stands still is of no period that is wanted.
            assert_eq!(period.overflow(true), Overflow::Late);
            period.plan(None);
            assert_eq!(period, after);
        }
        let mut period = SET;
        period.drop_wish();
        assert_eq!(period, Period::Stale);
    }
}
