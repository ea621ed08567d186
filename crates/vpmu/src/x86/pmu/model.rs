//! The PMU as its bank of counters asks for it.

use core::num::NonZeroU64;

use super::{Pmu, Registers};
use crate::counter::{Bank, CounterHost, CounterSet, Events, FAR, Lost, Model};
use crate::x86::CounterConfig;

impl<R: Registers, V: Events> Model for Pmu<R, V> {
    type Event = CounterConfig;

    fn bank(&self) -> &Bank<CounterConfig> {
        &self.bank
    }

    fn bank_mut(&mut self) -> &mut Bank<CounterConfig> {
        &mut self.bank
    }

    fn observer(&mut self) -> &mut impl Events {
        &mut self.events
    }

    fn implemented(&self) -> CounterSet {
        self.registers.counters()
    }

    fn enabled(&self) -> CounterSet {
        self.registers.gate() & self.enabled
    }

    fn event(&self, n: u8) -> CounterConfig {
        self.registers.control(n).event
    }

    fn is_countable(&self, n: u8) -> bool {
        self.filter.allows(self.event(n).event)
    }

    fn unsupported(&self, n: u8) -> Option<Lost> {
        self.registers.control(n).unsupported
    }

    /// 1 to 2^63 events.
    fn report_wanted(&self, n: u8) -> Option<NonZeroU64> {
        if !self.reported().contains(n) {
            return None;
        }
        let mask = self.registers.counter_mask(n);
        let distance = (mask - self.bank.counters[n].value).wrapping_add(1);
        // A counter that has just overflowed is about to be written by the guest's handler. Asking
        // the host for what nobody expects would be a call for each PMI: the end of a slice looks at
        // it, which is soon enough.
        let rewritten = self.overflowed | self.recording;
        let unexpected = rewritten.contains(n) && distance >= FAR;
        NonZeroU64::new(self.sampling.due(n, distance)).filter(|_| !unexpected)
    }

    fn is_awaited(&self, n: u8) -> bool {
        self.reported().contains(n)
    }

    fn advance(&mut self, n: u8, events: u64) -> bool {
        let mask = self.registers.counter_mask(n);
        let counter = &mut self.bank.counters[n];
        let room = mask - counter.value;
        counter.value = counter.value.wrapping_add(events) & mask;
        let overflows = events > room;
        if overflows {
            self.events.overflowed(n);
            // What was counted was counted while `n` was enabled and under the controls that are
            // still here: every change of them settles first.
            if self.recording.contains(n) {
                self.unrecorded.insert(n);
                return true;
            }
            self.overflowed.insert(n);
            if self.interrupting.contains(n) {
                self.request_pmi();
            }
        }
        overflows
    }

    fn follow_up<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if !self.unrecorded.is_empty() || !self.sampling.counters().is_empty() {
            R::record(self, host);
        }
    }
}
