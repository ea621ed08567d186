//! Counters that stand still while their clocks run on.
//!
//! To stop and start a group takes two system calls, each of which has the kernel schedule all events of the thread
//! anew, and a third reads the totals. A read costs a quarter of either. So counters that only count are not stopped:
//! a read when they are to stand still, and another when they go on, tell what lies between, which is not theirs.
//! A counter that waits for an overflow is stopped, or its clock would report one for time that is not the counter's.

use vpmu::counter::CounterSet;

use super::PerfHost;
use super::slot::Slot;
use crate::group::Group;

impl PerfHost {
    /// Takes the totals of `counters`, and lets them stand still. `false`: they have to be stopped, and nothing was done.
    pub(super) fn idle(&mut self, counters: CounterSet) -> bool {
        let counts_only = |counter| {
            let slot = self.slots.get(usize::from(counter));
            slot.and_then(Option::as_ref).is_some_and(Slot::counts_only)
        };
        let group = self.group.as_ref();
        let runs = group.is_some_and(|group| group.counts(counters));
        if !runs || !counters.iter().all(counts_only) || !self.read_group() {
            return false;
        }
        for counter in counters {
            if let Some(slot) = self.slot(counter) {
                slot.running = false;
                slot.idle = true;
            }
        }
        true
    }

    /// Lets those of `counters` that stand still while their clocks run on go on from their last totals.
    pub(super) fn wake(&mut self, counters: CounterSet) {
        let idle = self.idle_counters() & counters;
        if idle.is_empty() {
            return;
        }
        let Some(Ok(totals)) = self.group.as_ref().map(Group::read) else {
            return;
        };
        for (counter, total) in totals {
            if let Some(Some(slot)) = self.slots.get_mut(usize::from(counter))
                && idle.contains(counter)
            {
                slot.skipped = total.value.wrapping_sub(slot.total);
                slot.idle = false;
            }
        }
    }

    /// Returns the counters that stand still while their clocks run on.
    pub(super) fn idle_counters(&self) -> CounterSet {
        let mut idle = CounterSet::EMPTY;
        for (counter, slot) in (0..).zip(&self.slots) {
            if slot.as_ref().is_some_and(|slot| slot.idle) {
                idle.insert(counter);
            }
        }
        idle
    }
}
