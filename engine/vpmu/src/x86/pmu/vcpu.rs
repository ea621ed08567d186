//! What happens to a PMU beside the accesses of its guest: its vCPU runs and stops, is reset, saved and restored.

use super::Pmu;
use crate::counter::{Counter, CounterHost, CounterState, Events, Model, Report, Statistics};
use crate::x86::{
    ArchEvent, Capability, CounterConfig, EventFilter, PmuState, RestoreError, Ring, pebs,
};

impl<V: Events> Pmu<V> {
    /// Takes the host's report that `counter` has counted as far as was asked. Returns whether a PMI
    /// [is due](Self::pmi_due).
    ///
    /// With [`Report::Unsure`], reports may come late, early or for nothing. Works between
    /// [`put`](Self::put) and [`load`](Self::load) too, so that a report that arrives after its vCPU
    /// stopped still wakes it.
    pub fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) -> bool {
        let report = self.counters.pebs.sampling.report(counter, report);
        self.counters.report(counter, report, host);
        self.notice_freeze(host);
        self.counters.global.pmi_due
    }

    /// Counts `event` `times` times in `ring`: the embedder has emulated instructions for the guest, which no host
    /// event has seen. Returns whether a PMI [is due](Self::pmi_due).
    ///
    /// A guest that has no such event enabled costs no call of the host.
    pub fn emulated<H: CounterHost<CounterConfig>>(
        &mut self,
        event: ArchEvent,
        times: u64,
        ring: Ring,
        host: &mut H,
    ) -> bool {
        self.settle_acting(host);
        // A counter that the filter denies counts nothing, emulated or not.
        let counting = self.counters.enabled() & self.counters.bank.countable;
        let concerned = counting.filter(|n| {
            let config = self.counters.event(n);
            config.architectural() == Some(event)
                && config.counts_in(ring)
                && self.counters.bank.counters[n].lost.is_none()
                && self.counters.unsupported(n).is_none()
        });
        if !concerned.is_empty() {
            // Only a counter whose report must move has to be read for it.
            self.counters
                .settle(concerned & self.counters.reported(), host);
            for n in concerned {
                self.counters.take(n, times);
            }
            // Once for all counters: records of one moment come in the order of their numbers.
            self.counters.follow_up(host);
            self.counters.apply(host);
            self.notice_freeze(host);
        }
        self.counters.global.pmi_due
    }

    /// An overflow may have requested a PMI, and the request may have frozen the records: no PMI waits for any, and they are
    /// not the last ones when they are thawed.
    fn notice_freeze<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.counters.global.are_branches_frozen() {
            self.end_access(host);
        }
    }

    /// Starts what the guest has enabled, as the vCPU starts to run. A guest that has nothing enabled costs no call of
    /// the host. A host that was too busy to back a counter is asked again.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.counters.start_vcpu(host);
    }

    /// Stops all counters, as the vCPU stops running, and takes what they have counted into the registers, so that
    /// [`pmi_due`](Self::pmi_due) is exact. Ends the slice, as [`end_slice`](Self::end_slice) does. A guest that uses
    /// no counter costs no call of the host.
    ///
    /// Not needed where host events stop and start with the vCPU's thread by themselves.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.counters.stop_vcpu(host);
    }

    /// Stops counting until [`load`](Self::load), for a moment in which the vCPU runs and its host events would count the
    /// embedder's work. Unlike [`put`](Self::put), it ends no slice, and takes no counts: one call of the host. No call for a
    /// guest that uses no counter.
    pub fn hold<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.counters.hold_vcpu(host);
    }

    /// Ends a scheduling slice: releases the host events that the guest did not use in it, so that a guest that stops
    /// profiling costs nothing again. An embedder that never calls [`put`](Self::put) calls this at regular moments,
    /// minutes apart at most.
    pub fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_unreported(host);
        self.counters.bank_mut().hosted.end_slice(host);
        self.counters.ask_again();
        self.counters.apply(host);
    }

    /// Goes back to power-on reset, with every host event released: for a vCPU that is reset or goes
    /// away. INIT leaves a PMU as it is (SDM vol. 3A, table 10-1; APM vol. 2, table 14-1), but for
    /// [`disable_lbr`](Self::disable_lbr).
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.registers.reset();
        self.counters.reset(self.registers.gate_at_reset(), host);
        self.adopt_all();
        self.end_access(host);
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        self.settle_acting(host);
        self.counters.filter = filter;
        self.adopt_all();
        self.counters.apply(host);
    }

    /// Returns all that the guest could find out, up to this moment. Nothing stops: the PMU can go on.
    ///
    /// Not saved: what belongs to the machine rather than the guest (events, filter, policy).
    pub fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> PmuState {
        self.begin_access(host);
        self.counters.settle(self.counters.unsettled(), host);
        self.end_access(host);
        self.counters.apply(host);
        self.registers.save(&self.counters)
    }

    /// Goes on from `state`, in place of what was here: on a vCPU that runs, what is enabled
    /// counts at once.
    ///
    /// # Errors
    ///
    /// Refuses a state of another layout or another capability, or with bits set that do not exist.
    /// This PMU is then as it was.
    pub fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        // Before anything changes, so that a refused state leaves the PMU as it was.
        self.registers.check(state)?;
        self.reset(host);
        self.registers.restore(state, &mut self.counters);
        self.adopt_all();
        self.end_access(host);
        self.counters.apply(host);
        Ok(())
    }

    /// Returns what the guest is offered.
    pub fn capability(&self) -> Capability {
        self.registers.capability()
    }

    /// Returns how often the host was called, and what it could not do.
    pub const fn statistics(&self) -> Statistics {
        self.counters.bank.hosted.statistics()
    }

    /// Returns what became of the overflows of counters that ask for PEBS records.
    pub const fn pebs_statistics(&self) -> pebs::Statistics {
        self.counters.pebs.statistics
    }

    /// Returns what `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        let exists = self.counters.implemented().contains(counter);
        exists.then(|| self.counters.bank().state(counter, false))
    }

    /// Returns the observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.counters.bank.observer
    }

    /// Takes the counts of counters whose overflow the host has not been asked to report.
    fn settle_unreported<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let counters = &self.counters;
        for n in counters.interrupting & counters.global.overflowed | counters.recording {
            // An event that waits for its report reports its overflow by itself.
            if self.counters.bank().hosted.armed(n).is_none() {
                self.counters.settle(n.alone(), host);
            }
        }
    }
}
