//! The ring that the guest is in, as far as it can be known while its thread does not run it.
//!
//! The VMM knows it, and may be [asked](crate::SampledGuest::ring) at a cost. perf's samples of the thread know where the guest was some
//! 50 microseconds ago, and [all of them together](RingSampler) for which portion of the time it was in each ring.

use vpmu::counter::Lost;
use vpmu::x86::Ring;

use crate::buffer::{CpuMode, PerfRecord};
use crate::kernel::Kernel;
use crate::kind::probe;
use crate::options::Backing;
use crate::sampler::Sampler;

/// So many samples divide the time between the first and the last of them. By fewer, the host's and the guest's short time
/// behind each overflow would nearly always go to the ring of the sample that comes next.
pub(crate) const BLOCK: u64 = 16;
/// ns between two samples, another for each block in turn. A guest that is interrupted as often as it is sampled, by its tick or
/// by the counter's own overflows, would be seen in one ring only; no guest keeps step with all of them.
const PERIODS: [u64; 5] = [94_603, 61_843, 126_011, 78_203, 110_321];
/// The same for the first blocks, for commands that are over soon.
const EARLY_PERIODS: [u64; 4] = [47_303, 38_011, 56_713, 43_003];
const SHORTEST: u64 = EARLY_PERIODS[1];
/// The longest ns between two times that the samples are taken, for which their memory has room.
pub(crate) const LONGEST: u64 = 20_000_000;
/// So many samples of a thread that runs a guest, and none in the guest: this machine's samples never show the guest.
const BLIND: u64 = 256;

/// Samples that were taken together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RingSamples {
    pub(crate) user: u64,
    pub(crate) kernel: u64,
    pub(crate) host: u64,
}

/// Returns the ns between two samples of this block.
pub(crate) fn period(block: u64) -> u64 {
    let early = EARLY_PERIODS.get(usize::try_from(block).unwrap_or(usize::MAX));
    let later = (block % PERIODS.len() as u64) as usize;
    *early.unwrap_or(&PERIODS[later])
}

/// The samples of a thread that show its guest's ring.
#[derive(Debug)]
pub(crate) struct RingSampler {
    sampler: Sampler,
    /// The guest's ring at the last sample in the guest.
    last: Option<Ring>,
    taken: u64,
    /// The blocks of samples so far.
    blocks: u64,
}

impl RingSampler {
    /// Samples the thread from now on.
    pub(crate) fn start(kernel: &'static dyn Kernel, thread: libc::pid_t) -> Result<Self, Lost> {
        let most = 2 * LONGEST / SHORTEST;
        let time = probe(Backing::Clock, true);
        let mut sampler = Sampler::open(kernel, time, thread, most).map_err(|_| Lost::Failed)?;
        match sampler.set_period(period(0)) && sampler.enable() {
            true => Ok(Self {
                sampler,
                last: None,
                taken: 0,
                blocks: 0,
            }),
            false => Err(Lost::Failed),
        }
    }

    /// Takes the samples since the last time.
    pub(crate) fn take(&mut self) -> RingSamples {
        let mut samples = RingSamples::default();
        while let Some(record) = self.sampler.next_record() {
            // Samples that were not taken or not kept do not enter into the division.
            let PerfRecord::Sample(sample) = record else {
                continue;
            };
            match sample.mode {
                CpuMode::GuestUser => {
                    samples.user += 1;
                    self.last = Some(Ring::User);
                }
                CpuMode::GuestKernel => {
                    samples.kernel += 1;
                    self.last = Some(Ring::Kernel);
                }
                CpuMode::Host => samples.host += 1,
            }
            self.taken = self.taken.saturating_add(1);
        }
        let blocks = self.taken / BLOCK;
        if blocks != self.blocks && self.sampler.set_period(period(blocks)) {
            self.blocks = blocks;
        }
        samples
    }

    /// Returns the guest's ring at the last sample in the guest.
    pub(crate) fn last(&self) -> Option<Ring> {
        self.last
    }

    /// Returns whether this machine's samples never show the guest.
    pub(crate) fn is_blind(&self) -> bool {
        self.last.is_none() && self.taken >= BLIND
    }
}
