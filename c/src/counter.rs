//! What host counters and the guest's have in common on x86 and Arm.

use vpmu::counter::{Counter, CounterState, Policy, Report};

use crate::status::VpmuStatus;

/// A host counter belongs to the guest's counter as long as the guest uses it, and a counter that is
/// paused and read is left alone until the guest resumes it: the fewest calls of the host's functions.
pub const VPMU_POLICY_REUSE_PAUSED: u32 = 0;
/// As `VPMU_POLICY_REUSE_PAUSED`, but each rewrite by the guest pauses the counter, reads it and sets its
/// period again.
pub const VPMU_POLICY_REUSE: u32 = 1;
/// Each rewrite by the guest and each overflow releases the host counter and creates another. For
/// comparison.
pub const VPMU_POLICY_RECREATE: u32 = 2;

/// What the host knows when it reports an overflow: all the events asked for have been counted, and
/// the host counter goes on counting on the CPU where this is reported.
pub const VPMU_REPORT_DUE: u32 = 0;
/// As `VPMU_REPORT_DUE`, but the vCPU has left the CPU on which the host counter counts.
pub const VPMU_REPORT_MOVED: u32 = 1;
/// The report may be early, late, or meant for an earlier period: the counter is read to find out.
pub const VPMU_REPORT_UNSURE: u32 = 2;

/// Nothing is counted: the counter is disabled, filtered away, or its vCPU does not run.
pub const VPMU_COUNTER_PAUSED: i32 = 0;
/// Events are counted.
pub const VPMU_COUNTER_COUNTING: i32 = 1;
/// The counter should count and does not, or not all the time: its value is wrong.
pub const VPMU_COUNTER_LOST: i32 = 2;

pub(crate) fn report(number: u32) -> Option<Report> {
    Some(match number {
        VPMU_REPORT_DUE => Report::Due,
        VPMU_REPORT_MOVED => Report::Moved,
        VPMU_REPORT_UNSURE => Report::Unsure,
        _ => return None,
    })
}

/// Returns what the counter of this number is doing, by what `state` says of it.
pub(crate) fn counter_state(
    number: u8,
    state: impl FnOnce(Counter) -> Option<CounterState>,
) -> i32 {
    match Counter::new(number).and_then(state) {
        None => VpmuStatus::Misuse as i32,
        Some(CounterState::Paused) => VPMU_COUNTER_PAUSED,
        Some(CounterState::Counting) => VPMU_COUNTER_COUNTING,
        Some(CounterState::Lost(_)) => VPMU_COUNTER_LOST,
    }
}

pub(crate) fn policy(number: u32) -> Option<Policy> {
    Some(match number {
        VPMU_POLICY_REUSE_PAUSED => Policy::ReusePaused,
        VPMU_POLICY_REUSE => Policy::Reuse,
        VPMU_POLICY_RECREATE => Policy::Recreate,
        _ => return None,
    })
}
