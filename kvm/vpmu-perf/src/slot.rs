//! What stands behind a guest's counter, besides its perf event: what it can be, and in which unit it counts.

use std::num::NonZeroU64;

use vpmu::x86::pebs::{self, TakenSamples};

use crate::kernel::Kernel;
use crate::kind::Kind;
use crate::options::Backing;
use crate::pace::FLOOR;
use crate::periods::{ENDLESS, Period};
use crate::portion::{Portion, PortionTime};
use crate::rings::{self, RingSamples};
use crate::sampler::CounterSampler;

/// What a guest's counter can be.
#[derive(Debug)]
pub(crate) enum Slot {
    /// Nothing: it has no perf event.
    Empty,
    /// A counter that counts just what its perf event counts.
    Whole {
        kind: Kind,
        period: Period,
        /// Made when it is first wanted.
        sampler: Option<CounterSampler>,
    },
    /// A counter that has a portion of its clock's time: that of one ring, or the guest's.
    Portion { period: Period, time: PortionTime },
}

impl Slot {
    pub(crate) fn whole(kind: Kind) -> Self {
        Self::Whole {
            kind,
            period: Period::Endless,
            sampler: None,
        }
    }

    pub(crate) fn portion(portion: Portion) -> Self {
        Self::Portion {
            period: Period::Endless,
            time: PortionTime::new(portion),
        }
    }

    pub(crate) fn period(&self) -> Option<Period> {
        match self {
            Self::Empty => None,
            Self::Whole { period, .. } | Self::Portion { period, .. } => Some(*period),
        }
    }

    pub(crate) fn period_mut(&mut self) -> Option<&mut Period> {
        match self {
            Self::Empty => None,
            Self::Whole { period, .. } | Self::Portion { period, .. } => Some(period),
        }
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.period().is_some_and(Period::is_awaited)
    }

    pub(crate) fn is_portion(&self) -> bool {
        matches!(self, Self::Portion { .. })
    }

    pub(crate) fn is_sampled(&self) -> bool {
        matches!(self, Self::Whole { sampler: Some(sampler), .. } if sampler.is_on())
    }

    /// Returns whether no more is asked of the event than its total.
    pub(crate) fn only_counts(&self) -> bool {
        matches!(
            self,
            Self::Whole {
                period: Period::Endless,
                sampler: None,
                ..
            }
        )
    }

    /// Returns the longest period of the event. The samples that divide a clock's time have room for so long.
    pub(crate) fn longest(&self) -> u64 {
        match self.is_portion() {
            true => rings::LONGEST,
            false => ENDLESS,
        }
    }

    /// Notes that the counter overflows when it has counted `events` more than its last value.
    pub(crate) fn expect(&mut self, events: Option<NonZeroU64>) {
        if let Self::Portion { time, .. } = self {
            time.expect(events);
        }
    }

    /// Returns the guest's events that the event's `total` stands for.
    pub(crate) fn value(&mut self, total: u64, units: Units) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Whole { .. } => units.to_guest(total),
            Self::Portion { time, .. } => {
                let own = time.own(total);
                time.give(units.to_guest(own))
            }
        }
    }

    /// Returns the ns for which the last value has stood still although the counter's portion of its clock's time went on, by
    /// which the event's total is `total` now.
    pub(crate) fn stuck_ns(&mut self, total: u64) -> u64 {
        match self {
            Self::Empty | Self::Whole { .. } => 0,
            Self::Portion { time, .. } => time.stuck_ns(total),
        }
    }

    /// Notes samples that show the guest's ring, of time that the counter has counted.
    pub(crate) fn divide(&mut self, samples: RingSamples) {
        if let Self::Portion { time, .. } = self {
            time.note(samples);
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
        let Self::Whole { kind, sampler, .. } = self else {
            return Some(0);
        };
        let sampler = match sampler {
            Some(sampler) => sampler,
            None => sampler.insert(CounterSampler::open(kernel, *kind, thread)?),
        };
        sampler.begin(period, counts)
    }

    /// Stops the sampler, or lets it go on.
    pub(crate) fn run_sampler(&mut self, counts: bool) {
        if let Some(sampler) = self.sampler_mut() {
            sampler.run(counts);
        }
    }

    pub(crate) fn end_sampling(&mut self) {
        if let Some(sampler) = self.sampler_mut() {
            sampler.end();
        }
    }

    pub(crate) fn take_samples(&mut self, samples: &mut [pebs::Sample]) -> TakenSamples {
        match self.sampler_mut() {
            Some(sampler) => sampler.take(samples),
            None => TakenSamples::NONE,
        }
    }

    fn sampler_mut(&mut self) -> Option<&mut CounterSampler> {
        match self {
            Self::Whole { sampler, .. } => sampler.as_mut(),
            Self::Empty | Self::Portion { .. } => None,
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
