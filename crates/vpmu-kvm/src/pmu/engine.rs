//! The engine's PMU of either kind.

use std::mem::discriminant;
use std::sync::Arc;

use vpmu::counter::{Counter, CounterHost, CounterState, Policy, Report, Statistics};
use vpmu::x86::{
    AnyPmu, ArchEvent, Capability, CounterConfig, Outcome, PmuConfig, RestoreError, Ring, lbr, pebs,
};

use crate::error::Error;
use crate::memory::GuestMemory;
use crate::offer::Pmu;
use crate::paravirt::Paravirtual;
use crate::state::SavedPmu;

/// A vCPU's PMU, of the kind that its guest is offered.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one for each vCPU")]
pub(crate) enum Engine {
    Architectural(AnyPmu, Policy),
    Paravirtual(Paravirtual),
}

use Engine::{Architectural, Paravirtual as Shared};

fn architectural(capability: Capability, policy: Policy) -> Result<AnyPmu, Error> {
    AnyPmu::new(PmuConfig {
        policy,
        ..PmuConfig::new(capability)
    })
    .map_err(Error::Config)
}

impl Engine {
    /// Makes the PMU out of reset.
    pub(crate) fn new(
        pmu: &Pmu,
        policy: Policy,
        memory: Arc<dyn GuestMemory>,
    ) -> Result<Self, Error> {
        Ok(match pmu {
            Pmu::Architectural(capability) => {
                Architectural(architectural(*capability, policy)?, policy)
            }
            Pmu::Paravirtual(offer) => Shared(Paravirtual::new(offer.clone(), memory)?),
        })
    }

    /// Makes an architectural PMU out of reset.
    pub(crate) fn of(capability: Capability, policy: Policy) -> Result<Self, Error> {
        Ok(Architectural(architectural(capability, policy)?, policy))
    }

    pub(crate) fn offer(&self) -> Pmu {
        match self {
            Architectural(pmu, _) => Pmu::Architectural(pmu.capability()),
            Shared(pmu) => Pmu::Paravirtual(pmu.offer().clone()),
        }
    }

    pub(crate) fn is_architectural(&self) -> bool {
        matches!(self, Architectural(..))
    }

    pub(crate) fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        match self {
            Architectural(pmu, _) => pmu.load(host),
            Shared(pmu) => pmu.load(host),
        }
    }

    pub(crate) fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        match self {
            Architectural(pmu, _) => pmu.put(host),
            Shared(pmu) => pmu.put(host),
        }
    }

    pub(crate) fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        match self {
            Architectural(pmu, _) => pmu.reset(host),
            Shared(pmu) => pmu.reset(host),
        }
    }

    pub(crate) fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        match self {
            Architectural(pmu, _) => pmu.end_slice(host),
            Shared(pmu) => pmu.end_slice(host),
        }
    }

    pub(crate) fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) {
        match self {
            Architectural(pmu, _) => {
                pmu.overflow(counter, report, host);
            }
            Shared(pmu) => pmu.overflow(counter, report, host),
        }
    }

    pub(crate) fn rdmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        index: u32,
        host: &mut H,
    ) -> Outcome {
        match self {
            Architectural(pmu, _) => pmu.rdmsr(index, host),
            Shared(pmu) => pmu.rdmsr(index),
        }
    }

    pub(crate) fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        index: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        match self {
            Architectural(pmu, _) => pmu.wrmsr(index, value, host),
            Shared(pmu) => pmu.wrmsr(index, value, host),
        }
    }

    /// Performs RDPMC for the guest's kernel. A paravirtual PMU has no RDPMC.
    pub(crate) fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        index: u32,
        host: &mut H,
    ) -> Outcome {
        match self {
            Architectural(pmu, _) => pmu.rdpmc(index, Ring::Kernel, true, host),
            // Its counts are in the page. The port of a rewritten RDPMC is then the VMM's.
            Shared(_) => Outcome::NotHandled,
        }
    }

    /// An instruction was completed for the guest. A paravirtual PMU's guest exits by its driver alone, whose doorbells are
    /// no part of what it counts.
    pub(crate) fn completed<H: CounterHost<CounterConfig>>(&mut self, ring: Ring, host: &mut H) {
        if let Architectural(pmu, _) = self {
            pmu.emulated(ArchEvent::Instructions, 1, ring, host);
        }
    }

    pub(crate) fn interrupt_is_due(&self) -> bool {
        match self {
            Architectural(pmu, _) => pmu.pmi_due(),
            Shared(pmu) => pmu.interrupt_is_due(),
        }
    }

    pub(crate) fn take_interrupt(&mut self) -> bool {
        match self {
            Architectural(pmu, _) => pmu.take_pmi(),
            Shared(pmu) => pmu.take_interrupt(),
        }
    }

    pub(crate) fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        match self {
            Architectural(pmu, _) => pmu.counter_state(counter),
            Shared(pmu) => pmu.counter_state(counter),
        }
    }

    pub(crate) fn statistics(&self) -> (Statistics, pebs::Statistics, lbr::Statistics) {
        match self {
            Architectural(pmu, _) => {
                let (pebs, lbr) = (pmu.pebs_statistics(), pmu.lbr_statistics());
                (pmu.statistics(), pebs, lbr)
            }
            Shared(pmu) => (pmu.statistics(), Default::default(), Default::default()),
        }
    }

    /// Returns the PMU that may have last branch records.
    #[cfg(feature = "lbr")]
    pub(crate) fn architectural_mut(&mut self) -> Option<&mut AnyPmu> {
        match self {
            Architectural(pmu, _) => Some(pmu),
            Shared(_) => None,
        }
    }

    pub(crate) fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> SavedPmu {
        match self {
            Architectural(pmu, _) => SavedPmu::Architectural(pmu.capability(), pmu.save(host)),
            Shared(pmu) => SavedPmu::Paravirtual(pmu.save(host)),
        }
    }

    /// Continues from `state`. An error leaves everything as it was.
    pub(crate) fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &SavedPmu,
        host: &mut H,
        loaded: bool,
    ) -> Result<(), Error> {
        match (self, state) {
            (Shared(pmu), SavedPmu::Paravirtual(state)) if state.offer() == *pmu.offer() => {
                pmu.restore(state, host)
            }
            (Architectural(pmu, policy), SavedPmu::Architectural(told, state)) => {
                let here = pmu.capability();
                // The same PMU keeps its host events: nothing has to be made anew for a guest that goes on here.
                if *told == here {
                    return pmu.restore(state, host).map_err(Error::State);
                }
                if discriminant(told) != discriminant(&here) {
                    // Otherwise neither the MSRs that come here nor CPUID would be the guest's.
                    return Err(Error::State(RestoreError::Vendor));
                }
                let mut other = architectural(*told, *policy)?;
                // This PMU asks nothing of the host, which still works for the present one.
                other.put(host);
                other.restore(state, host).map_err(Error::State)?;
                // Only now, when the new PMU holds the state, may the old one give its host events back.
                pmu.reset(host);
                *pmu = other;
                if loaded {
                    pmu.load(host);
                }
                Ok(())
            }
            _ => Err(Error::OtherOffer),
        }
    }
}
