//! The guest's counters and the host's events behind them.

use core::num::NonZeroU64;

use super::{Pmu, debugctl};
use crate::counter::{CounterHost, CounterSet, Events};
use crate::x86::CounterConfig;

/// A counter that is so many events from its overflow does not reach it within minutes. The end of
/// each slice looks at it, which is then soon enough.
const FAR: u64 = 1 << 40;

impl<V: Events> Pmu<V> {
    /// Brings the host to what the registers say. Does nothing where nothing changed.
    pub(super) fn apply<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.stop_unwanted(host);
        // What a counter has counted decides how far it is from its overflow, and may even be one,
        // which may stop all others. One that goes on as it was need not be asked.
        let mut owing = (self.wanted() - self.hosted.running()) & self.hosted.unsettled();
        for n in owing {
            let (config, due) = (self.counter_config(n), self.due(n));
            if self.hosted.keeps_period(n, &config, due) {
                owing.remove(n);
            }
        }
        self.settle(owing, host);
        self.stop_unwanted(host);

        for n in self.wanted() - self.hosted.running() {
            let started = match self.unsupported(n) {
                Some(reason) => Err(reason),
                None => {
                    let (config, due) = (self.counter_config(n), self.due(n));
                    self.hosted.start(n, config, due, host)
                }
            };
            if let Err(reason) = started {
                self.lose(n, reason);
            }
        }
        for n in self.hosted.running() {
            let due = self.due(n);
            if self.hosted.armed(n) != due {
                self.rearm(n, host);
            }
        }
        self.hosted.resume_started(host);
    }

    fn stop_unwanted<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.hosted
            .stop(self.hosted.running() - self.wanted(), host);
        for n in self.hosted.owing() {
            // It was read with the pause, so its report may never come.
            let counted = self.hosted.take_owed(n);
            self.note_deficit(n);
            self.advance(n, counted);
        }
    }

    /// Counters for which a host event is to run.
    fn wanted(&self) -> CounterSet {
        if self.loaded {
            self.active()
        } else {
            CounterSet::EMPTY
        }
    }

    /// The guest has given `n` another value or another wish for an interrupt.
    pub(super) fn rearm<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) {
        let due = self.due(n);
        if let Err(reason) = self.hosted.rearm(n, due, host) {
            self.lose(n, reason);
        }
    }

    /// Takes note of what the host has counted for `counters` since last time, as far as there can
    /// be anything.
    pub(super) fn settle<H: CounterHost<CounterConfig>>(
        &mut self,
        counters: CounterSet,
        host: &mut H,
    ) {
        for n in counters & self.hosted.unsettled() {
            let counted = self.hosted.collect(n, host);
            self.note_deficit(n);
            self.advance(n, counted);
        }
    }

    /// As [`settle`](Self::settle), because the guest looks: a policy may make more of it.
    pub(super) fn look<H: CounterHost<CounterConfig>>(&mut self, n: u8, host: &mut H) {
        let counted = self.hosted.read(n, host);
        self.note_deficit(n);
        self.advance(n, counted);
    }

    /// An overflow that stops all counters must be known before anything that comes after it.
    pub(super) fn settle_freeze<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI != 0 {
            self.settle(self.hosted.in_doubt(self.interrupting, host), host);
        }
    }

    /// `n` counts `events` more. Answers whether it overflows.
    pub(super) fn advance(&mut self, n: u8, events: u64) -> bool {
        if events == 0 || !self.implemented().contains(n) {
            return false;
        }
        let mask = self.config.capability.counter_mask(n);
        let slot = &mut self.slots[n];
        let room = mask - slot.value;
        slot.value = slot.value.wrapping_add(events) & mask;
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

    /// In how many events the host has to report that `n` overflows: 1 to 2^63; `None`: no report
    /// is wanted.
    pub(super) fn due(&self, n: u8) -> Option<NonZeroU64> {
        if !self.interrupting.contains(n) {
            return None;
        }
        let mask = self.config.capability.counter_mask(n);
        let distance = (mask - self.slots[n].value).wrapping_add(1);
        // A counter that has just overflowed is about to be written by the guest's handler. Asking
        // the host for what nobody expects would be a call for each PMI.
        let unexpected = self.overflowed.contains(n) && distance >= FAR;
        NonZeroU64::new(distance).filter(|_| !unexpected)
    }

    /// Looks at the counters whose overflow the host has not been asked to report.
    pub(super) fn settle_unreported<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        for n in self.interrupting & self.overflowed {
            if self.hosted.armed(n).is_none() {
                self.settle(CounterSet::of(n), host);
            }
        }
    }

    pub(super) fn note_deficit(&mut self, n: u8) {
        if let Some(reason) = self.hosted.deficit(n)
            && self.slots[n].lost.is_none()
            && self.implemented().contains(n)
        {
            // It goes on counting: too little is better than nothing, and known to be too little.
            self.slots[n].lost = Some(reason);
            self.events.lost(n, reason);
        }
    }
}
