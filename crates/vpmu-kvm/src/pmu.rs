//! One vCPU's PMU and its host: the parts that need no descriptor.

use std::mem::discriminant;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vpmu::counter::{CounterHost, Policy, Report};
use vpmu::x86::{
    AnyPmu, Capability, CounterConfig, Outcome, PmuConfig, PmuState, RestoreError, Ring,
};

use crate::error::Error;
use crate::host::Host;
use crate::lapic::Pmi;
use crate::{Exit, Statistics};

/// One vCPU's PMU as a value: everything that its guest could find out, and the PMU that it was
/// offered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The version of this layout.
    pub version: u32,
    /// The PMU that the guest was offered.
    pub capability: Capability,
    /// The registers, with all that has been counted.
    pub pmu: PmuState,
}

impl State {
    /// The oldest version is as this one, without PEBS, for formats that describe themselves.
    const VERSIONS: RangeInclusive<u32> = 2..=3;
}

/// The access is a general protection fault: inject #GP(0), and do not step over the instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gp;

/// The engine, its host, and the statistics.
#[derive(Debug)]
pub(crate) struct Core<H> {
    pmu: AnyPmu,
    pub(crate) host: H,
    policy: Policy,
    statistics: Arc<Mutex<Statistics>>,
}

fn engine(capability: Capability, policy: Policy) -> Result<AnyPmu, Error> {
    AnyPmu::new(PmuConfig {
        policy,
        ..PmuConfig::new(capability)
    })
    .map_err(Error::Config)
}

impl<H: CounterHost<CounterConfig>> Core<H> {
    /// Makes a PMU out of reset. Nothing counts before [`load`](Self::load).
    pub(crate) fn new(capability: Capability, policy: Policy, mut host: H) -> Result<Self, Error> {
        let mut pmu = engine(capability, policy)?;
        pmu.put(&mut host);
        Ok(Self {
            pmu,
            host,
            policy,
            statistics: Arc::new(Mutex::new(Statistics::new())),
        })
    }

    /// Makes the enabled counters count from now on.
    pub(crate) fn load(&mut self) {
        self.pmu.load(&mut self.host);
        self.note_calls();
    }

    pub(crate) fn pmu(&self) -> &AnyPmu {
        &self.pmu
    }

    pub(crate) fn shared_statistics(&self) -> Arc<Mutex<Statistics>> {
        Arc::clone(&self.statistics)
    }

    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn count(&self, exit: Exit) {
        self.statistics().count(exit);
    }

    /// Returns the PMU's state up to this moment, in which the guest does not run. Nothing stops.
    pub(crate) fn save(&mut self) -> State {
        let pmu = self.pmu.save(&mut self.host);
        self.note_calls();
        State {
            version: *State::VERSIONS.end(),
            capability: self.pmu.capability(),
            pmu,
        }
    }

    /// Continues from `state`. An error leaves everything as it was.
    pub(crate) fn restore(&mut self, state: &State, loaded: bool) -> Result<(), Error> {
        if !State::VERSIONS.contains(&state.version) {
            return Err(Error::StateVersion(state.version));
        }
        let here = self.pmu.capability();
        if discriminant(&state.capability) != discriminant(&here) {
            // Otherwise neither the MSRs that come here nor CPUID would be the guest's.
            return Err(Error::State(RestoreError::Vendor));
        }
        if state.capability == here {
            let done = self.pmu.restore(&state.pmu, &mut self.host);
            done.map_err(Error::State)?;
        } else {
            let mut other = engine(state.capability, self.policy)?;
            // This PMU asks nothing of the host, which still works for the present one.
            other.put(&mut self.host);
            let done = other.restore(&state.pmu, &mut self.host);
            done.map_err(Error::State)?;
            self.pmu.reset(&mut self.host);
            self.pmu = other;
            if loaded {
                self.pmu.load(&mut self.host);
            }
        }
        self.note_calls();
        Ok(())
    }

    pub(crate) fn reset(&mut self) {
        self.pmu.reset(&mut self.host);
        self.note_calls();
    }

    /// Gives back host events that the guest has not used since the last call.
    pub(crate) fn end_slice(&mut self) {
        self.pmu.end_slice(&mut self.host);
        self.note_calls();
    }

    pub(crate) fn rdmsr(&mut self, index: u32) -> Option<Result<u64, Gp>> {
        let outcome = self.pmu.rdmsr(index, &mut self.host);
        self.note_calls();
        let result = match outcome {
            Outcome::NotHandled => return None,
            Outcome::Value(value) => Ok(value),
            Outcome::Done | Outcome::GeneralProtection => Err(Gp),
        };
        self.count(Exit::MsrRead(index));
        Some(result)
    }

    pub(crate) fn wrmsr(&mut self, index: u32, value: u64) -> Option<Result<(), Gp>> {
        let outcome = self.pmu.wrmsr(index, value, &mut self.host);
        self.note_calls();
        let result = match outcome {
            Outcome::NotHandled => return None,
            Outcome::Done => Ok(()),
            Outcome::Value(_) | Outcome::GeneralProtection => Err(Gp),
        };
        self.count(Exit::MsrWrite(index));
        Some(result)
    }

    pub(crate) fn rdpmc(&mut self, index: u32) -> Result<u64, Gp> {
        let outcome = self.pmu.rdpmc(index, Ring::Kernel, true, &mut self.host);
        self.note_calls();
        self.count(Exit::Rdpmc);
        match outcome {
            Outcome::Value(value) => Ok(value),
            Outcome::Done | Outcome::GeneralProtection | Outcome::NotHandled => Err(Gp),
        }
    }

    /// Handles the overflow of a host event.
    pub(crate) fn overflow(&mut self, counter: u8, report: Report) {
        self.pmu.overflow(counter, report, &mut self.host);
        self.note_calls();
    }

    pub(crate) fn pmi_is_due(&self) -> bool {
        self.pmu.pmi_due()
    }

    /// Returns how to deliver the PMI that is due. The PMI is then not due any more.
    pub(crate) fn take_pmi(&mut self, lvtpc: u32) -> Option<Pmi> {
        if !self.pmu.take_pmi() {
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

    fn note_calls(&self) {
        let mut statistics = self.statistics();
        statistics.host = self.pmu.statistics();
        statistics.pebs = self.pmu.pebs_statistics();
    }
}

impl Core<Host> {
    /// Hands over the overflows that perf has signalled.
    pub(crate) fn take_overflows(&mut self) {
        for (counter, report) in self.host.overflows().into_iter().flatten() {
            self.overflow(counter, report);
        }
    }

    /// Releases the thread whose perf events count. The registers then have all counts.
    pub(crate) fn unbind(&mut self) {
        self.take_overflows();
        self.pmu.put(&mut self.host);
        let state = self.pmu.save(&mut self.host);
        self.note_calls();
        self.pmu.reset(&mut self.host);
        self.host = Host::Unbound;
        let restored = self.pmu.restore(&state, &mut self.host);
        debug_assert_eq!(restored, Ok(()), "it is its own");
    }
}

#[cfg(test)]
pub(crate) mod tests;
