//! The PMU as its bank of counters asks for it.
//!
//! Apart from [`Pmu`], so that a call goes one way: from an access to the bank, from there to the registers and counters.

use core::num::NonZeroU64;

use super::{Pmu, Registers};
use crate::counter::{Bank, Counter, CounterHost, CounterSet, Events, FAR, Lost, Model};
use crate::x86::CounterConfig;

impl<R: Registers, V: Events> Model for Pmu<R, V> {
    type Event = CounterConfig;

    fn bank(&self) -> &Bank<CounterConfig> {
        self.counters.bank()
    }

    fn bank_mut(&mut self) -> &mut Bank<CounterConfig> {
        self.counters.bank_mut()
    }

    fn observer(&mut self) -> &mut impl Events {
        self.counters.observer()
    }

    fn implemented(&self) -> CounterSet {
        self.counters.existing()
    }

    fn enabled(&self) -> CounterSet {
        self.counters.enabled()
    }

    fn event(&self, n: Counter) -> CounterConfig {
        self.counters.control(n).event
    }

    fn is_countable(&self, n: Counter) -> bool {
        // The rings are checked where a control is adopted.
        self.counters.allows(self.event(n).event)
    }

    fn unsupported(&self, n: Counter) -> Option<Lost> {
        self.counters.control(n).unsupported
    }

    /// 1 to 2^63 events.
    fn report_wanted(&self, n: Counter) -> Option<NonZeroU64> {
        if !self.is_awaited(n) {
            return None;
        }
        let distance = self.counters.distance(n);
        // A counter that has just overflowed is about to be written by the guest's handler. Asking
        // the host for what nobody expects would be a call for each PMI: the end of a slice reads
        // it, which is soon enough.
        let rewritten = self.counters.overflowed() | self.counters.recording();
        if rewritten.contains(n) && distance >= FAR {
            return None;
        }
        let due = match self.registers.pebs() {
            Some(pebs) => pebs.report_due(n, distance),
            None => distance,
        };
        NonZeroU64::new(due)
    }

    fn is_awaited(&self, n: Counter) -> bool {
        self.counters.reported().contains(n)
    }

    fn advance(&mut self, n: Counter, events: u64) -> bool {
        self.counters.advance(n, events)
    }

    fn follow_up<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if let Some(pebs) = self.registers.pebs_mut() {
            pebs.record(&mut self.counters, host);
        }
        if self.counters.is_pmi_held() {
            self.begin_run();
        }
    }
}
