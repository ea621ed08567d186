//! What stands behind a guest's counter, besides its perf event.

use std::io;
use std::num::NonZeroU64;

use vpmu::counter::TakenSamples;
use vpmu::x86::pebs;

use crate::event::{ENDLESS, Kind};
use crate::kernel::Kernel;
use crate::periods::Period;
use crate::rings::{self, Part, PartTime, RingSamples};
use crate::samplers::CounterSampler;
use crate::units::Units;

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
    /// A counter that has a part of its clock's time: that of one ring, or the guest's.
    Part { period: Period, time: PartTime },
}

impl Slot {
    pub(crate) fn whole(kind: Kind) -> Self {
        Self::Whole {
            kind,
            period: Period::Endless,
            sampler: None,
        }
    }

    pub(crate) fn part(part: Part) -> Self {
        Self::Part {
            period: Period::Endless,
            time: PartTime::new(part),
        }
    }

    pub(crate) fn period(&self) -> Option<Period> {
        match self {
            Self::Empty => None,
            Self::Whole { period, .. } | Self::Part { period, .. } => Some(*period),
        }
    }

    pub(crate) fn period_mut(&mut self) -> Option<&mut Period> {
        match self {
            Self::Empty => None,
            Self::Whole { period, .. } | Self::Part { period, .. } => Some(period),
        }
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.period().is_some_and(Period::is_awaited)
    }

    pub(crate) fn is_part(&self) -> bool {
        matches!(self, Self::Part { .. })
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
        match self.is_part() {
            true => rings::LONGEST,
            false => ENDLESS,
        }
    }

    /// Notes that the counter overflows when it has counted `events` more than its last value.
    pub(crate) fn expect(&mut self, events: Option<NonZeroU64>) {
        if let Self::Part { time, .. } = self {
            time.expect(events);
        }
    }

    /// Returns the guest's events that the event's `total` stands for.
    pub(crate) fn value(&mut self, total: u64, units: Units) -> u64 {
        match self {
            Self::Empty => 0,
            Self::Whole { .. } => units.to_guest(total),
            Self::Part { time, .. } => time.value(total, units),
        }
    }

    /// Notes samples that tell the guest's ring, of time that the counter has counted.
    pub(crate) fn divide(&mut self, samples: RingSamples) {
        if let Self::Part { time, .. } = self {
            time.note(samples);
        }
    }

    /// Samples each `period` of `thread`, at once if the counter `counts`. Returns the number of samples that are kept.
    pub(crate) fn begin_sampling(
        &mut self,
        kernel: &'static dyn Kernel,
        thread: libc::pid_t,
        period: u64,
        counts: bool,
    ) -> io::Result<u64> {
        let Self::Whole { kind, sampler, .. } = self else {
            return Ok(0);
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
            None => TakenSamples {
                ended: true,
                ..TakenSamples::default()
            },
        }
    }

    fn sampler_mut(&mut self) -> Option<&mut CounterSampler> {
        match self {
            Self::Whole { sampler, .. } => sampler.as_mut(),
            Self::Empty | Self::Part { .. } => None,
        }
    }
}
