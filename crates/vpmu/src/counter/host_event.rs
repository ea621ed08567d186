//! What a host event has counted, and when it reports.

use core::num::NonZeroU64;

use super::Lost;

/// The host event behind one counter, if there is one, and what it has counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostEvent<E> {
    /// What the host event counts; `None`: there is none.
    pub(super) event: Option<E>,
    /// The host's total that has been taken into `owed`.
    pub(super) mark: u64,
    /// Counted, and not yet given to the PMU model.
    pub(super) owed: u64,
    /// The host will report when it has counted so many beyond `mark`.
    pub(super) armed: Option<NonZeroU64>,
    /// After so many events again, and so on; `None`: it reports once.
    pub(super) repeats: Option<NonZeroU64>,
    /// Whether `repeats` is what was left of a period when the event was read after a report.
    pub(super) is_rest: bool,
    /// Whether the event may repeat its period once more although the model waits for nothing soon.
    pub(super) may_idle: bool,
    /// Whether a read has found a period over whose report has not come.
    pub(super) overtaken: bool,
    /// Why the total is not all that happened.
    pub(super) deficit: Option<Lost>,
}

impl<E> HostEvent<E> {
    pub(super) const fn empty() -> Self {
        Self {
            event: None,
            mark: 0,
            owed: 0,
            armed: None,
            repeats: None,
            is_rest: false,
            may_idle: false,
            overtaken: false,
            deficit: None,
        }
    }

    /// Takes the host's total into `owed`.
    pub(super) fn take_total(&mut self, total: u64, deficit: Option<Lost>) {
        self.deficit = self.deficit.or(deficit);
        // A total can be lower than the mark: `Report::Due` came before the host's count was visible.
        // The difference was counted then.
        let counted = total.wrapping_sub(self.mark);
        // Modulo 2^64, a total that is lower is a count of more than half of that.
        if counted > u64::MAX / 2 {
            return;
        }
        self.mark = total;
        self.owed = self.owed.wrapping_add(counted);
        self.overtaken |= self.armed.is_some_and(|due| due.get() <= counted);
        self.armed = self.armed.and_then(|due| {
            let beyond = match (counted.checked_sub(due.get()), self.repeats) {
                (None, _) => return NonZeroU64::new(due.get() - counted),
                (Some(_), None) => return None,
                (Some(beyond), Some(period)) => beyond % period,
            };
            self.repeats
                .and_then(|period| NonZeroU64::new(period.get() - beyond))
        });
    }
}
