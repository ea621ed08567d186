//! The guest's counters as their bank sees them.

use core::num::NonZeroU64;

use super::config::fixed_index;
use super::{Pmu, RawPerfEvtSel, debugctl, fixed_ctrl, global_status};
use crate::counter::{Bank, CounterHost, CounterSet, Events, FAR, Lost, Model};
use crate::x86::{CounterConfig, EventKind};

impl<V: Events> Model for Pmu<V> {
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
        self.config.capability.counters()
    }

    fn enabled(&self) -> CounterSet {
        if self.status & global_status::CTR_FRZ != 0 {
            return CounterSet::EMPTY;
        }
        self.global & self.enabled
    }

    fn event(&self, n: u8) -> CounterConfig {
        match fixed_index(n) {
            Some(fixed) => fixed_ctrl::config(self.fixed_ctrl, fixed),
            None => self.selects[n].config(self.config.capability.version),
        }
    }

    fn is_countable(&self, n: u8) -> bool {
        self.config.filter.allows(self.event(n).event)
    }

    fn unsupported(&self, n: u8) -> Option<Lost> {
        let any_thread = match fixed_index(n) {
            Some(fixed) => fixed_ctrl::field(self.fixed_ctrl, fixed) & fixed_ctrl::ANY_THREAD != 0,
            None => self.selects[n].has(RawPerfEvtSel::ANY_THREAD),
        };
        let config = self.event(n);
        let absent = match (config.event, config.event.architectural()) {
            (EventKind::General { .. }, Some(event)) => !self.config.capability.has_event(event),
            _ => false,
        };
        // The other threads of the core are not the guest's, whatever it is told.
        (any_thread || absent).then_some(Lost::Unsupported)
    }

    /// 1 to 2^63 events.
    fn report_wanted(&self, n: u8) -> Option<NonZeroU64> {
        if !self.interrupting.contains(n) {
            return None;
        }
        let mask = self.config.capability.counter_mask(n);
        let distance = (mask - self.bank.counters[n].value).wrapping_add(1);
        // A counter that has just overflowed is about to be written by the guest's handler. Asking
        // the host for what nobody expects would be a call for each PMI: the end of a slice looks at
        // it, which is soon enough.
        let unexpected = self.overflowed.contains(n) && distance >= FAR;
        NonZeroU64::new(distance).filter(|_| !unexpected)
    }

    fn advance(&mut self, n: u8, events: u64) -> bool {
        let mask = self.config.capability.counter_mask(n);
        let counter = &mut self.bank.counters[n];
        let room = mask - counter.value;
        counter.value = counter.value.wrapping_add(events) & mask;
        let overflows = events > room;
        if overflows {
            self.overflowed.insert(n);
            self.events.overflowed(n);
            // What was counted was counted while `n` was enabled and under the controls that are
            // still here: every change of them settles first.
            if self.interrupting.contains(n) {
                self.request_pmi();
            }
        }
        overflows
    }
}

impl<V: Events> Pmu<V> {
    /// An overflow that stops all counters must be known before anything that comes after it.
    pub(super) fn settle_freeze<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI != 0 {
            self.settle(self.bank.hosted.in_doubt(self.interrupting, host), host);
        }
    }

    /// Looks at the counters whose overflow the host has not been asked to report.
    pub(super) fn settle_unreported<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        for n in self.interrupting & self.overflowed {
            if self.bank.hosted.armed(n).is_none() {
                self.settle(CounterSet::of(n), host);
            }
        }
    }
}
