//! The guest's half, as a driver is transcribed from it.

use super::page::{MAX_COUNTERS, Page, TAG, word};
use crate::counter::{Counter, CounterSet, Slots};

/// One vCPU's half. All calls are made on that vCPU; [`interrupt`](Self::interrupt) by its NMI handler.
///
/// What it writes holds from the next doorbell on.
#[derive(Clone, Debug, Default)]
pub struct GuestHalf {
    /// The last number given to a counter.
    generation: u64,
    /// Each counter's.
    generations: Slots<u64>,
    /// Overflows that have been handled.
    seen: Slots<u64>,
}

impl GuestHalf {
    /// Makes the half of a guest that has wished nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a page out of memory that the host does not use yet.
    pub fn prepare<P: Page + ?Sized>(&mut self, page: &P) {
        *self = Self::new();
        page.store(word::ACK, 0);
        page.store(word::WANTED, 0);
        for n in CounterSet::first(MAX_COUNTERS) {
            page.store(word::generation(n), 0);
        }
        // Last: from here on the host believes what it finds.
        page.store(word::TAG, TAG);
    }

    /// Wishes `counter` to be made anew.
    pub fn wish<P: Page + ?Sized>(
        &mut self,
        page: &P,
        counter: Counter,
        config: u64,
        flags: u64,
        left: u64,
        period: u64,
    ) {
        // 0 is no generation: the host takes it for a counter that was never wished for.
        self.generation = self.generation.wrapping_add(1).max(1);
        self.generations[counter] = self.generation;
        self.seen[counter] = 0;
        page.store(word::config(counter), config);
        page.store(word::flags(counter), flags);
        page.store(word::left(counter), left);
        page.store(word::period(counter), period);
        // Last: a wish of the old number is taken for the old one, whatever its other words say by now.
        page.store(word::generation(counter), self.generation);
    }

    /// Wishes these counters, and no others, to count.
    pub fn want<P: Page + ?Sized>(&mut self, page: &P, counters: CounterSet) {
        page.store(word::WANTED, counters.bits().into());
    }

    /// Handles an NMI. Returns the counters that have overflowed, or `None` if the NMI is not this device's.
    ///
    /// An empty set is no error: the handler before has seen all overflows while this interrupt was on its way.
    pub fn interrupt<P: Page + ?Sized>(&mut self, page: &P) -> Option<CounterSet> {
        let seq = page.load(word::SEQ);
        if seq == page.load(word::ACK) {
            return None;
        }
        page.store(word::ACK, seq);
        // Pairs with the host's, between its store of the overflows and its load of `ACK`.
        page.fence();
        let mut overflowed = CounterSet::EMPTY;
        for n in CounterSet::first(MAX_COUNTERS) {
            let overflows = page.load(word::overflows(n));
            if page.load(word::made(n)) == self.generations[n] && overflows != self.seen[n] {
                self.seen[n] = overflows;
                overflowed.insert(n);
            }
        }
        Some(overflowed)
    }
}
