//! What is asked of a counter's overflows, and what its perf event has been set to.
//!
//! # One-shot reports from periodic events
//!
//! The engine asks for one report, but a perf event overflows again and again. Stopping the event after the first
//! overflow (PERF_EVENT_IOC_REFRESH) would stop its counting too, and would cost a system call to undo. So the event
//! continues. The guest's handler usually gives it another period at once. Only if a second overflow comes that
//! nobody waits for is the period made endless.

use std::num::NonZeroU64;

use vpmu::counter::Report;

/// A period that is longer than any machine runs. The kernel refuses 2^63.
pub(crate) const ENDLESS: u64 = i64::MAX as u64;

/// The period of one counter's perf event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Period {
    /// Nobody waits for an overflow, and the event's period is endless.
    #[default]
    Endless,
    /// Nobody waits for an overflow, but the event still has a period.
    Stale,
    /// A report is wanted after so many of the guest's events, from the moment on when the counter goes on. Only then is
    /// it known how many events share the processor. `stale`: the event still has an earlier period.
    Planned { events: NonZeroU64, stale: bool },
    /// A report is wanted. The event has `period`, in its own unit, for so many of the guest's events. `certain`: no
    /// signal of an earlier period could come any more when the period was set.
    Set {
        events: NonZeroU64,
        period: u64,
        certain: bool,
    },
}

/// What a signalled overflow means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// The report that the engine waits for.
    Report(Report),
    /// Nobody waited for it. The event's period is to be made endless.
    Unwanted,
    /// The last overflow of a period that has been replaced since.
    Late,
}

impl Period {
    /// Returns whether a report is wanted.
    pub(crate) const fn is_awaited(self) -> bool {
        matches!(self, Self::Planned { .. } | Self::Set { .. })
    }

    /// Returns the guest's events of a report that is wanted and has still to be asked for.
    pub(crate) const fn planned(self) -> Option<NonZeroU64> {
        match self {
            Self::Planned { events, .. } => Some(events),
            _ => None,
        }
    }

    /// Replaces the wish of a counter that stands still: the event is set when the counter goes on.
    pub(crate) fn plan(&mut self, events: Option<NonZeroU64>) {
        let stale = match *self {
            Self::Endless => false,
            Self::Planned { stale, .. } => stale,
            Self::Stale | Self::Set { .. } => true,
        };
        *self = match events {
            Some(events) => Self::Planned { events, stale },
            None if stale => Self::Stale,
            None => Self::Endless,
        };
    }

    /// No report is wanted of a counter that counts. A signal that comes all the same is ignored, and is the last.
    pub(crate) fn drop_wish(&mut self) {
        if self.is_awaited() {
            *self = Self::Stale;
        }
    }

    /// Takes the counter's overflow, which has been signalled. `repeating`: the period goes on after its report.
    pub(crate) fn overflow(&mut self, repeating: bool) -> Overflow {
        match self {
            Self::Set { certain, .. } => {
                let report = match *certain {
                    true => Report::Due,
                    false => Report::Unsure,
                };
                // The engine reads an event whose report is not certain, and then knows where its period stands.
                *certain = true;
                self.pass(repeating);
                Overflow::Report(report)
            }
            Self::Stale => Overflow::Unwanted,
            Self::Endless | Self::Planned { .. } => Overflow::Late,
        }
    }

    /// The report that was wanted is made, although its signal may still come. That signal, which nobody can tell from the
    /// next period's, vouches for nothing.
    pub(crate) fn doubt(&mut self, repeating: bool) {
        if let Self::Set { certain, .. } = self {
            *certain = false;
        }
        self.pass(repeating);
    }

    /// The report that was wanted is made.
    pub(crate) fn pass(&mut self, repeating: bool) {
        if !repeating && matches!(self, Self::Set { .. }) {
            *self = Self::Stale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: Period = Period::Set {
        events: NonZeroU64::MIN,
        period: 50_000,
        certain: true,
    };

    #[test]
    fn a_signal_that_may_be_of_a_report_made_before_vouches_for_nothing() {
        let mut period = SET;
        period.doubt(true);
        assert_eq!(period.overflow(true), Overflow::Report(Report::Unsure));
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
    }

    #[test]
    fn a_report_is_made_once_unless_the_period_repeats() {
        let mut period = SET;
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
        assert_eq!(period.overflow(false), Overflow::Report(Report::Due));
        // The second overflow that nobody waits for is the last.
        assert_eq!(period.overflow(false), Overflow::Unwanted);
        assert!(!period.is_awaited());
    }

    #[test]
    fn only_a_first_report_is_doubted() {
        let mut period = Period::Set {
            events: NonZeroU64::MIN,
            period: 1,
            certain: false,
        };
        assert_eq!(period.overflow(true), Overflow::Report(Report::Unsure));
        assert_eq!(period.overflow(true), Overflow::Report(Report::Due));
    }

    #[test]
    fn a_wish_that_is_taken_back_leaves_the_event_as_it_was() {
        for (before, after) in [(Period::Endless, Period::Endless), (SET, Period::Stale)] {
            let mut period = before;
            period.plan(NonZeroU64::new(5));
            assert_eq!(period.planned(), NonZeroU64::new(5));
            // A signal while the counter stands still is of no period that is wanted.
            assert_eq!(period.overflow(true), Overflow::Late);
            period.plan(None);
            assert_eq!(period, after);
        }
        let mut period = SET;
        period.drop_wish();
        assert_eq!(period, Period::Stale);
    }
}
