//! What a PMU with PEBS asks of its host: the guest that a record tells of, and samples that the kernel takes.

use std::fmt::Debug;
use std::num::NonZeroU64;

use vpmu::counter::{Counter, TakenSamples};
use vpmu::x86::pebs::{Fault, Guest, Sample};

use super::PerfHost;
use crate::samplers;
use crate::slot::Slot;

/// The guest of a host's thread, as PEBS records tell of it.
pub trait SampledGuest: Guest + Debug + Send {
    /// Forgets what the guest's registers and memory held, because the guest may run.
    fn forget(&mut self);

    /// Returns the guest's TSC less the host's, modulo 2^64.
    ///
    /// # Errors
    ///
    /// When the guest's cannot be read.
    fn tsc_offset(&mut self) -> Result<u64, Fault>;
}

impl PerfHost {
    /// Sets the guest that PEBS records tell of, and whose memory has them. Without it every record is lost.
    pub fn set_guest(&mut self, guest: impl SampledGuest + 'static) {
        self.guest = Some(Box::new(guest));
    }

    /// Samples where `counter` counts, each `events`. Returns the number of samples that are kept; 0: the period is too
    /// short, or the kernel refuses.
    pub(super) fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        let period = self.units.to_count(events.get());
        let others = self.which(Slot::is_sampled) - counter.alone();
        let shortest = samplers::FLOOR * u64::from(1 + others.len());
        if !self.sampling || period < shortest {
            return 0;
        }
        let (thread, counts) = (self.notes.target(), self.events.counts(counter));
        let begun = self.slots[counter].begin_sampling(self.kernel, thread, period, counts);
        // What the kernel refuses, it refuses again.
        self.sampling = begun.is_ok();
        begun.unwrap_or(0)
    }

    /// Moves samples of `counter` into `samples`. They have the guest's time, or the host's where no guest is set.
    pub(super) fn take_guest_samples(
        &mut self,
        counter: Counter,
        samples: &mut [Sample],
    ) -> TakenSamples {
        let mut taken = self.slots[counter].take_samples(samples);
        let Some(guest) = self.guest.as_mut().filter(|_| taken.samples != 0) else {
            return taken;
        };
        // A record without the guest's time would be sorted wrongly among those with it: better none.
        let Ok(offset) = guest.tsc_offset() else {
            taken.lost += taken.samples as u64;
            taken.samples = 0;
            return taken;
        };
        for sample in &mut samples[..taken.samples] {
            sample.tsc = sample.tsc.wrapping_add(offset);
        }
        taken
    }
}
