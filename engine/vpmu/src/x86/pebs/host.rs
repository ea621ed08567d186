//! What a PMU with PEBS asks of its host.

use core::num::NonZeroU64;

use super::{Guest, Sample};
use crate::counter::Counter;

/// A host of a PMU with PEBS: [`CounterHost::support_pebs`](crate::counter::CounterHost::support_pebs).
pub trait Host {
    /// Returns the guest's memory and registers. `None`: this host cannot show them, and every record is lost.
    fn guest(&mut self) -> Option<&mut dyn Guest>;

    /// Has the host take a sample of the guest after each `events` events of `counter`, from now on, until
    /// [`end_sampling`](Self::end_sampling) or until the host event is
    /// [released](crate::counter::CounterHost::release). A paused counter takes no samples, and continues its period
    /// when it is resumed. The counter's total and its reports stay as they are.
    ///
    /// Returns the number of samples that the host keeps before they are [taken](Self::take_samples); 0: it does not
    /// sample, and the engine asks for a report of each overflow.
    fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        let _ = (counter, events);
        0
    }

    /// Has the host take no more samples of `counter`.
    fn end_sampling(&mut self, counter: Counter) {
        let _ = counter;
    }

    /// Moves samples of `counter` into `samples`, the oldest first, as many as there are or fit.
    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        let _ = (counter, samples);
        TakenSamples::NONE
    }
}

/// Samples that a host has [handed over](Host::take_samples).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenSamples {
    /// How many samples were filled in.
    pub samples: usize,
    /// Samples that found the vCPU's thread at work for its guest, not in it.
    pub outside: u64,
    /// Samples that the host had no room for.
    pub lost: u64,
    /// The host takes no more samples of this counter.
    pub ended: bool,
}

impl TakenSamples {
    /// None, of a host that does not sample: the engine then asks for a report of each overflow.
    pub const NONE: Self = Self {
        samples: 0,
        outside: 0,
        lost: 0,
        ended: true,
    };
}
