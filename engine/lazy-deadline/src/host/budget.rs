//! How often a guest may have the host move its timer without an exit.
//!
//! A guest moves the host's timer by what it stores in its slot, so the host pays for a move and the
//! guest does not. The limit is a token bucket: a move takes a token, and a token comes back in each
//! [`INTERVAL`] floors of the host's time.

/// Tokens in a full bucket.
pub(super) const BURST: u64 = 16;
/// Floors of time that a token takes to come back.
pub(super) const INTERVAL: u64 = 10;

/// One vCPU's bucket. Its time is the host's, because a guest may set its TSC.
#[derive(Clone, Debug)]
pub(super) struct MoveBudget {
    /// Ticks between two moves at least.
    floor: u64,
    /// Ticks of time that are not used up; [`BURST`] intervals at most.
    credit: u64,
    /// The host's clock at the last move.
    since: u64,
}

impl MoveBudget {
    /// A full bucket.
    pub(super) const fn new(floor: u64) -> Self {
        Self {
            floor,
            credit: floor.saturating_mul(INTERVAL * BURST),
            since: 0,
        }
    }

    /// Takes a token for a move at `now` of the host's clock, a token that may be missing: the guest's
    /// own exit has then led to this move.
    ///
    /// Returns the ticks until the moved timer may expire: until there is a token again, the floor at
    /// least and an interval at most.
    pub(super) fn take(&mut self, now: u64) -> u64 {
        let interval = self.floor.saturating_mul(INTERVAL);
        // A host that has slept may have a clock that went back: no credit for that.
        let passed = now.saturating_sub(self.since);
        self.since = now;
        let full = interval.saturating_mul(BURST);
        self.credit = self.credit.saturating_add(passed).min(full);
        self.credit = self.credit.saturating_sub(interval);
        interval.saturating_sub(self.credit).max(self.floor)
    }
}
