//! The guest's counters as their bank sees them.

use core::num::NonZeroU64;

use super::device::Device;
use super::wish::{EVENT, LONGEST};
use crate::counter::{Bank, Counter, CounterHost, CounterSet, Lost, Model};
use crate::x86::CounterConfig;

impl Model for Device {
    type Event = CounterConfig;
    type Observer = ();

    fn bank(&self) -> &Bank<CounterConfig, ()> {
        &self.bank
    }

    fn bank_mut(&mut self) -> &mut Bank<CounterConfig, ()> {
        &mut self.bank
    }

    fn enabled(&self) -> CounterSet {
        if self.frozen {
            CounterSet::EMPTY
        } else {
            self.wanted
        }
    }

    fn event(&self, n: Counter) -> CounterConfig {
        self.wishes[n].event()
    }

    fn is_countable(&self, n: Counter) -> bool {
        let wish = &self.wishes[n];
        let event = wish.event();
        // Number 0: nobody has wished for this counter.
        wish.generation != 0
            // perf makes such an event where both rings are excluded: it stands still.
            && (event.user || event.kernel)
            && self.offer.filter.allows(event.event)
    }

    fn unsupported(&self, n: Counter) -> Option<Lost> {
        let wish = &self.wishes[n];
        let event = wish.event();
        let offered = match event.architectural() {
            Some(event) => self.offer.has_event(event),
            None => self.offer.raw,
        };
        let known = wish.config & !EVENT == 0;
        // A host that cannot separate the rings counts either both or nothing.
        let rings = self.offer.rings || event.user == event.kernel;
        (!offered || !known || !rings).then_some(Lost::Unsupported)
    }

    fn report_wanted(&self, n: Counter) -> Option<NonZeroU64> {
        let wish = &self.wishes[n];
        if !wish.interrupts() {
            return None;
        }
        let distance = wish.next.wrapping_sub(self.bank.counters[n].value);
        NonZeroU64::new(self.samples.sampling.due(n, distance))
    }

    fn advance(&mut self, n: Counter, events: u64) -> bool {
        let sampled = self.samples.period(n);
        let granted = self.granted(self.wishes[n].period);
        let period = sampled.unwrap_or(granted).max(1);
        let value = &mut self.bank.counters[n].value;
        *value = value.wrapping_add(events);
        self.changed.insert(n);
        let wish = &mut self.wishes[n];
        // Not past the next overflow: a distance is below 2^63.
        let over = value.wrapping_sub(wish.next);
        if !wish.interrupts() || over > u64::MAX / 2 {
            return false;
        }
        // A late report brings the events of several periods. Each of them has overflowed once.
        let skipped = over / period;
        let periods = skipped.wrapping_add(1);
        wish.next = wish.next.wrapping_add(period.wrapping_mul(periods));
        if sampled.is_some() {
            // The host's samples tell of these.
            self.samples.sampling.pass(n, periods);
            return true;
        }
        wish.overflows = wish.overflows.wrapping_add(periods);
        wish.last = if skipped == 0 { wish.length } else { period };
        wish.length = period;
        self.overflowed = true;
        if wish.may_be_recorded() {
            self.samples.want(n);
        }
        true
    }

    fn follow_up<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.begin_wanted(host);
    }
}

impl Device {
    /// A period as it is granted.
    pub(super) fn granted(&self, wish: u64) -> u64 {
        wish.clamp(self.floor.clamp(1, LONGEST), LONGEST)
    }

    /// Counters whose host events are to report.
    pub(super) fn reporting(&self) -> CounterSet {
        self.wanted.filter(|n| self.wishes[n].interrupts())
    }

    /// Finds out what the shortest period is, now that other counters report.
    pub(super) fn find_floor<H: CounterHost<CounterConfig>>(&mut self, host: &H) {
        // The bound on overflows is the vCPU's, however many counters report.
        let sharing = self.reporting().len().max(1);
        self.floor = host.shortest_period(sharing);
    }
}
