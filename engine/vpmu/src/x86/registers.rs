//! What a vendor's registers answer the [`Pmu`](super::Pmu) that owns them.
//!
//! # Why they only answer
//!
//! A write of an MSR has two sides: the register keeps a value, and the counters do something. When counts are taken,
//! and in which order the host is called, is the same for both vendors and easy to get wrong. So [`Registers`] know
//! neither counters nor host: a read answers with a [`Source`], a write with an [`Effect`], and the PMU alone acts on
//! them.

use super::status::Freeze;
use super::{CounterConfig, EventFilter, EventKind, RestoreError, lbr, pebs};
use crate::counter::{Counter, CounterSet, Lost, Policy, Slots};

/// What a [`Pmu`](super::Pmu) is made of. `C` is the vendor's capability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmuConfig<C> {
    /// What the guest finds.
    pub capability: C,
    /// Which events the guest may count.
    pub filter: EventFilter,
    /// When the host is asked for what.
    pub policy: Policy,
}

impl<C> PmuConfig<C> {
    /// Returns this capability with every event allowed and the cheapest policy.
    pub const fn new(capability: C) -> Self {
        Self {
            capability,
            // As KVM without a filter: an embedder that filters nothing need not know of filters.
            filter: EventFilter::deny_listed(),
            policy: Policy::ReusePaused,
        }
    }
}

/// What the registers have one counter do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
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
pub enum Source {
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
pub enum Effect {
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
pub struct Counted {
    /// The counters' values.
    pub(super) values: Slots<u64>,
    /// Counters that the global control register lets count.
    pub(super) gate: CounterSet,
    /// Counters' bits in the global status register.
    pub(super) overflowed: CounterSet,
    /// The other bits of the global status register.
    pub(super) status: u64,
    /// A PMI has been requested and not taken.
    pub(super) pmi_due: bool,
}

/// A vendor's registers: what a guest has written, and nothing that counting changes.
pub trait Registers: Clone {
    /// What the guest finds.
    type Capability: Copy;

    /// An MSR of such a PMU, whether or not the capability has it.
    type Msr: Copy;

    /// The registers and the counters as one plain value.
    type State;

    /// Returns the MSR at `address`; `None`: that is none of a PMU's.
    // Before any capability is asked: #GP is for an MSR that the guest lacks, `NotHandled` for all others.
    fn decode(&self, address: u32) -> Option<Self::Msr>;

    /// Returns the registers as they are after power-on reset.
    fn power_on(capability: Self::Capability) -> Self;

    /// Goes back to power-on reset.
    fn reset(&mut self);

    /// Returns what the guest is offered.
    fn capability(&self) -> Self::Capability;

    /// Says what a read of `msr` shows. `None`: #GP.
    fn read(&self, msr: Self::Msr) -> Option<Source>;

    /// Keeps `value`, and says what the write does to the counters. `None`: #GP, and nothing has changed.
    fn write(&mut self, msr: Self::Msr, value: u64) -> Option<Effect>;

    /// Returns the counter that RDPMC reads with this ECX, if it exists.
    fn indexed(&self, ecx: u32) -> Option<Counter>;

    /// Returns every counter there is.
    fn counters(&self) -> CounterSet;

    /// Returns `counters` as the global registers show them.
    fn global_bits(&self, counters: CounterSet) -> u64;

    /// Returns what the global control register lets count after power-on reset.
    fn gate_at_reset(&self) -> CounterSet;

    /// Returns what the registers have counter `n` do.
    fn control(&self, n: Counter) -> Control;

    /// Returns everything as one plain value.
    fn save(&self, counted: &Counted, lbr: Option<&lbr::Unit>) -> Self::State;

    /// Refuses a state that this capability cannot have come to.
    fn check(&self, state: &Self::State) -> Result<(), RestoreError>;

    /// Takes the registers from `state`, which [`check`](Self::check) has accepted, and returns the rest of it.
    fn restore(&mut self, state: &Self::State, lbr: Option<&mut lbr::Unit>) -> Counted;

    /// Returns whether the guest has a status register that shows which counters have overflowed.
    // AMD's older interfaces have none: there a write of the counter acknowledges.
    fn has_status(&self) -> bool {
        true
    }

    /// Returns how the request of a PMI stops the counters; `None`: they go on.
    fn freezing(&self) -> Option<Freeze> {
        None
    }

    /// Whether the request of a PMI stops the last branch records.
    fn freezes_branches(&self) -> bool {
        false
    }

    /// Returns last branch records as they are after power-on reset, where the guest has them.
    fn lbr(&self) -> Option<lbr::Unit> {
        None
    }

    /// Returns the registers of PEBS, where the guest has it.
    fn pebs(&self) -> Option<pebs::Registers> {
        None
    }
}
