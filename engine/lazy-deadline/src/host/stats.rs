//! What a host's timer did, as counts.

/// Counts of what a [`DeadlineTimer`](super::DeadlineTimer) did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// Writes of the deadline register: the exits that remain.
    pub writes: u64,
    /// Writes of a deadline that had fired between the guest's load of `armed` and the write.
    pub overtaken: u64,
    /// Writes of a value that is not in the slot, by a kernel that does not know the slot.
    pub direct: u64,
    /// Expiries of the host's timer.
    pub expiries: u64,
    /// Expiries that found a later deadline: the timer was moved, the guest not disturbed.
    pub moved: u64,
    /// Expiries that found no deadline wanted any more.
    pub cancelled: u64,
    /// Expiries that came early, or with nothing armed.
    pub stale: u64,
    /// Interrupts to inject.
    pub injected: u64,
    /// Interrupts that came due while the LVT was masked, and were dropped.
    pub masked: u64,
    /// Slots that were given up because their tag was gone.
    pub abandoned: u64,
}

impl HostStatistics {
    pub(super) const ZERO: Self = Self {
        writes: 0,
        overtaken: 0,
        direct: 0,
        expiries: 0,
        moved: 0,
        cancelled: 0,
        stale: 0,
        injected: 0,
        masked: 0,
        abandoned: 0,
    };
}
