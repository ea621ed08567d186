//! The registers of a PMU of either vendor, and what they answer the [`Pmu`](super::Pmu) that owns them.
//!
//! # Why they only answer
//!
//! A write of an MSR has two sides: the register keeps a value, and the counters do something. When counts are taken,
//! and in which order the host is called, is the same for both vendors and easy to get wrong. So [`Registers`] know
//! neither counters nor host: a read answers with a [`Source`], a write with an [`Effect`], and the PMU alone acts on
//! them.

use super::counters::Global;
use super::status::Freeze;
use super::{Capability, CounterConfig, EventKind, PmuState, RestoreError, amd, intel, lbr, pebs};
use crate::counter::{Counter, CounterSet, Lost, Slots};

/// What the registers have one counter do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Control {
    pub(super) event: CounterConfig,
    /// Enabled by its own register.
    pub(super) on: bool,
    /// Asks for an interrupt when it overflows.
    pub(super) interrupts: bool,
    /// Asks for a PEBS record when it overflows, in place of an interrupt.
    pub(super) records: bool,
    /// Its PEBS records have more groups than the basic one.
    pub(super) adaptive: bool,
    /// Why no host can count it.
    pub(super) unsupported: Option<Lost>,
    /// Which bits of the counter exist.
    pub(super) mask: u64,
}

impl Control {
    /// A counter that does not exist.
    pub(super) const NONE: Self = Self {
        event: CounterConfig {
            // Any event will do: without a ring the counter gets no host event.
            event: EventKind::Fixed(0),
            user: false,
            kernel: false,
            edge: false,
            invert: false,
            threshold: 0,
            only_c0: false,
        },
        on: false,
        interrupts: false,
        records: false,
        adaptive: false,
        unsupported: None,
        mask: 0,
    };

    /// Whether a counter that did what `self` says is concerned when it does what `next` says. What is in its records is
    /// decided when they are written.
    pub(super) fn is_changed_by(&self, next: &Self) -> bool {
        // The groups of a record are looked up when it is written, so they disturb no counting.
        let adaptive = next.adaptive;
        Self { adaptive, ..*self } != *next
    }

    /// Whether the counter does something else, or stands still, with `next`: more than what its overflow asks for.
    pub(super) fn counts_otherwise(&self, next: &Self) -> bool {
        Self {
            interrupts: next.interrupts,
            records: next.records,
            adaptive: next.adaptive,
            ..*self
        } != *next
    }
}

/// Where the value of a register that is read comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The register as it was written, or a constant.
    Register(u64),
    /// The value of this counter, which exists.
    Counter(Counter),
    /// The global status register: the bits of counters, and the others.
    Status,
    /// The global control register. An overflow can change it where it freezes the counters.
    Gate,
}

/// What the write of a register does to the counters. The register has its new value already; counts that the host
/// holds are still to be taken as the old value wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing: no counter is concerned.
    Nothing,
    /// The [`Control`] of these counters may have changed.
    Configure(CounterSet),
    // Apart from `Configure`: a handler closes and opens the gate for each sample, and no count is taken for that.
    /// The global control register now lets these counters count, and no other.
    Gate(CounterSet),
    /// This counter, which exists, has this value.
    Counter(Counter, u64),
    /// The guest clears bits of the global status register: those of counters, and others.
    ClearStatus(CounterSet, u64),
    /// The guest sets bits of the global status register: those of counters, and others.
    SetStatus(CounterSet, u64),
    // Not the new answer: the overflows so far have to be taken under the old one.
    /// The answer of [`Registers::freezing`] may have changed.
    Freezing,
    /// What an adaptive PEBS record holds has changed.
    RecordGroups,
    /// PEBS records go elsewhere.
    RecordArea,
}

/// What a guest can see of the counters beside its registers, as [`Registers`] save and restore it.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    /// The counters' values.
    pub(super) values: Slots<u64>,
    /// The global registers, and the PMI.
    pub(super) global: Global,
}

/// The registers of either vendor: what a guest has written, and nothing that counting changes.
#[derive(Clone, Debug)]
pub(super) enum Registers {
    Intel(intel::Registers),
    Amd(amd::Registers),
}

/// An MSR of a PMU of either vendor, whether or not the capability has it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Msr {
    Intel(intel::Msr),
    Amd(amd::Msr),
}

/// The same answer, whosever registers they are.
macro_rules! each {
    ($any:expr, $registers:ident => $answer:expr) => {
        match $any {
            Registers::Intel($registers) => $answer,
            Registers::Amd($registers) => $answer,
        }
    };
}

impl Registers {
    /// Returns the registers as they are after power-on reset.
    pub(super) fn power_on(capability: Capability) -> Self {
        match capability {
            Capability::Intel(capability) => Self::Intel(intel::Registers::power_on(capability)),
            Capability::Amd(capability) => Self::Amd(amd::Registers::power_on(capability)),
        }
    }

    /// Goes back to power-on reset.
    pub(super) fn reset(&mut self) {
        *self = Self::power_on(self.capability());
    }

    /// Returns what the guest is offered.
    pub(super) fn capability(&self) -> Capability {
        each!(self, registers => registers.capability.into())
    }

    /// Returns the MSR at `address`; `None`: that is none of a PMU's.
    // Before any capability is asked: #GP is for an MSR that the guest lacks, `NotHandled` for all others.
    pub(super) fn decode(&self, address: u32) -> Option<Msr> {
        match self {
            // A guest must not find the other vendor's registers, which have addresses of their own.
            Self::Intel(_) => intel::Msr::decode(address).map(Msr::Intel),
            Self::Amd(_) => amd::Msr::decode(address).map(Msr::Amd),
        }
    }

    /// Says what a read of `msr` shows. `None`: #GP.
    pub(super) fn read(&self, msr: Msr) -> Option<Source> {
        match (self, msr) {
            (Self::Intel(registers), Msr::Intel(msr)) => registers.read(msr),
            (Self::Amd(registers), Msr::Amd(msr)) => registers.read(msr),
            // `decode` makes none of these.
            (Self::Intel(_), Msr::Amd(_)) | (Self::Amd(_), Msr::Intel(_)) => None,
        }
    }

    /// Keeps `value`, and says what the write does to the counters. `None`: #GP, and nothing has changed.
    pub(super) fn write(&mut self, msr: Msr, value: u64) -> Option<Effect> {
        match (self, msr) {
            (Self::Intel(registers), Msr::Intel(msr)) => registers.write(msr, value),
            (Self::Amd(registers), Msr::Amd(msr)) => registers.write(msr, value),
            (Self::Intel(_), Msr::Amd(_)) | (Self::Amd(_), Msr::Intel(_)) => None,
        }
    }

    /// Returns the counter that RDPMC reads with this ECX, if it exists.
    pub(super) fn indexed(&self, ecx: u32) -> Option<Counter> {
        each!(self, registers => registers.indexed(ecx))
    }

    /// Returns every counter there is.
    pub(super) fn counters(&self) -> CounterSet {
        each!(self, registers => registers.capability.counters())
    }

    /// Returns `counters` as the global registers show them.
    pub(super) fn global_bits(&self, counters: CounterSet) -> u64 {
        match self {
            Self::Intel(_) => intel::to_global(counters),
            Self::Amd(_) => counters.bits().into(),
        }
    }

    /// Returns what the global control register lets count after power-on reset.
    pub(super) fn gate_at_reset(&self) -> CounterSet {
        match self {
            // General counters are enabled globally (SDM vol. 3A, table 10-1).
            Self::Intel(registers) => CounterSet::first(registers.capability.general),
            // Every counter: so it is, too, where no register says so.
            Self::Amd(registers) => registers.capability.counters(),
        }
    }

    /// Returns what the registers have counter `n` do.
    pub(super) fn control(&self, n: Counter) -> Control {
        each!(self, registers => registers.control(n))
    }

    /// Returns everything as one plain value.
    pub(super) fn save(&self, counted: &Counted, lbr: Option<&lbr::Unit>) -> PmuState {
        match self {
            Self::Intel(registers) => PmuState::Intel(registers.save(counted, lbr)),
            Self::Amd(registers) => PmuState::Amd(registers.save(counted, lbr)),
        }
    }

    /// Refuses a state that this capability cannot have come to.
    pub(super) fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.check(state),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.check(state),
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Err(RestoreError::Vendor)
            }
        }
    }

    /// Takes the registers from `state`, which [`check`](Self::check) has accepted, and returns the rest of it.
    pub(super) fn restore(&mut self, state: &PmuState, lbr: Option<&mut lbr::Unit>) -> Counted {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.restore(state, lbr),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.restore(state, lbr),
            // `check` has refused it.
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Counted::default()
            }
        }
    }

    /// Returns whether the guest has a status register that shows which counters have overflowed.
    // AMD's older interfaces have none: there a write of the counter acknowledges.
    pub(super) fn has_status(&self) -> bool {
        match self {
            Self::Intel(_) => true,
            Self::Amd(registers) => registers.capability.interface >= amd::Interface::V2,
        }
    }

    /// Returns how the request of a PMI stops the counters; `None`: they go on.
    pub(super) fn freezing(&self) -> Option<Freeze> {
        self.intel().and_then(intel::Registers::freezing)
    }

    /// Whether the request of a PMI stops the last branch records.
    pub(super) fn freezes_branches(&self) -> bool {
        self.intel().is_some_and(intel::Registers::freezes_branches)
    }

    /// Returns the registers of PEBS, where the guest has it.
    pub(super) fn pebs(&self) -> Option<pebs::Registers> {
        self.intel()?.pebs
    }

    fn intel(&self) -> Option<&intel::Registers> {
        match self {
            Self::Intel(registers) => Some(registers),
            Self::Amd(_) => None,
        }
    }

    /// Returns last branch records as they are after power-on reset, where the guest has them.
    pub(super) fn lbr(&self) -> Option<lbr::Unit> {
        match self {
            Self::Intel(registers) => registers.capability.lbr.map(lbr::Unit::intel),
            Self::Amd(registers) => registers.capability.offered_lbr().map(lbr::Unit::amd),
        }
    }
}
