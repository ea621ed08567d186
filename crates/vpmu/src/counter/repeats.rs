//! What a model knows of an event that repeats its period, and saves calls by.

use super::{Counter, HostEvents};

impl<E> HostEvents<E> {
    /// Whether the period that `counter` repeats is what was left of the model's own, by
    /// [`note_rest`](Self::note_rest).
    pub(crate) fn repeats_rest(&self, counter: Counter) -> bool {
        self.slots[counter].is_rest
    }

    /// Notes that `counter` was read after its report, and asked for what was left of its period.
    pub(crate) fn note_rest(&mut self, counter: Counter) {
        let slot = &mut self.slots[counter];
        // An event that reports once repeats nothing: its next period is asked for anyway.
        slot.is_rest = slot.repeats.is_some();
    }

    /// Notes whether the report of `counter` was an overflow. An event that repeats is then not asked again for a report
    /// that is minutes away: the guest will have written the counter long before, as its handler does. Where the guest
    /// has not, the next report is in vain, and the event is asked for the distance.
    pub(crate) fn note_overflow(&mut self, counter: Counter, overflowed: bool) {
        let slot = &mut self.slots[counter];
        // An event that reports once is silent after its report anyway.
        slot.may_idle = overflowed && slot.repeats.is_some();
    }

    /// Whether `counter` goes on with its period, by [`note_overflow`](Self::note_overflow).
    pub(crate) fn may_idle(&self, counter: Counter) -> bool {
        self.slots[counter].may_idle
    }
}
