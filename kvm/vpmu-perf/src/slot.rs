//! What stands behind a guest's counter, besides its perf event: what it can be, and in which unit it counts.

use std::num::NonZeroU64;

use crate::kernel::Kernel;
use crate::kind::Kind;
use crate::options::Backing;
use crate::pace::FLOOR;
use crate::periods::{ENDLESS, Period};
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
    sampled: Option<Kind>,
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

    /// Samples each `period` of `thread`, at once if the counter `counts`. Returns the number of samples that are kept;
    /// `None`: the kernel refuses.
    pub(crate) fn begin_sampling(
        &mut self,
        kernel: &'static dyn Kernel,
        thread: libc::pid_t,
        period: u64,
        counts: bool,
    ) -> Option<u64> {
        let Some(kind) = self.sampled else {
            return Some(0);
        };
        let sampler = match &mut self.sampler {
            Some(sampler) => sampler,
            sampler => sampler.insert(CounterSampler::open(kernel, kind, thread)?),
        };
        sampler.begin(period, counts)
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
