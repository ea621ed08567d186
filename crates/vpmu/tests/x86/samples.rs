//! The samples that a host takes of one counter.

use std::collections::VecDeque;

use vpmu::counter::Taken;
use vpmu::x86::pebs::Place;

#[derive(Clone, Debug)]
pub(crate) struct Samples {
    /// The period, and the events to the next sample.
    left: Option<(u64, u64)>,
    kept: VecDeque<Place>,
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
    pub(crate) fn sample(&mut self, times: u64, place: Place, most: u64) {
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

    pub(crate) fn take(&mut self, places: &mut [Place]) -> Taken {
        let number = places.len().min(self.kept.len());
        for (place, sample) in places.iter_mut().zip(self.kept.drain(..number)) {
            *place = sample;
        }
        Taken {
            places: number,
            ended: self.left.is_none(),
            ..Taken::default()
        }
    }
}
