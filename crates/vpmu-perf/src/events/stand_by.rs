//! Counters that stand by: they do not count although their events do.
//!
//! To stop and start a group takes two system calls, each of which has the kernel schedule all events of the thread
//! anew, and a third reads the totals. So counters that only count are not stopped: they stand by. A read when they
//! are to stop, and another when they go on, tell what lies between, which is not theirs. All clocks of a thread go on
//! together, so where the leader's page tells its time, no system call is left. A counter that waits for an overflow is
//! stopped, or its event would report one for time that is not the counter's.

use vpmu::counter::{CounterSet, Lost};

use super::{Event, Events, State};
use crate::buffer::RingBuffer;
use crate::kernel::Total;

impl Events {
    /// Takes the totals of `counters`, and lets them stand by. `false`: they have to be stopped, and nothing was done.
    pub(crate) fn stand_by(&mut self, counters: CounterSet) -> bool {
        let counts = self
            .group
            .as_ref()
            .is_some_and(|group| group.counts(counters));
        if !counts || !self.read_totals(counters) {
            return false;
        }
        for counter in counters {
            if let Some(event) = &mut self.events[counter] {
                event.take(event.seen);
                event.state = State::StandingBy;
            }
        }
        true
    }

    /// Lets `counters`, which stand by, go on from their last totals.
    pub(super) fn wake(&mut self, counters: CounterSet) {
        let seen = self.read_totals(counters);
        for counter in counters {
            if let Some(event) = &mut self.events[counter] {
                match seen {
                    true => event.skipped = event.seen.value.wrapping_sub(event.total),
                    // Nobody knows how much of the total is not the counter's.
                    false => event.deficit = Some(Lost::Failed),
                }
                event.state = State::Counting;
            }
        }
    }

    /// Reads the totals of the events behind `counters`: by the group's clock where it is known how far each is ahead
    /// of that, and otherwise by a system call. Returns whether each is seen.
    pub(super) fn read_totals(&mut self, counters: CounterSet) -> bool {
        let Some(group) = &self.group else {
            return false;
        };
        // The page tells the time of a thread that runs, and an event that does not count falls behind the clock.
        let page = group
            .page
            .as_ref()
            .filter(|_| group.counts(counters) && self.notes.is_here());
        let now = page.and_then(RingBuffer::running);
        let events = &mut self.events;
        let ahead = |event: &Event| Some(now?.wrapping_add(event.ahead?));
        if counters
            .iter()
            .all(|counter| events[counter].as_ref().and_then(ahead).is_some())
        {
            for counter in counters {
                if let Some(event) = &mut events[counter] {
                    event.seen = Total {
                        value: ahead(event).unwrap_or(event.seen.value),
                        ..Total::default()
                    };
                }
            }
            return true;
        }
        let Ok(totals) = group.read() else {
            return false;
        };
        for (counter, total) in totals {
            if let Some(event) = &mut events[counter]
                && counters.contains(counter)
            {
                event.seen = total;
                event.ahead = now.map(|now| total.value.wrapping_sub(now));
            }
        }
        true
    }
}
