//! One vCPU's PMU, and how it begins.

use super::{Capability, ConfigError, Registers};
use crate::counter::Events;
use crate::x86::{pmu, registers};

/// What a [`Pmu`] is, as opposed to what it holds.
pub type PmuConfig = registers::PmuConfig<Capability>;

/// One vCPU's PMU. `V` observes what happens; the default observes nothing.
///
/// General counter *n* is *n*, fixed counter *n* is
/// [`FIXED`](super::FIXED) + *n*.
///
/// ```
/// # use core::num::NonZeroU64;
/// # use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
/// # #[derive(Default)]
/// # struct Host(u64);
/// # impl CounterHost<vpmu::x86::CounterConfig> for Host {
/// #     fn create(&mut self, _: Counter, _: &vpmu::x86::CounterConfig) -> Result<(), Lost> { Ok(()) }
/// #     fn set_period(&mut self, _: Counter, _: Option<NonZeroU64>) {}
/// #     fn resume(&mut self, _: CounterSet) {}
/// #     fn pause(&mut self, _: CounterSet) {}
/// #     fn read(&mut self, _: Counter) -> u64 { self.0 }
/// #     fn release(&mut self, _: Counter) {}
/// # }
/// use vpmu::counter::Report;
/// use vpmu::x86::intel::{Capability, Pmu, PmuConfig, Version};
/// use vpmu::x86::{Outcome, Ring};
///
/// let mut host = Host::default();
/// let mut pmu = Pmu::new(PmuConfig::new(Capability::new(Version::V2)))?;
///
/// // The guest samples every 1000 instructions in counter 0.
/// for (msr, value) in [
///     (0x186, 0x0053_00c0),                // IA32_PERFEVTSEL0: EN, INT, OS, USR, instructions
///     (0x4c1, (1 << 48) - 1000),           // IA32_A_PMC0
///     (0x38f, 1),                          // IA32_PERF_GLOBAL_CTRL
/// ] {
///     match pmu.wrmsr(msr, value, &mut host) {
///         Outcome::Done => { /* step over the instruction */ }
///         Outcome::GeneralProtection => { /* inject #GP(0) */ }
///         Outcome::NotHandled | Outcome::Value(_) => { /* as for any unknown MSR */ }
///     }
/// }
///
/// // The host has counted them, and says so.
/// host.0 = 1000;
/// assert!(pmu.overflow(Counter::at::<0>(), Report::Due, &mut host));
/// assert!(pmu.take_pmi(), "deliver what LVTPC says");
/// assert!(!pmu.take_pmi(), "once for each overflow");
///
/// // The guest's handler reads and acknowledges.
/// assert_eq!(pmu.rdmsr(0x38e, &mut host), Outcome::Value(1));
/// assert_eq!(pmu.rdpmc(0, Ring::Kernel, false, &mut host), Outcome::Value(0));
/// assert_eq!(pmu.wrmsr(0x390, 1, &mut host), Outcome::Done);
/// # Ok::<(), vpmu::x86::intel::ConfigError>(())
/// ```
pub type Pmu<V = ()> = pmu::Pmu<Registers, V>;

impl Pmu {
    /// Makes a PMU out of reset, for a vCPU that runs (see [`put`](Self::put)), without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn new(config: PmuConfig) -> Result<Self, ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> Pmu<V> {
    /// Makes a PMU as [`new`](Pmu::new) does, and reports to `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn with_events(config: PmuConfig, events: V) -> Result<Self, ConfigError> {
        config.capability.check()?;
        Ok(Self::build(config, events))
    }

    /// Returns IA32_DEBUGCTL, for the implementer of its other bits.
    pub const fn debugctl(&self) -> u64 {
        self.registers().debugctl
    }
}
