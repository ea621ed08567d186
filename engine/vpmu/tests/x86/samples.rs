//! The samples that a host takes of one counter.

use std::collections::VecDeque;

use vpmu::x86::pebs::{Sample, TakenSamples};

#[derive(Clone, Debug)]
pub(crate) struct Samples {
    /// The period, and the events to the next sample.
    left: Option<(u64, u64)>,
    kept: VecDeque<Sample>,
}

impl Samples {
    pub(crate) fn every(period: Option<u64>) -> Self {
        Self {
            left: period.map(|period| (period, period)),
            kept: VecDeque::new(),
        }
    }

    pub(crate) fn period(&self) -> Option<u64> {
        self.left.map(|(period, _)| period)
    }

    pub(crate) fn end(&mut self) {
        self.left = None;
    }

    /// Samples `times` events at `place`, and keeps up to `most` samples.
    pub(crate) fn sample(&mut self, times: u64, place: Sample, most: u64) {
        let Some((period, left)) = &mut self.left else {
            return;
        };
        let mut times = times;
        while *left <= times {
            times -= *left;
            *left = *period;
            if (self.kept.len() as u64) < most {
                self.kept.push_back(place);
            }
        }
        *left -= times;
    }

    pub(crate) fn take(&mut self, samples: &mut [Sample]) -> TakenSamples {
        let number = samples.len().min(self.kept.len());
        for (place, sample) in samples.iter_mut().zip(self.kept.drain(..number)) {
            *place = sample;
        }
        TakenSamples {
            samples: number,
            ended: self.left.is_none(),
            ..TakenSamples::default()
        }
    }
}
