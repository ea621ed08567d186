//! What a PMU with PEBS keeps beside its counters.

use super::{Registers, Sampling, Statistics};
use crate::counter::CounterSet;

/// The state of PEBS of one PMU: its registers, the overflows that wait for a record, and what the host samples.
#[derive(Clone, Debug, Default)]
pub(in crate::x86) struct Unit {
    /// What the guest has written, as it was last adopted.
    pub(in crate::x86) registers: Registers,
    /// Counters that have overflowed and wait for a record: none between two calls of the PMU.
    pub(in crate::x86) unrecorded: CounterSet,
    pub(in crate::x86) sampling: Sampling,
    pub(in crate::x86) statistics: Statistics,
}

impl Unit {
    /// Goes back to power-on reset. The statistics go on.
    pub(in crate::x86) fn reset(&mut self) {
        *self = Self {
            statistics: self.statistics,
            ..Self::default()
        };
    }
}
