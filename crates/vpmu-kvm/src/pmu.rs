//! One vCPU's PMU and its host: the parts that need no descriptor.

#[cfg(feature = "lbr")]
mod branches;
mod engine;
mod host_access;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu::counter::{Counter, CounterHost, CounterState, Report};
use vpmu::x86::{CounterConfig, Outcome, Ring};

use crate::error::Error;
use crate::host::Host;
use crate::lapic::Pmi;
use crate::offer::Pmu;
use crate::state::SavedPmu;
use crate::{Exit, Statistics};
pub(crate) use engine::Engine;

/// The engine, its host, and the statistics.
#[derive(Debug)]
pub(crate) struct Core<H> {
    engine: Engine,
    pub(crate) host: H,
    /// Whether host events miss the instructions that are completed here. A clock has no instructions, and the time of an
    /// exit is in its count.
    pub(crate) misses_completed: bool,
    statistics: Arc<Mutex<Statistics>>,
}

impl<H: CounterHost<CounterConfig>> Core<H> {
    /// Makes the PMU of a vCPU that does not run. Nothing counts before [`load`](Self::load).
    pub(crate) fn new(mut engine: Engine, mut host: H) -> Self {
        // There is no thread yet whose events could count, and the engine begins with a vCPU that runs.
        engine.put(&mut host);
        Self {
            engine,
            host,
            misses_completed: false,
            statistics: Arc::new(Mutex::new(Statistics::new())),
        }
    }

    /// Makes the enabled counters count from now on.
    pub(crate) fn load(&mut self) {
        self.engine.load(&mut self.host);
    }

    pub(crate) fn offer(&self) -> Pmu {
        self.engine.offer()
    }

    pub(crate) fn is_architectural(&self) -> bool {
        self.engine.is_architectural()
    }

    pub(crate) fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        self.engine.counter_state(counter)
    }

    pub(crate) fn shared_statistics(&self) -> Arc<Mutex<Statistics>> {
        Arc::clone(&self.statistics)
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the PMU's state up to this moment, in which the guest does not run. Nothing stops.
    pub(crate) fn save(&mut self) -> SavedPmu {
        let state = self.engine.save(&mut self.host);
        self.publish();
        state
    }

    /// Continues from `state`. An error leaves everything as it was.
    pub(crate) fn restore(&mut self, state: &SavedPmu, loaded: bool) -> Result<(), Error> {
        self.engine.restore(state, &mut self.host, loaded)?;
        self.publish();
        Ok(())
    }

    pub(crate) fn reset(&mut self) {
        self.engine.reset(&mut self.host);
        self.publish();
    }

    /// Gives back host events that the guest has not used since the last call.
    pub(crate) fn end_slice(&mut self) {
        self.engine.end_slice(&mut self.host);
        self.publish();
    }

    pub(crate) fn rdmsr(&mut self, index: u32) -> Outcome {
        let outcome = self.engine.rdmsr(index, &mut self.host);
        self.note_access(outcome, Exit::MsrRead(index), Ring::Kernel);
        outcome
    }

    pub(crate) fn wrmsr(&mut self, index: u32, value: u64) -> Outcome {
        let outcome = self.engine.wrmsr(index, value, &mut self.host);
        self.note_access(outcome, Exit::MsrWrite(index), Ring::Kernel);
        outcome
    }

    /// Performs RDPMC, by `ring` of the guest, which may.
    pub(crate) fn rdpmc(&mut self, index: u32, ring: Ring) -> Outcome {
        let outcome = self.engine.rdpmc(index, &mut self.host);
        self.note_access(outcome, Exit::Rdpmc, ring);
        outcome
    }

    /// Handles the overflow of a host event.
    pub(crate) fn overflow(&mut self, counter: Counter, report: Report) {
        self.engine.overflow(counter, report, &mut self.host);
    }

    pub(crate) fn pmi_is_due(&self) -> bool {
        self.engine.interrupt_is_due()
    }

    /// Returns how to deliver the PMI that is due. The PMI is then not due any more.
    pub(crate) fn take_pmi(&mut self, lvtpc: u32) -> Option<Pmi> {
        // The interrupt is taken even where LVTPC is masked: an edge that finds the mask set is lost on a processor, too.
        if !self.engine.take_interrupt() {
            return None;
        }
        let pmi = Pmi::of(lvtpc);
        let mut statistics = self.statistics();
        match pmi {
            None => statistics.masked_pmis += 1,
            Some(_) => statistics.pmis += 1,
        }
        drop(statistics);
        pmi
    }

    /// Shows the engine's statistics to other threads. An access does not: the copy takes a tenth of the access's time,
    /// and who compares two moments makes them by exits of the VMM's.
    pub(crate) fn publish(&self) {
        let mut statistics = self.statistics();
        (statistics.host, statistics.pebs, statistics.lbr) = self.engine.statistics();
    }

    fn note_access(&mut self, outcome: Outcome, exit: Exit, ring: Ring) {
        let completed = match outcome {
            Outcome::NotHandled => return,
            Outcome::GeneralProtection => false,
            Outcome::Value(_) | Outcome::Done => true,
        };
        self.statistics().count(exit);
        // The instruction retires in no guest mode, so that no counter of the processor's has seen it. It retires under what it
        // has written.
        if completed && self.misses_completed {
            self.engine.completed(ring, &mut self.host);
        }
    }
}

impl Core<Host> {
    /// Hands over the overflows that perf has signalled. Returns whether there were any.
    pub(crate) fn take_overflows(&mut self) -> bool {
        let Some(overflows) = self.host.overflows() else {
            return false;
        };
        // Each is handed over alone: the guest may have asked for a PMI, a record or a freeze for any of them.
        for (counter, report) in overflows {
            self.overflow(counter, report);
        }
        true
    }

    /// Releases the thread whose perf events count. The registers, or the page, then have all counts.
    pub(crate) fn unbind(&mut self) {
        if matches!(self.host, Host::Unbound) {
            return;
        }
        // Overflows that were noted on the old thread are lost with its notes.
        self.take_overflows();
        self.engine.put(&mut self.host);
        let state = self.engine.save(&mut self.host);
        self.publish();
        // The reset gives all host events back, the restore brings back what they have counted.
        self.engine.reset(&mut self.host);
        self.host = Host::Unbound;
        let restored = self.engine.restore(&state, &mut self.host, false);
        // Nothing can be done about an error: the PMU would be one out of reset, and its guest would count on.
        debug_assert_eq!(restored, Ok(()), "it is its own");
    }

    /// Makes the device of a paravirtual PMU leave its guest, which takes no host.
    pub(crate) fn leave(&mut self) {
        if let Engine::Paravirtual(pmu) = &mut self.engine {
            pmu.leave(&mut self.host);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
