//! The buffer of records in the guest's memory, and which counters the host samples for it.

use super::page::{Page, word};
use crate::counter::{Counter, CounterSet};
use crate::x86::pebs::{Sampling, Statistics};

/// What the host samples, and the buffer of records.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    /// The buffer's address in the guest's memory; 0: there is none.
    pub(super) buffer: u64,
    /// Records written since the page was shared.
    pub(super) head: u64,
    pub(super) sampling: Sampling,
    /// Counters that have overflowed and may be sampled from now on.
    pub(super) wanted: CounterSet,
    pub(super) statistics: Statistics,
}

impl Samples {
    /// Forgets the buffer and what is sampled. The statistics go on.
    pub(super) fn reset(&mut self) {
        *self = Self {
            statistics: self.statistics,
            ..Self::default()
        };
    }

    /// Takes the buffer at `address` from now on.
    pub(super) const fn share(&mut self, address: u64) {
        // Beginning at a page it cannot wrap round the end of the address space: its length is a part of a page's reach.
        self.buffer = address & !0xfff;
    }

    /// Continues the buffer of a page that another device has written.
    pub(super) fn go_on<P: Page + ?Sized>(&mut self, page: &P) {
        self.share(page.load(word::BUFFER));
        // Whatever the guest has made of these words, only its own records are at a wrong place.
        self.head = page.load(word::HEAD);
    }

    /// Returns the period that the host samples `n` with, if it does.
    pub(super) fn period(&self, n: Counter) -> Option<u64> {
        let sampled = self.sampling.counters.contains(n);
        sampled.then(|| self.sampling.period(n).max(1))
    }

    /// Notes that `n` has overflowed, and is to be sampled.
    pub(super) const fn want(&mut self, n: Counter) {
        if self.buffer != 0 {
            self.wanted.insert(n);
        }
    }
}
