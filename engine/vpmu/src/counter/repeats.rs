//! What a model knows of an event that repeats its period, and saves calls by.

use core::num::NonZeroU64;

use super::{Counter, HostEvents};

/// What a host event does after its report.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeats {
    /// It reports after so many events again, and so on; `None`: it reports once.
    pub(super) period: Option<NonZeroU64>,
    /// Whether `period` is what was left of a period when the event was read after a report.
    is_rest: bool,
    /// Whether the event may repeat its period once more although the model waits for nothing soon.
    may_idle: bool,
}

impl Repeats {
    /// The event reports once.
    pub(super) const NEVER: Self = Self::of(None);

    /// The event was asked for `period`.
    pub(super) const fn of(period: Option<NonZeroU64>) -> Self {
        Self {
            period,
            is_rest: false,
            may_idle: false,
        }
    }
}

impl<E> HostEvents<E> {
    /// Whether the period that `counter` repeats is what was left of the model's own, by
    /// [`note_rest`](Self::note_rest).
    pub(crate) fn repeats_rest(&self, counter: Counter) -> bool {
        self.slots[counter].repeats.is_rest
    }

    /// Notes that `counter` was read after its report, and asked for what was left of its period.
    pub(crate) fn note_rest(&mut self, counter: Counter) {
        let repeats = &mut self.slots[counter].repeats;
        // An event that reports once repeats nothing: its next period is asked for anyway.
        repeats.is_rest = repeats.period.is_some();
    }

    /// Notes whether the report of `counter` was an overflow. An event that repeats is then not asked again for a report
    /// that is minutes away: the guest will have written the counter long before, as its handler does. Where the guest
    /// has not, the next report is in vain, and the event is asked for the distance.
    pub(crate) fn note_overflow(&mut self, counter: Counter, overflowed: bool) {
        let repeats = &mut self.slots[counter].repeats;
        // An event that reports once is silent after its report anyway.
        repeats.may_idle = overflowed && repeats.period.is_some();
    }

    /// Whether `counter` goes on with its period, by [`note_overflow`](Self::note_overflow).
    pub(crate) fn may_idle(&self, counter: Counter) -> bool {
        self.slots[counter].repeats.may_idle
    }
}
