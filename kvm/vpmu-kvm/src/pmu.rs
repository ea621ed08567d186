//! One vCPU's PMU and its host, which need no descriptor of the vCPU.

/// Makes the same call of a PMU of either kind.
// One choice for each call, and the same one in the files beside this.
macro_rules! each {
    ($engine:expr, $pmu:ident => $call:expr) => {
        match $engine {
            Engine::Architectural($pmu, _) => $call,
            Engine::Paravirtual($pmu) => $call,
        }
    };
}

#[cfg(feature = "lbr")]
mod branches;
mod host_access;

use std::mem::discriminant;
use std::sync::Arc;

use vpmu::counter::{Counter, CounterHost, CounterState, Policy, Report};
use vpmu::x86::{
    self, ArchEvent, Capability, CounterConfig, Outcome, PmuConfig, RestoreError, Ring,
};
use vpmu_perf::PerfHost;

use crate::error::Error;
use crate::lapic::Pmi;
use crate::memory::GuestMemory;
use crate::offer::Pmu;
use crate::paravirt::Paravirtual;
use crate::state::SavedPmu;
#[cfg(fuzzing)]
use crate::state::State;
use crate::stats::{Exit, Shared, Statistics};

/// A PMU of the kind that its guest is offered.
#[derive(Debug)]
enum Engine {
    Architectural(x86::Pmu, Policy),
    Paravirtual(Paravirtual),
}

/// The PMU, its host, and the statistics.
#[derive(Debug)]
pub(crate) struct VcpuPmu<H> {
    engine: Engine,
    /// The perf events of the vCPU's thread; `None`: there is no thread yet.
    pub(crate) host: Option<H>,
    /// Whether host events miss the instructions that are completed here. A clock has no instructions, and the time of an
    /// exit is in its count.
    pub(crate) misses_completed: bool,
    statistics: Shared,
}

impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// Makes the PMU of a vCPU that has no thread yet. Nothing counts before it has a host and is [loaded](Self::load).
    pub(crate) fn new(
        pmu: &Pmu,
        policy: Policy,
        memory: Arc<dyn GuestMemory>,
        statistics: Shared,
    ) -> Result<Self, Error> {
        let mut engine = match pmu {
            Pmu::Architectural(capability) => {
                Engine::Architectural(architectural(*capability, policy)?, policy)
            }
            Pmu::Paravirtual(offer) => {
                Engine::Paravirtual(Paravirtual::new(offer.clone(), memory)?)
            }
        };
        // The engine begins with a vCPU that runs.
        each!(&mut engine, pmu => pmu.put(&mut None::<H>));
        Ok(Self {
            engine,
            host: None,
            misses_completed: false,
            statistics,
        })
    }

    /// Makes the enabled counters count from now on.
    pub(crate) fn load(&mut self) {
        each!(&mut self.engine, pmu => pmu.load(&mut self.host));
    }

    pub(crate) fn offer(&self) -> Pmu {
        match &self.engine {
            Engine::Architectural(pmu, _) => Pmu::Architectural(pmu.capability()),
            Engine::Paravirtual(pmu) => Pmu::Paravirtual(pmu.offer().clone()),
        }
    }

    pub(crate) fn is_architectural(&self) -> bool {
        matches!(self.engine, Engine::Architectural(..))
    }

    pub(crate) fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        each!(&self.engine, pmu => pmu.counter_state(counter))
    }

    /// Returns the PMU's state up to this moment, in which the guest does not run. Nothing stops.
    pub(crate) fn save(&mut self) -> SavedPmu {
        let state = self.state();
        self.publish();
        state
    }

    fn state(&mut self) -> SavedPmu {
        let host = &mut self.host;
        match &mut self.engine {
            Engine::Architectural(pmu, _) => {
                SavedPmu::Architectural(pmu.capability(), pmu.save(host))
            }
            Engine::Paravirtual(pmu) => SavedPmu::Paravirtual(pmu.save(host)),
        }
    }

    /// Continues from `state`. An error leaves everything as it was.
    pub(crate) fn restore(&mut self, state: &SavedPmu) -> Result<(), Error> {
        let host = &mut self.host;
        match (&mut self.engine, state) {
            (Engine::Paravirtual(pmu), SavedPmu::Paravirtual(state))
                if state.offer() == *pmu.offer() =>
            {
                pmu.restore(state, host)?;
            }
            (Engine::Architectural(pmu, policy), SavedPmu::Architectural(told, state)) => {
                let here = pmu.capability();
                // The same PMU keeps its host events: nothing has to be made anew for a guest that goes on here.
                if *told == here {
                    pmu.restore(state, host).map_err(Error::State)?;
                } else if discriminant(told) != discriminant(&here) {
                    // Otherwise neither the MSRs that come here nor CPUID would be the guest's.
                    return Err(Error::State(RestoreError::Vendor));
                } else {
                    let mut other = architectural(*told, *policy)?;
                    // This PMU asks nothing of the host, which still works for the present one.
                    other.put(host);
                    other.restore(state, host).map_err(Error::State)?;
                    // Only now, when the new PMU holds the state, may the old one give its host events back.
                    pmu.reset(host);
                    *pmu = other;
                    if host.is_some() {
                        pmu.load(host);
                    }
                }
            }
            _ => return Err(Error::OtherOffer),
        }
        self.publish();
        Ok(())
    }

    pub(crate) fn reset(&mut self) {
        each!(&mut self.engine, pmu => pmu.reset(&mut self.host));
        self.publish();
    }

    /// Gives back host events that the guest has not used since the last call.
    pub(crate) fn end_slice(&mut self) {
        each!(&mut self.engine, pmu => pmu.end_slice(&mut self.host));
        self.publish();
    }

    pub(crate) fn rdmsr(&mut self, index: u32) -> Outcome {
        let outcome = each!(&mut self.engine, pmu => pmu.rdmsr(index, &mut self.host));
        self.note_access(outcome, Exit::MsrRead(index), Ring::Kernel);
        outcome
    }

    pub(crate) fn wrmsr(&mut self, index: u32, value: u64) -> Outcome {
        let outcome = each!(&mut self.engine, pmu => pmu.wrmsr(index, value, &mut self.host));
        self.note_access(outcome, Exit::MsrWrite(index), Ring::Kernel);
        outcome
    }

    /// Performs RDPMC, by `ring` of the guest, which may.
    pub(crate) fn rdpmc(&mut self, index: u32, ring: Ring) -> Outcome {
        let host = &mut self.host;
        let outcome = match &mut self.engine {
            Engine::Architectural(pmu, _) => pmu.rdpmc(index, Ring::Kernel, true, host),
            // Its counts are in the page. The port of a rewritten RDPMC is then the VMM's.
            Engine::Paravirtual(_) => Outcome::NotHandled,
        };
        self.note_access(outcome, Exit::Rdpmc, ring);
        outcome
    }

    /// Handles the overflow of a host event.
    pub(crate) fn overflow(&mut self, counter: Counter, report: Report) {
        each!(&mut self.engine, pmu => {
            pmu.overflow(counter, report, &mut self.host);
        });
    }

    pub(crate) fn pmi_is_due(&self) -> bool {
        each!(&self.engine, pmu => pmu.pmi_due())
    }

    /// Returns how to deliver the PMI that is due. The PMI is then not due any more.
    pub(crate) fn take_pmi(&mut self, lvtpc: u32) -> Option<Pmi> {
        // The interrupt is taken even where LVTPC is masked: an edge that finds the mask set is lost on a processor, too.
        if !each!(&mut self.engine, pmu => pmu.take_pmi()) {
            return None;
        }
        let pmi = Pmi::of(lvtpc);
        let mut statistics = self.statistics.lock();
        match pmi {
            None => statistics.masked_pmis += 1,
            Some(_) => statistics.pmis += 1,
        }
        statistics.publish();
        drop(statistics);
        pmi
    }

    /// Shows the engine's statistics to other threads. An access does not: the copy takes a tenth of the access's time,
    /// and who compares two moments makes them by exits of the VMM's.
    pub(crate) fn publish(&self) {
        let mut statistics = self.statistics.lock();
        self.show(&mut statistics);
        statistics.publish();
    }

    fn show(&self, statistics: &mut Statistics) {
        match &self.engine {
            Engine::Architectural(pmu, _) => {
                statistics.host = pmu.statistics();
                statistics.pebs = pmu.pebs_statistics();
                statistics.lbr = pmu.lbr_statistics();
            }
            Engine::Paravirtual(pmu) => {
                statistics.host = pmu.statistics();
                statistics.pebs = pmu.record_statistics();
            }
        }
    }

    fn note_access(&mut self, outcome: Outcome, exit: Exit, ring: Ring) {
        let completed = match outcome {
            Outcome::NotHandled => return,
            Outcome::GeneralProtection => false,
            Outcome::Value(_) | Outcome::Done => true,
        };
        self.statistics.lock().count(exit);
        // The instruction retires in no guest mode, so that no counter of the processor's has seen it. It retires under what it
        // has written. A paravirtual PMU's guest exits by its driver alone, whose doorbells are no part of what it counts.
        if completed
            && self.misses_completed
            && let Engine::Architectural(pmu, _) = &mut self.engine
        {
            pmu.emulated(ArchEvent::Instructions, 1, ring, &mut self.host);
        }
    }
}

impl VcpuPmu<PerfHost> {
    /// As [`publish`](Self::publish), with what perf's host alone knows.
    pub(crate) fn publish_all(&self) {
        let mut statistics = self.statistics.lock();
        self.show(&mut statistics);
        if let Some(host) = &self.host {
            statistics.longest_stuck_ns = statistics.longest_stuck_ns.max(host.longest_stuck_ns());
        }
        statistics.publish();
    }

    /// Hands over the overflows that perf has signalled. Returns whether there were any.
    pub(crate) fn take_overflows(&mut self) -> bool {
        let signalled = self.host.as_mut().filter(|host| host.has_overflows());
        let Some(overflows) = signalled.map(PerfHost::take_overflows) else {
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
        if self.host.is_none() {
            return;
        }
        // Overflows that were noted on the old thread are lost with its notes.
        self.take_overflows();
        each!(&mut self.engine, pmu => pmu.put(&mut self.host));
        // After `put`: totals that stand still are read once.
        let state = self.save();
        self.publish_all();
        // The reset gives all host events back, the restore brings back what they have counted.
        each!(&mut self.engine, pmu => pmu.reset(&mut self.host));
        self.host = None;
        let restored = self.restore(&state);
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

fn architectural(capability: Capability, policy: Policy) -> Result<x86::Pmu, Error> {
    x86::Pmu::new(PmuConfig {
        policy,
        ..PmuConfig::new(capability)
    })
    .map_err(Error::Config)
}

/// The checks of a forged state that need no vCPU and no perf, for fuzz targets.
#[cfg(fuzzing)]
#[doc(hidden)]
impl State {
    /// Returns the state of a PMU that has done nothing yet.
    pub fn fresh(offer: &Pmu, memory: Arc<dyn GuestMemory>) -> Self {
        let pmu = VcpuPmu::<PerfHost>::new(offer, Policy::default(), memory, Shared::new());
        Self::new(pmu.ok().map(|mut pmu| pmu.save()), None)
    }

    /// Continues from the PMU's state. A state that is taken is saved as it was, and is taken again.
    pub fn try_restore(&self, memory: Arc<dyn GuestMemory>) {
        let (Ok(()), Some(saved)) = (self.check(), &self.pmu) else {
            return;
        };
        let offer = saved.offer();
        let pmu = VcpuPmu::<PerfHost>::new(&offer, Policy::default(), memory, Shared::new());
        if let Ok(mut pmu) = pmu
            && pmu.restore(saved).is_ok()
        {
            let again = pmu.save();
            pmu.restore(&again).expect("its own state");
            assert_eq!(pmu.save(), again);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
