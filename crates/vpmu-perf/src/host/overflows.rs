//! The way of an overflow: from the signal handler's notes to what the engine is told.

use vpmu::counter::{Counter, CounterSet, Report};

use super::PerfHost;
use crate::event::ENDLESS;
use crate::pace::FLOOR;
use crate::parts::TimeUp;
use crate::periods::{Overflow, Period};
use crate::rings::{LONGEST, RingSampler};
use crate::slot::Slot;

impl PerfHost {
    /// Takes the overflows that have been signalled since the last call. Reads memory alone where there are none.
    pub fn take_overflows(&mut self) -> impl Iterator<Item = (Counter, Report)> + use<> {
        let (mut due, mut unsure) = (CounterSet::EMPTY, CounterSet::EMPTY);
        for counter in self.notes.take() {
            match self.overflow(counter) {
                Some(Report::Due) => due.insert(counter),
                Some(_) => unsure.insert(counter),
                None => {}
            }
        }
        if self.notes.take_overrun() {
            let awaited = self.which(Slot::is_awaited);
            for counter in awaited {
                if self.may_have_overflowed(counter) {
                    unsure.insert(counter);
                }
            }
        }
        let due = due.iter().map(|counter| (counter, Report::Due));
        due.chain(unsure.iter().map(|counter| (counter, Report::Unsure)))
    }

    /// The event behind `counter` has signalled an overflow. Returns what the engine is told.
    fn overflow(&mut self, counter: Counter) -> Option<Report> {
        let Slot::Whole { period, .. } = &mut self.slots[counter] else {
            return self.is_time_up(counter).then_some(Report::Unsure);
        };
        let asked = *period;
        match period.overflow(self.repeating) {
            // A clock's overflows come no faster than it was asked to report them.
            Overflow::Report(report) if self.pace.is_none() => return Some(report),
            Overflow::Report(report) => return Some(self.paced(counter, asked, report)),
            Overflow::Unwanted if self.events.set_period(counter, ENDLESS) => {
                *period = Period::Endless;
            }
            Overflow::Unwanted | Overflow::Late => {}
        }
        None
    }

    /// The overflow of a hardware event's period that was `asked` for. Lengthens the period if overflows come too fast.
    /// Returns what the engine is told.
    fn paced(&mut self, counter: Counter, asked: Period, report: Report) -> Report {
        let counting = self.events.counting();
        let sharing = self.sharing(counting);
        let (Period::Set { events, period, .. }, Some(pace)) = (asked, &mut self.pace) else {
            return report;
        };
        let (overflows, now) = (self.events.take_overflows(counter), self.kernel.now());
        let number = overflows.number;
        let too_fast = pace.overflowed(counter, number, period, sharing, now);
        if too_fast || overflows.throttled {
            // The event would go on at its old pace, or stand still until the next tick.
            if self.slots[counter].is_awaited() {
                self.program(counter, events, counting);
            } else if self.events.set_period(counter, ENDLESS)
                && let Some(period) = self.slots[counter].period_mut()
            {
                *period = Period::Endless;
            }
        }
        // A lengthened period is of more events than the report vouches for.
        match number <= 1 && period == events.get() {
            true => report,
            false => Report::Unsure,
        }
    }

    /// Signals have been lost, perhaps one of `counter`, of which a report is wanted.
    fn may_have_overflowed(&mut self, counter: Counter) -> bool {
        match &mut self.slots[counter] {
            Slot::Empty => false,
            Slot::Part { .. } => self.is_time_up(counter),
            Slot::Whole { period, .. } => {
                period.pass(self.repeating);
                true
            }
        }
    }

    /// The clock of a counter of a part of its time has reached its period. Returns whether the counter overflows. If not, the
    /// clock gets another period.
    fn is_time_up(&mut self, counter: Counter) -> bool {
        self.divide_time();
        let total = self.events.read(counter);
        let last = self.ring_sampler.as_ref().and_then(RingSampler::last);
        let Slot::Part { period, time } = &mut self.slots[counter] else {
            return false;
        };
        let value = self.units.to_guest(time.own(total));
        let wait = match time.is_up(value, self.repeating, &self.guest_ring, last) {
            TimeUp::Overflow => {
                period.pass(self.repeating);
                return true;
            }
            TimeUp::Early(events) => self.units.to_count(events).min(LONGEST),
            TimeUp::Away(ns) => ns,
            TimeUp::Unwanted => {
                // The clock would report each of its old periods, while the guest is on its way to write the counter.
                self.events.set_period(counter, LONGEST);
                return false;
            }
        };
        let ns = wait.max(FLOOR * self.sharing(self.events.counting()));
        self.events.set_period(counter, ns);
        false
    }
}
