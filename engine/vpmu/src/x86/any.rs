//! A PMU of either vendor: for embedders that choose at run time, by what the host is.

use super::registers::{Control, Counted, Effect, Registers, Source};
use super::status::Freeze;
use super::{ArchEvent, Pmu, PmuConfig, RestoreError, amd, intel, lbr, pebs};
use crate::counter::{Counter, CounterSet, Events};

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

/// A PMU's registers as one plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PmuState {
    /// Intel's.
    Intel(intel::PmuState),
    /// AMD's.
    Amd(amd::PmuState),
}

/// One vCPU's PMU of either vendor.
pub type AnyPmu<V = ()> = Pmu<AnyRegisters, V>;

impl AnyPmu {
    /// Makes a PMU out of reset, for a vCPU that runs, without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn new(config: PmuConfig<Capability>) -> Result<Self, intel::ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> AnyPmu<V> {
    /// Makes a PMU as [`new`](AnyPmu::new) does, and reports to `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn with_events(
        config: PmuConfig<Capability>,
        events: V,
    ) -> Result<Self, intel::ConfigError> {
        // Nothing can be wrong with AMD's: no field of it contradicts another.
        if let Capability::Intel(capability) = &config.capability {
            capability.check()?;
        }
        Ok(Self::build(config, events))
    }
}

/// The registers of either vendor.
#[derive(Clone, Debug)]
pub enum AnyRegisters {
    /// Intel's.
    Intel(intel::Registers),
    /// AMD's.
    Amd(amd::Registers),
}

/// An MSR of a PMU of either vendor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnyMsr {
    /// Intel's.
    Intel(intel::Msr),
    /// AMD's.
    Amd(amd::Msr),
}

/// The same answer, whosever registers they are.
macro_rules! each {
    ($any:expr, $registers:ident => $answer:expr) => {
        match $any {
            AnyRegisters::Intel($registers) => $answer,
            AnyRegisters::Amd($registers) => $answer,
        }
    };
}

impl Registers for AnyRegisters {
    type Capability = Capability;
    type Msr = AnyMsr;
    type State = PmuState;

    fn decode(&self, address: u32) -> Option<AnyMsr> {
        match self {
            // A guest must not find the other vendor's registers, which have addresses of their own.
            Self::Intel(_) => intel::Msr::decode(address).map(AnyMsr::Intel),
            Self::Amd(_) => amd::Msr::decode(address).map(AnyMsr::Amd),
        }
    }

    fn power_on(capability: Capability) -> Self {
        match capability {
            Capability::Intel(capability) => Self::Intel(Registers::power_on(capability)),
            Capability::Amd(capability) => Self::Amd(Registers::power_on(capability)),
        }
    }

    fn reset(&mut self) {
        each!(self, registers => registers.reset());
    }

    fn capability(&self) -> Capability {
        each!(self, registers => registers.capability().into())
    }

    fn read(&self, msr: AnyMsr) -> Option<Source> {
        match (self, msr) {
            (Self::Intel(registers), AnyMsr::Intel(msr)) => registers.read(msr),
            (Self::Amd(registers), AnyMsr::Amd(msr)) => registers.read(msr),
            // `decode` makes none of these. An embedder that does has made an MSR that the guest lacks.
            (Self::Intel(_), AnyMsr::Amd(_)) | (Self::Amd(_), AnyMsr::Intel(_)) => None,
        }
    }

    fn write(&mut self, msr: AnyMsr, value: u64) -> Option<Effect> {
        match (self, msr) {
            (Self::Intel(registers), AnyMsr::Intel(msr)) => registers.write(msr, value),
            (Self::Amd(registers), AnyMsr::Amd(msr)) => registers.write(msr, value),
            (Self::Intel(_), AnyMsr::Amd(_)) | (Self::Amd(_), AnyMsr::Intel(_)) => None,
        }
    }

    fn indexed(&self, ecx: u32) -> Option<Counter> {
        each!(self, registers => registers.indexed(ecx))
    }

    fn counters(&self) -> CounterSet {
        each!(self, registers => registers.counters())
    }

    fn global_bits(&self, counters: CounterSet) -> u64 {
        each!(self, registers => registers.global_bits(counters))
    }

    fn gate_at_reset(&self) -> CounterSet {
        each!(self, registers => registers.gate_at_reset())
    }

    fn control(&self, n: Counter) -> Control {
        each!(self, registers => registers.control(n))
    }

    fn save(&self, counted: &Counted, lbr: Option<&lbr::Unit>) -> PmuState {
        match self {
            Self::Intel(registers) => PmuState::Intel(registers.save(counted, lbr)),
            Self::Amd(registers) => PmuState::Amd(registers.save(counted, lbr)),
        }
    }

    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.check(state),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.check(state),
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Err(RestoreError::Vendor)
            }
        }
    }

    fn restore(&mut self, state: &PmuState, lbr: Option<&mut lbr::Unit>) -> Counted {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.restore(state, lbr),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.restore(state, lbr),
            // `check` has refused it.
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Counted::default()
            }
        }
    }

    fn has_status(&self) -> bool {
        each!(self, registers => registers.has_status())
    }

    fn freezing(&self) -> Option<Freeze> {
        each!(self, registers => registers.freezing())
    }

    fn freezes_branches(&self) -> bool {
        each!(self, registers => registers.freezes_branches())
    }

    fn lbr(&self) -> Option<lbr::Unit> {
        each!(self, registers => registers.lbr())
    }

    fn pebs(&self) -> Option<pebs::Registers> {
        each!(self, registers => registers.pebs())
    }
}
