//! One vCPU's PMU, and how it begins.

use super::{Capability, Registers};
use crate::counter::Events;
use crate::x86::{pmu, registers};

/// What a [`Pmu`] is, as opposed to what it holds.
pub type PmuConfig = registers::PmuConfig<Capability>;

/// One vCPU's PMU. `V` observes what happens; the default observes nothing.
///
/// Counter *n* is *n* for a host and in a [`CounterSet`](crate::counter::CounterSet).
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
/// use vpmu::x86::amd::{Capability, Interface, Pmu, PmuConfig};
/// use vpmu::x86::{Outcome, Ring};
///
/// let mut host = Host::default();
/// let mut pmu = Pmu::new(PmuConfig::new(Capability::new(Interface::Core)));
///
/// // The guest samples every 1000 instructions in counter 0.
/// for (msr, value) in [
///     (0xc001_0201, (1 << 48) - 1000),     // PERF_CTR0
///     (0xc001_0200, 0x0053_00c0),          // PERF_CTL0: EN, INT, OS, USR, instructions
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
///
/// // The guest's handler reads the counter, and begins anew.
/// assert_eq!(pmu.rdpmc(0, Ring::Kernel, false, &mut host), Outcome::Value(0));
/// assert_eq!(pmu.wrmsr(0xc001_0201, (1 << 48) - 1000, &mut host), Outcome::Done);
/// ```
pub type Pmu<V = ()> = pmu::Pmu<Registers, V>;

impl Pmu {
    /// Makes a PMU out of reset, for a vCPU that runs (see [`put`](Self::put)), without an observer.
    pub fn new(config: PmuConfig) -> Self {
        Self::with_events(config, ())
    }
}

impl<V: Events> Pmu<V> {
    /// Makes a PMU as [`new`](Pmu::new) does, and reports to `events` what happens.
    pub fn with_events(config: PmuConfig, events: V) -> Self {
        Self::build(config, events)
    }
}
