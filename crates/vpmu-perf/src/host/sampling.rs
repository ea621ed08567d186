//! A counter's sampler: the samples that become the records of its overflows.

use std::io;
use std::num::NonZeroU64;

use vpmu::counter::{CounterSet, Taken};
use vpmu::x86::{Ring, pebs};

use super::PerfHost;
use crate::event::Kind;
use crate::ring::{PerfRecord, Place};
use crate::sampler::Sampler;

/// The shortest distance between samples, in the event's units, for each sampler: in a clock's ns less than half of an
/// overflow's ([`PerfHost::FLOOR`]), as a sample takes the processor out of the guest for an
/// interrupt of the host's, and for nothing else.
const FLOOR: u64 = 20_000;

/// The room of a ring: as many samples as Linux's buffer has records of 32 bytes, and a quarter more.
pub(crate) const SAMPLES: u64 = 2560;

/// A sampler beside the event of one counter.
#[derive(Debug)]
pub(super) struct Sampling {
    sampler: Sampler,
    /// Whether samples are wanted.
    on: bool,
}

impl Sampling {
    /// Takes a sample each `period` from now on, at once if the counter `runs`. Makes the sampler unless there is one.
    /// Returns the number of samples that it keeps.
    fn begin(
        place: &mut Option<Self>,
        kind: Kind,
        thread: libc::pid_t,
        period: u64,
        runs: bool,
    ) -> io::Result<u64> {
        let sampling = match place {
            Some(sampling) => sampling,
            None => place.insert(Self {
                sampler: Sampler::open(kind, thread, SAMPLES)?,
                on: false,
            }),
        };
        let sampler = &mut sampling.sampler;
        sampler.disable();
        while sampler.next_record().is_some() {}
        let works =
            sampler.tsc(0).is_some() && sampler.set_period(period) && (!runs || sampler.enable());
        sampling.on = works;
        match works {
            true => Ok(sampling.sampler.capacity()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Stops, or goes on where the period was.
    fn run(&mut self, runs: bool) {
        if self.on {
            self.on = match runs {
                true => self.sampler.enable(),
                false => self.sampler.disable(),
            };
        }
    }

    /// Takes no more samples. The perf event stays, as making one is dear.
    fn end(&mut self) {
        self.run(false);
        self.on = false;
    }

    /// Takes samples of the guest, with the host's TSC.
    fn take(&mut self, places: &mut [pebs::Place]) -> Taken {
        let mut taken = Taken::default();
        while let Some(place) = places.get_mut(taken.places) {
            let sample = match self.sampler.next_record() {
                None => break,
                Some(PerfRecord::Sample(sample)) => sample,
                Some(PerfRecord::Lost(records)) => {
                    taken.lost += records.max(1);
                    continue;
                }
                // A throttled sampler misses periods, and begins anew at any time within a period.
                Some(PerfRecord::Throttle) => {
                    self.end();
                    continue;
                }
                Some(PerfRecord::Unthrottle) => continue,
            };
            let ring = match sample.place {
                Place::GuestUser => Ring::User,
                Place::GuestKernel => Ring::Kernel,
                Place::Host => {
                    taken.outside += 1;
                    continue;
                }
            };
            *place = pebs::Place {
                ip: sample.ip,
                ring,
                tsc: self.sampler.tsc(sample.time).unwrap_or(0),
            };
            taken.places += 1;
        }
        taken.ended = !self.on;
        taken
    }
}

impl PerfHost {
    fn sampling_of(&mut self, counter: u8) -> Option<&mut Sampling> {
        self.slot(counter)?.sampling.as_mut()
    }

    /// Stops the samplers of these counters, or lets them go on: before the counters, both times, so that what a call
    /// takes cancels out.
    pub(super) fn let_sample(&mut self, counters: CounterSet, runs: bool) {
        for counter in counters {
            if let Some(sampling) = self.sampling_of(counter) {
                sampling.run(runs);
            }
        }
    }

    /// Samples where `counter` counts, each `events`. Returns the number of samples that are kept; 0: the period is too
    /// short, or the kernel refuses.
    pub(super) fn begin_sampling(&mut self, counter: u8, events: NonZeroU64) -> u64 {
        let period = self.to_count(events.get());
        let others = (0..).zip(&self.slots).filter(|&(n, slot)| {
            let sampling = slot.as_ref().and_then(|slot| slot.sampling.as_ref());
            n != counter && sampling.is_some_and(|sampling| sampling.on)
        });
        let shortest = FLOOR * (1 + others.count() as u64);
        if !self.sampling || period < shortest {
            return 0;
        }
        let thread = self.notes.target();
        let Some(slot) = self.slot(counter) else {
            return 0;
        };
        let Some(kind) = slot.samples else {
            return 0;
        };
        let begun = Sampling::begin(&mut slot.sampling, kind, thread, period, slot.running);
        // What the kernel refuses, it refuses again.
        self.sampling = begun.is_ok();
        begun.unwrap_or(0)
    }

    pub(super) fn end_sampling(&mut self, counter: u8) {
        if let Some(sampling) = self.sampling_of(counter) {
            sampling.end();
        }
    }

    pub(super) fn taken(&mut self, counter: u8, places: &mut [pebs::Place]) -> Taken {
        match self.sampling_of(counter) {
            Some(sampling) => sampling.take(places),
            None => Taken {
                ended: true,
                ..Taken::default()
            },
        }
    }
}
