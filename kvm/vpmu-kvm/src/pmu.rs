//! One vCPU's PMU and its host, which need no descriptor of the vCPU.

use std::mem::discriminant;
use std::sync::Arc;

use vpmu::counter::{Counter, CounterHost, CounterState, Policy, Report};
#[cfg(feature = "lbr")]
use vpmu::x86::lbr::{self, Branch, MAX_DEPTH};
use vpmu::x86::{
    self, ArchEvent, Capability, CounterConfig, Outcome, PmuConfig, PmuState, RestoreError, Ring,
    amd, intel,
};
use vpmu_perf::PerfHost;
#[cfg(feature = "lbr")]
use vpmu_x86::Executed;

use crate::error::Error;
use crate::lapic::Pmi;
use crate::memory::GuestMemory;
use crate::offer::Pmu;
use crate::paravirt::{PMU_DOORBELL_MSR, Paravirtual};
use crate::state::SavedPmu;
#[cfg(fuzzing)]
use crate::state::State;
use crate::stats::{Exit, Shared, Statistics};

/// Makes the same call of a PMU of either kind.
macro_rules! each {
    ($engine:expr, $pmu:ident => $call:expr) => {
        match $engine {
            Engine::Architectural($pmu, _) => $call,
            Engine::Paravirtual($pmu) => $call,
        }
    };
}

/// A PMU of the kind that its guest is offered.
#[derive(Debug)]
enum Engine {
    Architectural(x86::Pmu, Policy),
    Paravirtual(Paravirtual),
}

/// The PMU, its host, and the statistics.
#[derive(Debug)]
pub(crate) struct VcpuPmu<H = PerfHost> {
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
            Engine::Paravirtual(pmu) => Pmu::Paravirtual(pmu.device.offer().clone()),
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
                if state.offer() == *pmu.device.offer() =>
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
                statistics.host = pmu.device.statistics();
                statistics.pebs = pmu.device.record_statistics();
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

/// Registers as KVM_GET_MSRS and KVM_SET_MSRS have them: accesses of the VMM's, for machines that save registers by number.
///
/// They differ from the guest's accesses as KVM's own do: a write of a read-only register that the guest's state needs
/// is taken, a counter is written whole by either of its names, and nothing is counted as an exit.
impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// Returns the value of an MSR, or `None` where the PMU has none that can be read.
    pub(crate) fn msr(&mut self, index: u32) -> Option<u64> {
        match each!(&mut self.engine, pmu => pmu.rdmsr(index, &mut self.host)) {
            Outcome::Value(value) => Some(value),
            Outcome::NotHandled | Outcome::Done | Outcome::GeneralProtection => None,
        }
    }

    /// Sets an MSR.
    pub(crate) fn set_msr(&mut self, index: u32, value: u64) -> Outcome {
        if index == PMU_DOORBELL_MSR && !self.is_architectural() {
            // The doorbell is a request, and no state.
            return Outcome::GeneralProtection;
        }
        let outcome = match self.with_register(index, value) {
            Some(state) => match self.restore(&state) {
                Ok(()) => Outcome::Done,
                Err(_) => Outcome::GeneralProtection,
            },
            None => each!(&mut self.engine, pmu => pmu.wrmsr(index, value, &mut self.host)),
        };
        self.publish();
        // A register that cannot be written may be given the value that it has.
        if outcome == Outcome::GeneralProtection && self.msr(index) == Some(value) {
            return Outcome::Done;
        }
        outcome
    }

    /// Returns the state with `value` in a register that a guest could not write so. `None`: the guest's way serves.
    fn with_register(&mut self, index: u32, value: u64) -> Option<SavedPmu> {
        // Saving reads each counter's event, which a plain register need not pay for.
        if !is_special(index) {
            return None;
        }
        let SavedPmu::Architectural(capability, mut state) = self.state() else {
            return None;
        };
        match &mut state {
            PmuState::Intel(registers) => match intel::Msr::decode(index)? {
                // KVM_SET_MSRS writes it, too: a status without its PMI would be lost in a migration.
                intel::Msr::GlobalStatus => registers.global_status = value,
                intel::Msr::Pmc(n) if n < registers.general.0 => {
                    // QEMU migrates counters by the legacy names, whose writes by a guest have 32 bits.
                    let mask = u64::MAX >> (64 - u32::from(registers.general.1));
                    *registers.pmc.get_mut(usize::from(n))? = value & mask;
                }
                _ => return None,
            },
            PmuState::Amd(registers) => match amd::Msr::decode(index)? {
                amd::Msr::GlobalStatus if registers.interface == amd::Interface::V2 => {
                    registers.global_status = value;
                }
                _ => return None,
            },
        }
        Some(SavedPmu::Architectural(capability, state))
    }
}

/// Branches that the guest has taken, for its last branch records.
#[cfg(feature = "lbr")]
impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// Returns how many branches more a PMI waits for; 0: none waits.
    pub(crate) fn branches_awaited(&self) -> u8 {
        match &self.engine {
            Engine::Architectural(pmu, _) => pmu.branches_awaited(),
            Engine::Paravirtual(_) => 0,
        }
    }

    /// Returns which branches the guest wants recorded.
    pub(crate) fn branch_filter(&self) -> Option<lbr::Filter> {
        match &self.engine {
            Engine::Architectural(pmu, _) => pmu.branch_filter(),
            Engine::Paravirtual(_) => None,
        }
    }

    /// The guest has taken `branches`, the oldest first.
    pub(crate) fn take_branches<'a>(&mut self, branches: impl Iterator<Item = &'a Branch>) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            for branch in branches {
                pmu.branch(branch, &mut self.host);
            }
        }
    }

    /// What was handed over are not the last branches that the guest has taken.
    pub(crate) fn lose_branches(&mut self) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            pmu.lose_branches();
        }
    }

    /// The guest is followed no longer.
    pub(crate) fn end_following(&mut self) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            pmu.end_following(&mut self.host);
        }
    }

    /// Nothing counts until [`load`](Self::load), where following the guest would be counted: by a clock, whose time goes
    /// on in the host.
    pub(crate) fn hold(&mut self) {
        // A hardware event counts the guest alone, and stands still by itself while the host works.
        if !self.misses_completed
            && let Engine::Architectural(pmu, _) = &mut self.engine
        {
            pmu.hold(&mut self.host);
        }
    }

    /// Returns the value of a register of a record, whose RDMSR is no exit.
    pub(crate) fn read_record(&mut self, msr: u32) -> Option<u64> {
        if !lbr::is_record(msr) {
            return None;
        }
        self.msr(msr)
    }

    /// Returns how many registers of records Linux reads behind this FROM (`intel_pmu_store_lbr`): with it three of each
    /// record, and the first FROM that is 0, as there is one where fewer calls are open. `None`: nobody knows, or this FROM is 0
    /// and Linux reads no more.
    pub(crate) fn expected_reads(&mut self, msr: u32) -> Option<u32> {
        let all = lbr::intel::FROM..lbr::intel::FROM + u32::from(MAX_DEPTH);
        let froms = all.contains(&msr).then_some(msr..all.end)?;
        let mut expected = 0_u32;
        for from in froms {
            match self.read_record(from) {
                Some(0) => return Some(expected).filter(|&reads| reads > 0),
                Some(_) => expected += 3,
                None => break,
            }
        }
        expected.checked_sub(1)
    }

    /// Counts a replay, and what was executed for this ring of the guest. `None`: it was dropped.
    pub(crate) fn count_replay(&mut self, executed: Option<Executed>, ring: Ring) {
        let mut statistics = self.statistics.lock();
        let replays = &mut statistics.replays;
        let Some(executed) = executed else {
            replays.dropped += 1;
            return;
        };
        replays.committed += 1;
        replays.reads += u64::from(executed.reads);
        replays.branches += u64::from(executed.taken);
        replays.instructions += u64::from(executed.instructions);
        drop(statistics);
        // No counter of the processor's has seen them.
        if self.misses_completed
            && let Engine::Architectural(pmu, _) = &mut self.engine
        {
            for (event, times) in [
                (ArchEvent::Instructions, executed.instructions),
                (ArchEvent::Branches, executed.branches),
            ] {
                pmu.emulated(event, times.into(), ring, &mut self.host);
            }
        }
    }
}

impl VcpuPmu {
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

fn is_special(index: u32) -> bool {
    use intel::Msr::{GlobalStatus, Pmc};

    matches!(intel::Msr::decode(index), Some(GlobalStatus | Pmc(_)))
        || amd::Msr::decode(index) == Some(amd::Msr::GlobalStatus)
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
