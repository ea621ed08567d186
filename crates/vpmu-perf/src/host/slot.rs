//! The perf event behind one counter.

use std::num::NonZeroU64;

use vpmu::counter::CounterSet;

use super::PerfHost;
use super::rings::Share;
use super::sampling::Sampling;
use crate::event::{Kind, PerfEvent, Total};

/// The perf event behind one counter.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) event: PerfEvent,
    /// Whether a report is wanted and has not come.
    pub(super) armed: bool,
    /// Whether the period was set while no signal of another could come any more.
    pub(super) certain: bool,
    pub(super) running: bool,
    /// Whether the event's period is endless.
    pub(super) endless: bool,
    /// Whether the event was not counted all the time.
    pub(super) multiplexed: bool,
    /// The last total, for when a read fails.
    pub(super) total: u64,
    /// Whether the counter stands still although its event may run on.
    pub(super) idle: bool,
    /// What the event has counted while the counter stood still.
    pub(super) skipped: u64,
    /// How far the event's total is ahead of its group's clock. `None`: not known since the event was last enabled.
    pub(super) ahead: Option<u64>,
    /// The guest's events to the next overflow, for the moment when the event is resumed. Only then
    /// is it known how many events share the processor with it.
    pub(super) wanted: Option<NonZeroU64>,
    /// The guest's events that were asked for last, and the period that was made of them.
    pub(super) asked: Option<(NonZeroU64, u64)>,
    /// The event that samples the guest where this one counts. `None`: there is none, because a clock counts something
    /// other than time, or one ring.
    pub(super) samples: Option<Kind>,
    pub(super) sampling: Option<Sampling>,
    /// The part of a clock's time that a counter of one ring has.
    pub(super) share: Option<Share>,
}

impl Slot {
    pub(super) fn take(&mut self, total: Total) {
        self.multiplexed |= total.enabled != total.running;
        if !self.idle {
            self.total = total.value.wrapping_sub(self.skipped);
        }
    }

    /// Returns whether no more is asked of the event than its total.
    pub(super) fn counts_only(&self) -> bool {
        self.endless && !self.armed && self.share.is_none() && self.sampling.is_none()
    }
}

impl PerfHost {
    /// Returns the counters whose slot is as `wanted`.
    pub(super) fn which(&self, wanted: impl Fn(&Slot) -> bool) -> CounterSet {
        let mut which = CounterSet::EMPTY;
        for (counter, slot) in (0..).zip(&self.slots) {
            if slot.as_ref().is_some_and(&wanted) {
                which.insert(counter);
            }
        }
        which
    }
}
