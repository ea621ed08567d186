//! What the [`Pmu`] that Intel's and AMD's models share is made of: a configuration, and a vendor's
//! registers.

use super::pmu::Pmu;
use super::{CounterConfig, EventFilter};
use crate::counter::{CounterHost, CounterSet, Events, Lost, Policy};

/// What a [`Pmu`] is made of. `C` is the vendor's capability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmuConfig<C> {
    /// What the guest is told.
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
            filter: EventFilter::deny_listed(),
            policy: Policy::ReusePaused,
        }
    }
}

/// What the registers have one counter do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Control {
    pub(super) event: CounterConfig,
    /// Enabled by its own register.
    pub(super) on: bool,
    /// Asks for an interrupt when it overflows.
    pub(super) interrupts: bool,
    /// Asks for a PEBS record when it overflows, in place of an interrupt.
    pub(super) records: bool,
    /// Why no host can count it.
    pub(super) unsupported: Option<Lost>,
}

/// A vendor's registers, without the counters and their overflow bits.
pub trait Registers: Clone {
    /// What the guest is told.
    type Capability: Copy;

    /// An MSR of such a PMU, whether or not the capability has it.
    type Msr: Copy;

    fn decode(address: u32) -> Option<Self::Msr>;

    /// `None`: #GP.
    fn read<V: Events, H: CounterHost<CounterConfig>>(
        pmu: &mut Pmu<Self, V>,
        msr: Self::Msr,
        host: &mut H,
    ) -> Option<u64>;

    /// `None`: #GP, and nothing has changed.
    fn write<V: Events, H: CounterHost<CounterConfig>>(
        pmu: &mut Pmu<Self, V>,
        msr: Self::Msr,
        value: u64,
        host: &mut H,
    ) -> Option<()>;

    /// The counter that RDPMC reads with this ECX, if it exists.
    fn indexed(&self, ecx: u32) -> Option<u8>;

    /// As after power-on reset.
    fn power_on(capability: Self::Capability) -> Self;

    fn capability(&self) -> &Self::Capability;

    /// Every counter there is.
    fn counters(&self) -> CounterSet;

    /// Which bits of counter `n` exist.
    fn counter_mask(&self, n: u8) -> u64;

    fn control(&self, n: u8) -> Control;

    /// Counters that the global registers let count.
    fn gate(&self) -> CounterSet;

    /// Whether the request of an interrupt stops all counters.
    fn freezes(&self) -> bool {
        false
    }

    /// Stops all counters, if that is wanted of the request of an interrupt.
    fn freeze(&mut self) {}

    /// Writes the PEBS records of the overflows that wait for one.
    fn record<V: Events, H: CounterHost<CounterConfig>>(pmu: &mut Pmu<Self, V>, host: &mut H) {
        let _ = (pmu, host);
    }

    /// The groups of a PEBS record of counter `n`'s, beyond the basic one.
    fn record_groups(&self, n: u8) -> u64 {
        let _ = n;
        0
    }

    /// Whether the guest sees who has overflowed, until it clears that by itself.
    fn has_status(&self) -> bool {
        true
    }
}
