//! A counter's sampler: the samples that become the records of its overflows.

use std::io;

use vpmu::counter::TakenSamples;
use vpmu::x86::{Ring, pebs};

use crate::buffer::{CpuMode, PerfRecord};
use crate::event::Kind;
use crate::kernel::Kernel;
use crate::sampler::Sampler;

/// The shortest distance between samples, in the event's units, for each sampler: in a clock's ns less than half of an
/// overflow's ([`FLOOR`](crate::pace::FLOOR)), as a sample takes the processor out of the guest for an interrupt of the
/// host's, and for nothing else.
pub(crate) const FLOOR: u64 = 20_000;

/// The room of a buffer: as many samples as Linux's buffer has records of 32 bytes, and a quarter more.
pub(crate) const SAMPLES: u64 = 2560;

/// A sampler beside the event of one counter.
#[derive(Debug)]
pub(crate) struct CounterSampler {
    sampler: Sampler,
    /// Whether samples are wanted.
    on: bool,
}

impl CounterSampler {
    /// Makes a sampler that takes no samples yet.
    pub(crate) fn open(
        kernel: &'static dyn Kernel,
        kind: Kind,
        thread: libc::pid_t,
    ) -> io::Result<Self> {
        Ok(Self {
            sampler: Sampler::open(kernel, kind, thread, SAMPLES)?,
            on: false,
        })
    }

    /// Returns whether samples are wanted.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Takes a sample each `period` from now on, at once if the counter `counts`. Returns the number of samples that are
    /// kept.
    pub(crate) fn begin(&mut self, period: u64, counts: bool) -> io::Result<u64> {
        let sampler = &mut self.sampler;
        sampler.disable();
        while sampler.next_record().is_some() {}
        self.on =
            sampler.tsc(0).is_some() && sampler.set_period(period) && (!counts || sampler.enable());
        match self.on {
            true => Ok(self.sampler.capacity()),
            false => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Stops, or goes on where the period was.
    pub(crate) fn run(&mut self, counts: bool) {
        if self.on {
            self.on = match counts {
                true => self.sampler.enable(),
                false => self.sampler.disable(),
            };
        }
    }

    /// Takes no more samples. The perf event stays, as making one is dear.
    pub(crate) fn end(&mut self) {
        self.run(false);
        self.on = false;
    }

    /// Takes samples of the guest, with the host's TSC.
    pub(crate) fn take(&mut self, samples: &mut [pebs::Sample]) -> TakenSamples {
        let mut taken = TakenSamples::default();
        while let Some(slot) = samples.get_mut(taken.samples) {
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
            let ring = match sample.mode {
                CpuMode::GuestUser => Ring::User,
                CpuMode::GuestKernel => Ring::Kernel,
                CpuMode::Host => {
                    taken.outside += 1;
                    continue;
                }
            };
            *slot = pebs::Sample {
                ip: sample.ip,
                ring,
                tsc: self.sampler.tsc(sample.time).unwrap_or(0),
            };
            taken.samples += 1;
        }
        taken.ended = !self.on;
        taken
    }
}
