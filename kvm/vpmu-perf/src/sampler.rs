//! A thread's samples, which the kernel takes by itself, and those of them that become the records of a counter's
//! overflows.
//!
//! A sample of a thread that runs a guest has the guest's address and CPL: KVM tells perf, whose interrupt takes the
//! processor out of the guest and back in, where the guest was. The thread itself does not return from KVM_RUN.
//!
//! The event is never the member of a group: Linux (seen with 6.12) does not begin to sample siblings again once it has
//! throttled them. Nor does the event's total serve for a counter's: while throttled, it counts too little.

use perf_event_open_sys::bindings::{PERF_SAMPLE_IP, PERF_SAMPLE_TIME};
use vpmu::x86::Ring;
use vpmu::x86::pebs::{self, TakenSamples};

use crate::buffer::{CpuMode, PerfRecord, RingBuffer};
use crate::error::PerfError;
use crate::kernel::{Kernel, Linux, PerfEvent};
use crate::kind::{ENDLESS, Kind, probe};
use crate::options::Backing;

/// A perf event of one thread that samples this thread into a ring buffer.
#[derive(Debug)]
pub struct Sampler {
    // Dropped first: an event stays open while it is mapped.
    buffer: RingBuffer,
    event: PerfEvent,
}

impl Sampler {
    /// Makes a sampler of the calling thread's time on the CPU, in its guest and outside. It is stopped. Its buffer has
    /// room for `samples`, or somewhat more.
    ///
    /// # Errors
    ///
    /// Says why perf events are not available, and what to do.
    pub fn of_time(samples: u64) -> Result<Self, PerfError> {
        Self::open(&Linux, probe(Backing::Clock, true), 0, samples)
    }

    /// Makes a sampler of a thread by an event.
    pub(crate) fn open(
        kernel: &'static dyn Kernel,
        kind: Kind,
        thread: libc::pid_t,
        samples: u64,
    ) -> Result<Self, PerfError> {
        let mut attr = kind.attr();
        // The order of a record's fields is that of these bits.
        attr.sample_type = u64::from(PERF_SAMPLE_IP) | u64::from(PERF_SAMPLE_TIME);
        attr.__bindgen_anon_1.sample_period = ENDLESS;
        // Nobody waits for the buffer to fill.
        attr.set_watermark(1);
        attr.__bindgen_anon_2.wakeup_watermark = u32::MAX;
        let event = PerfEvent::of_attr(kernel, attr, thread, None)
            .map_err(|error| PerfError::from_open(&error))?;
        let size = RingBuffer::size_for(samples);
        let buffer = RingBuffer::map(kernel, event.fd(), size).map_err(|error| {
            match error.raw_os_error() {
                Some(libc::EPERM) => PerfError::Locked,
                _ => PerfError::from_open(&error),
            }
        })?;
        Ok(Self { event, buffer })
    }

    /// Returns the number of samples for which the buffer has room.
    pub fn capacity(&self) -> u64 {
        self.buffer.capacity()
    }

    /// Takes the next sample in `period` of the event's units, ns of a clock, and one after each further `period`.
    /// Returns whether the kernel accepts that.
    pub fn set_period(&mut self, period: u64) -> bool {
        self.event.set_period(period.clamp(1, ENDLESS))
    }

    /// Samples from now on, or goes on where [`disable`](Self::disable) has stopped a period.
    pub fn enable(&mut self) -> bool {
        self.event.enable()
    }

    /// Stops sampling. The samples so far stay in the buffer.
    pub fn disable(&mut self) -> bool {
        self.event.disable()
    }

    /// Returns the next record that has not been returned. Reads memory alone where there is none.
    pub fn next_record(&mut self) -> Option<PerfRecord> {
        self.buffer.next()
    }

    /// Returns the host's TSC at a sample's time. `None`: this machine's perf clock is not made of the TSC.
    pub fn tsc(&self, time: u64) -> Option<u64> {
        self.buffer.tsc(time)
    }
}

/// The shortest distance between samples, in the event's units, for each sampler: in a clock's ns less than half of an
/// overflow's ([`FLOOR`](crate::pace::FLOOR)), as a sample takes the processor out of the guest for an interrupt of the
/// host's, and for nothing else.
pub(crate) const SHORTEST: u64 = 20_000;

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
    ) -> Option<Self> {
        Some(Self {
            sampler: Sampler::open(kernel, kind, thread, SAMPLES).ok()?,
            on: false,
        })
    }

    /// Returns whether samples are wanted.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Takes a sample each `period` from now on, at once if the counter `counts`. Returns the number of samples that are
    /// kept; `None`: the kernel refuses.
    pub(crate) fn begin(&mut self, period: u64, counts: bool) -> Option<u64> {
        let sampler = &mut self.sampler;
        sampler.disable();
        // Samples of an earlier period would pass for this one's.
        while sampler.next_record().is_some() {}
        self.on =
            sampler.tsc(0).is_some() && sampler.set_period(period) && (!counts || sampler.enable());
        self.on.then(|| self.sampler.capacity())
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
