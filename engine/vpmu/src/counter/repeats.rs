//! What a model knows of an event that repeats its period, and saves calls by.

use core::num::NonZeroU64;

/// What a host event does after its report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeats {
    /// It reports after so many events again, and so on; `None`: it reports once.
    pub(super) period: Option<NonZeroU64>,
    /// Whether `period` is what was left of the model's own when the event was read after a report.
    pub(super) is_rest: bool,
    /// Whether `period` was asked for unread: each ends so many events later than the model believes as the report came
    /// late.
    pub(super) is_adrift: bool,
    /// Whether the event may repeat its period once more although the model waits for nothing soon.
    pub(super) may_idle: bool,
}

impl Repeats {
    /// The event reports once.
    pub(super) const NEVER: Self = Self::of(None);

    /// The event was asked for `period`.
    pub(super) const fn of(period: Option<NonZeroU64>) -> Self {
        Self {
            period,
            is_rest: false,
            is_adrift: false,
            may_idle: false,
        }
    }

    /// Notes that the event was asked for its next period at a report: for what was left of it where the event `was_read`.
    pub(super) const fn note_asked(&mut self, was_read: bool) {
        // An event that reports once repeats nothing: its next period is asked for anyway.
        self.is_rest = was_read && self.period.is_some();
        self.is_adrift = !was_read;
    }

    /// Notes whether the report was an overflow. An event that repeats is then not asked again for a report that is
    /// minutes away: the guest will have written the counter long before, as its handler does. Where the guest has not,
    /// the next report is in vain, and the event is asked for the distance.
    pub(super) const fn note_overflow(&mut self, overflowed: bool) {
        // An event that reports once is silent after its report anyway.
        self.may_idle = overflowed && self.period.is_some();
    }
}
