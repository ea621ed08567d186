//! One vCPU's PMU: what it holds, and its life.

use super::config::fixed_index;
use super::{
    Capability, ConfigError, FIXED, RawPerfEvtSel, Version, debugctl, fixed_ctrl, global_status,
};
use crate::counter::{
    Bank, CounterHost, CounterSet, CounterState, Events, Model, Policy, Report, Slots, Statistics,
};
use crate::x86::{ArchEvent, CounterConfig, EventFilter, Ring};

/// What a [`Pmu`] is, as opposed to what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PmuConfig {
    /// What the guest is told.
    pub capability: Capability,
    /// Which events it may count.
    pub filter: EventFilter,
    /// What is asked of the host when.
    pub policy: Policy,
}

impl PmuConfig {
    /// This capability, with every event allowed and the cheapest policy.
    pub const fn new(capability: Capability) -> Self {
        Self {
            capability,
            filter: EventFilter::deny_listed(),
            policy: Policy::ReusePaused,
        }
    }
}

/// One vCPU's PMU. `V` is told what happens; by default nobody is.
///
/// Counters are named as in a [`CounterSet`]: general counter *n* is *n*, fixed counter *n* is
/// [`FIXED`] + *n*. No call panics, whatever a guest writes and whatever a host answers.
///
/// ```
/// # use core::num::NonZeroU64;
/// # use vpmu::counter::{CounterHost, CounterSet, Lost};
/// # #[derive(Default)]
/// # struct Host(u64);
/// # impl CounterHost<vpmu::x86::CounterConfig> for Host {
/// #     fn create(&mut self, _: u8, _: &vpmu::x86::CounterConfig) -> Result<(), Lost> { Ok(()) }
/// #     fn set_period(&mut self, _: u8, _: Option<NonZeroU64>) {}
/// #     fn resume(&mut self, _: CounterSet) {}
/// #     fn pause(&mut self, _: CounterSet) {}
/// #     fn read(&mut self, _: u8) -> u64 { self.0 }
/// #     fn release(&mut self, _: u8) {}
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
/// assert!(pmu.overflow(0, Report::Due, &mut host));
/// assert!(pmu.take_pmi(), "deliver what LVTPC says");
/// assert!(!pmu.take_pmi(), "once for each overflow");
///
/// // The guest's handler looks and acknowledges.
/// assert_eq!(pmu.rdmsr(0x38e, &mut host), Outcome::Value(1));
/// assert_eq!(pmu.rdpmc(0, Ring::Kernel, false, &mut host), Outcome::Value(0));
/// assert_eq!(pmu.wrmsr(0x390, 1, &mut host), Outcome::Done);
/// # Ok::<(), vpmu::x86::intel::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pmu<V = ()> {
    pub(super) config: PmuConfig,
    pub(super) events: V,
    pub(super) bank: Bank<CounterConfig>,

    /// IA32_PERFEVTSELx.
    pub(super) selects: Slots<RawPerfEvtSel>,
    /// IA32_FIXED_CTR_CTRL.
    pub(super) fixed_ctrl: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub(super) global: CounterSet,
    /// Counters' bits in IA32_PERF_GLOBAL_STATUS.
    pub(super) overflowed: CounterSet,
    /// The other bits in it.
    pub(super) status: u64,
    pub(super) debugctl: u64,
    /// An overflow has requested a PMI that nobody has taken.
    pub(super) pmi_due: bool,

    /// Counters that the guest has enabled by their own controls.
    pub(super) enabled: CounterSet,
    /// Counters that ask for an interrupt.
    pub(super) interrupting: CounterSet,
}

impl Pmu {
    /// A PMU out of reset, on a vCPU that runs (see [`put`](Self::put)), that nobody watches.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn new(config: PmuConfig) -> Result<Self, ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> Pmu<V> {
    /// As [`new`](Pmu::new), and `events` is told what happens.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn with_events(config: PmuConfig, events: V) -> Result<Self, ConfigError> {
        config.capability.check()?;
        let mut pmu = Self {
            bank: Bank::new(config.policy),
            config,
            events,
            selects: Slots::default(),
            fixed_ctrl: 0,
            global: CounterSet::EMPTY,
            overflowed: CounterSet::EMPTY,
            status: 0,
            debugctl: 0,
            pmi_due: false,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
        };
        pmu.clear();
        Ok(pmu)
    }

    /// The host reports that `counter` has counted as far as was asked. Answers whether a PMI
    /// [is due](Self::pmi_due).
    ///
    /// With [`Report::Unsure`], reports may come late, early or for nothing. Works between
    /// [`put`](Self::put) and [`load`](Self::load) too, so that a report that arrives after its vCPU
    /// stopped still wakes it.
    pub fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: u8,
        report: Report,
        host: &mut H,
    ) -> bool {
        self.report(counter, report, host);
        self.pmi_due
    }

    /// The embedder has emulated instructions for the guest, and so did `times` times what `event`
    /// counts, in `ring`: no host event has seen it. Answers whether a PMI
    /// [is due](Self::pmi_due).
    ///
    /// A guest that has no such event enabled costs no call of the host.
    pub fn emulated<H: CounterHost<CounterConfig>>(
        &mut self,
        event: ArchEvent,
        times: u64,
        ring: Ring,
        host: &mut H,
    ) -> bool {
        self.settle_freeze(host);
        let mut concerned = CounterSet::EMPTY;
        for n in self.enabled() & self.bank.countable {
            let config = self.event(n);
            let same = config.architectural() == Some(event) && config.counts_in(ring);
            if same && self.bank.counters[n].lost.is_none() && self.unsupported(n).is_none() {
                concerned.insert(n);
            }
        }
        if !concerned.is_empty() {
            // Only a counter whose report must move has to be read for it.
            self.settle(concerned & self.interrupting, host);
            for n in concerned {
                self.take(n, times);
            }
            self.apply(host);
        }
        self.pmi_due
    }

    /// Whether an overflow has requested a PMI that [`take_pmi`](Self::take_pmi) has not taken.
    /// Every call of this PMU that takes a host can set it.
    pub const fn pmi_due(&self) -> bool {
        self.pmi_due
    }

    /// Takes the PMI that is due, if one is. The caller delivers it as LVTPC says; if LVTPC is
    /// masked, it is lost, and the next overflow requests the next.
    ///
    /// Overflows that were counted since the last call are one PMI, as they are in a local APIC
    /// that has not delivered the first of them.
    #[must_use = "the PMI is gone unless the caller delivers it"]
    pub const fn take_pmi(&mut self) -> bool {
        core::mem::replace(&mut self.pmi_due, false)
    }

    /// The vCPU starts to run: what the guest has enabled counts again. No call of the host for a
    /// guest that has nothing enabled. A host that was too busy to back a counter is asked again.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.start_vcpu(host);
    }

    /// The vCPU stops running: nothing counts, and all that was counted is in the registers, so
    /// [`pmi_due`](Self::pmi_due) is exact. It is the end of a slice (see
    /// [`end_slice`](Self::end_slice)). No call of the host for a guest that uses no counter.
    ///
    /// Not needed where host events stop and start with the vCPU's thread by themselves.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.stop_vcpu(host);
    }

    /// A scheduling slice has ended: host events that the guest did not use in it are released, so a
    /// guest that stops profiling costs nothing again. For hosts that have no use for
    /// [`put`](Self::put), at any regular moment, minutes apart at most.
    pub fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_unreported(host);
        self.bank.hosted.end_slice(host);
        self.ask_again();
        self.apply(host);
    }

    /// Back to power-on reset, with every host event released: for a vCPU that is reset or goes
    /// away. INIT leaves a PMU as it is (SDM vol. 3A, table 10-1).
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.bank.reset(host);
        self.clear();
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        self.settle_freeze(host);
        self.config.filter = filter;
        self.classify(self.implemented());
        self.apply(host);
    }

    /// What the guest is told.
    pub const fn capability(&self) -> &Capability {
        &self.config.capability
    }

    /// IA32_DEBUGCTL, for whoever implements its other bits.
    pub const fn debugctl(&self) -> u64 {
        self.debugctl
    }

    /// How often the host was called, and what it could not do.
    pub const fn statistics(&self) -> Statistics {
        self.bank.hosted.statistics()
    }

    /// What `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        let exists = self.implemented().contains(counter);
        exists.then(|| self.bank.state(counter, false))
    }

    /// The observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.events
    }

    /// Finds out anew what the registers of `counters` say, now that they may have changed. Losses
    /// are forgotten: the host is asked again.
    pub(super) fn classify(&mut self, counters: CounterSet) {
        for n in counters {
            let config = self.event(n);
            let (on, interrupting) = match fixed_index(n) {
                Some(fixed) => {
                    let field = fixed_ctrl::field(self.fixed_ctrl, fixed);
                    (true, field & fixed_ctrl::PMI != 0)
                }
                None => {
                    let raw = self.selects[n];
                    (raw.has(RawPerfEvtSel::EN), raw.has(RawPerfEvtSel::INT))
                }
            };
            self.enabled.put(n, on && (config.user || config.kernel));
            self.interrupting.put(n, interrupting);
        }
        self.reclassify(counters);
    }

    /// Registers as after power-on reset: general counters are enabled globally (SDM vol. 3A, table
    /// 10-1), everything else is zero.
    pub(super) fn clear(&mut self) {
        self.selects = Slots::default();
        self.fixed_ctrl = 0;
        self.global = CounterSet::first(self.config.capability.general);
        self.overflowed = CounterSet::EMPTY;
        self.status = 0;
        self.debugctl = 0;
        self.pmi_due = false;
        self.classify(self.implemented());
    }

    /// Requests a PMI. The request, not its delivery, stops the counters if the guest wants that
    /// (SDM 19.4.7): LVTPC may be masked.
    pub(super) fn request_pmi(&mut self) {
        self.pmi_due = true;
        if self.debugctl & debugctl::FREEZE_PERFMON_ON_PMI == 0 {
            return;
        }
        if self.config.capability.version >= Version::V4 {
            self.status |= global_status::CTR_FRZ;
        } else {
            self.global = CounterSet::EMPTY;
        }
    }

    /// Whether `n` is the number of a counter that exists, general or fixed.
    pub(super) fn general(&self, n: u8) -> Option<u8> {
        (n < self.config.capability.general).then_some(n)
    }

    /// The number of fixed counter `n`, if it exists.
    pub(super) fn fixed(&self, n: u8) -> Option<u8> {
        let counter = n.checked_add(FIXED)?;
        self.implemented().contains(counter).then_some(counter)
    }
}
