//! Counters that are read without a system call, and stand still while their clocks run on.
//!
//! To stop and start a group takes two system calls, each of which has the kernel schedule all events of the thread
//! anew, and a third reads the totals. So counters that only count are not stopped: a read when they are to stand
//! still, and another when they go on, tell what lies between, which is not theirs. All clocks of a thread go on
//! together, so where the leader's page tells its time, no system call is left.
//! A counter that waits for an overflow is stopped, or its clock would report one for time that is not the counter's.

use vpmu::counter::CounterSet;

use super::PerfHost;
use super::slot::Slot;
use crate::event::{COUNTERS, Total};

impl PerfHost {
    /// Takes the totals of `counters`, and lets them stand still. `false`: they have to be stopped, and nothing was done.
    pub(super) fn idle(&mut self, counters: CounterSet) -> bool {
        let counts_only = |counter| {
            let slot = self.slots.get(usize::from(counter));
            slot.and_then(Option::as_ref).is_some_and(Slot::counts_only)
        };
        let group = self.group.as_ref();
        let runs = group.is_some_and(|group| group.counts(counters));
        if !runs || !counters.iter().all(counts_only) {
            return false;
        }
        let Some(totals) = self.totals(counters) else {
            return false;
        };
        for (counter, total) in counters.iter().zip(totals) {
            if let Some(slot) = self.slot(counter) {
                slot.take(total);
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
        let Some(totals) = self.totals(idle) else {
            return;
        };
        for (counter, total) in idle.iter().zip(totals) {
            if let Some(slot) = self.slot(counter) {
                slot.skipped = total.value.wrapping_sub(slot.total);
                slot.idle = false;
            }
        }
    }

    /// Returns the counters that stand still while their clocks run on.
    pub(super) fn idle_counters(&self) -> CounterSet {
        self.which(|slot| slot.idle)
    }

    /// Returns the total of the event behind `counter`.
    pub(super) fn total(&mut self, counter: u8) -> Option<Total> {
        let only = CounterSet::of(counter);
        if self.group.as_ref().is_some_and(|group| group.counts(only)) {
            let [total, ..] = self.totals(only)?;
            return Some(total);
        }
        self.slot(counter)?.event.read().ok()
    }

    /// Returns the totals of the events behind `counters`, in their order: by the group's clock where it is known how far
    /// each is ahead of that, and otherwise by a system call.
    fn totals(&mut self, counters: CounterSet) -> Option<[Total; COUNTERS]> {
        let mut totals = [Total::default(); COUNTERS];
        let group = self.group.as_ref()?;
        // The page tells the time of a thread that runs, and an event that does not count stands still beside the clock.
        let now = match self.is_here() && group.counts(counters) {
            true => group.now(),
            false => None,
        };
        let ahead = |counter| self.slots.get(usize::from(counter))?.as_ref()?.ahead;
        if let Some(now) = now
            && counters.iter().all(|counter| ahead(counter).is_some())
        {
            for (counter, total) in counters.iter().zip(&mut totals) {
                total.value = now.wrapping_add(ahead(counter)?);
            }
            return Some(totals);
        }
        let read = group.read().ok()?;
        for (counter, total) in read {
            let Some(place) = counters.iter().position(|wanted| wanted == counter) else {
                continue;
            };
            *totals.get_mut(place)? = total;
            if let Some(Some(slot)) = self.slots.get_mut(usize::from(counter)) {
                slot.ahead = now.map(|now| total.value.wrapping_sub(now));
            }
        }
        Some(totals)
    }
}
