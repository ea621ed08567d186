//! What a PMU is, as opposed to what it holds, and how it is saved: a choice of the vendor at run time, by what the host is.

use super::{ArchEvent, EventFilter, amd, intel, lbr};
use crate::counter::Policy;

/// What a guest finds of its PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Capability {
    /// Intel's.
    Intel(intel::Capability),
    /// AMD's.
    Amd(amd::Capability),
}

impl Capability {
    /// Returns whether `event` is backed by a counter that counts what the guest chooses.
    pub const fn has_event(&self, event: ArchEvent) -> bool {
        match self {
            Self::Intel(capability) => capability.has_event(event),
            Self::Amd(capability) => capability.has_event(event),
        }
    }

    /// Returns every MSR of a PMU of this vendor's, for an integration to intercept; those of PEBS and of last branch
    /// records where they are offered.
    // From the capability alone: a VMM sets its filter before there is a vCPU.
    pub fn msrs(&self) -> impl Iterator<Item = u32> + use<> {
        let (intel, amd) = match self {
            Self::Intel(capability) => (Some(capability.pebs.is_some()), None),
            Self::Amd(_) => (None, Some(amd::Msr::all())),
        };
        let (intel_lbr, amd_lbr) = match self {
            Self::Intel(capability) => (capability.lbr.map(|_| lbr::intel::msrs()), None),
            Self::Amd(capability) => (None, capability.offered_lbr().map(|_| lbr::amd::msrs())),
        };
        let lbr = (intel_lbr.into_iter().flatten()).chain(amd_lbr.into_iter().flatten());
        let intel = intel.into_iter().flat_map(|has_pebs| {
            let offered = move |msr: &intel::Msr| has_pebs || !msr.is_of_pebs();
            intel::Msr::all().filter(offered)
        });
        let amd = amd.into_iter().flatten();
        intel
            .map(intel::Msr::address)
            .chain(amd.map(amd::Msr::address))
            .chain(lbr)
    }
}

impl From<intel::Capability> for Capability {
    fn from(capability: intel::Capability) -> Self {
        Self::Intel(capability)
    }
}

impl From<amd::Capability> for Capability {
    fn from(capability: amd::Capability) -> Self {
        Self::Amd(capability)
    }
}

/// What a [`Pmu`](super::Pmu) is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmuConfig {
    /// What the guest finds.
    pub capability: Capability,
    /// Which events the guest may count.
    pub filter: EventFilter,
    /// When the host is asked for what.
    pub policy: Policy,
}

impl PmuConfig {
    /// Returns this capability with every event allowed and the cheapest policy.
    pub fn new(capability: impl Into<Capability>) -> Self {
        Self {
            capability: capability.into(),
            // As KVM without a filter: an embedder that filters nothing need not know of filters.
            filter: EventFilter::deny_listed(),
            policy: Policy::ReusePaused,
        }
    }
}

/// A PMU's registers as one plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PmuState {
    /// Intel's.
    Intel(intel::PmuState),
    /// AMD's.
    Amd(amd::PmuState),
}
