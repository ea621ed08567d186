/// How often the engine called its host, by kind, and what the host could not do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Calls of [`CounterHost::create`](super::CounterHost::create), failed ones included.
    pub creates: u64,
    /// Calls of [`CounterHost::set_period`](super::CounterHost::set_period).
    pub set_periods: u64,
    /// Calls of [`CounterHost::resume`](super::CounterHost::resume).
    pub resumes: u64,
    /// Calls of [`CounterHost::pause`](super::CounterHost::pause).
    pub pauses: u64,
    /// Calls of [`CounterHost::read`](super::CounterHost::read).
    pub reads: u64,
    /// Calls of [`CounterHost::release`](super::CounterHost::release).
    pub releases: u64,
    /// How many of the creates failed: each is a stretch of guest counting that was lost.
    pub lost: u64,
    /// How often a counter was to count what its PMU knows that nobody can count: the host was not asked. Each is a
    /// stretch of guest counting that was lost, too.
    pub unsupported: u64,
    /// How often a counter was found to have counted only part of the time, or of what happened
    /// ([`CounterHost::deficit`](super::CounterHost::deficit)): its value is too low.
    pub part_time: u64,
    /// Overflow reports from the host.
    pub reports: u64,
    /// Reports that found no overflow: early, stray, or overtaken by the guest's own read.
    pub spurious_reports: u64,
}

/// One more of `n`.
pub(crate) fn count(n: &mut u64) {
    // Wraps: the check of an overflow would be a place that can panic.
    *n = n.wrapping_add(1);
}

impl Statistics {
    /// No call yet.
    pub(crate) const ZERO: Self = Self {
        creates: 0,
        set_periods: 0,
        resumes: 0,
        pauses: 0,
        reads: 0,
        releases: 0,
        lost: 0,
        unsupported: 0,
        part_time: 0,
        reports: 0,
        spurious_reports: 0,
    };

    /// Returns the number of all calls of the host.
    pub fn host_operations(&self) -> u64 {
        [
            // A create that failed is a call, too, so `lost` is no summand.
            self.creates,
            self.set_periods,
            self.resumes,
            self.pauses,
            self.reads,
            self.releases,
        ]
        .iter()
        .fold(0, |sum, &n| sum.wrapping_add(n))
    }
}
