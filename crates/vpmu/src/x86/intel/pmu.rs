//! One vCPU's PMU: what it holds, and its life.

use super::config::fixed_index;
use super::{
    Capability, ConfigError, FIXED, RawPerfEvtSel, Version, debugctl, fixed_ctrl, global_status,
};
use crate::counter::{
    CounterHost, CounterSet, CounterState, Events, HostEvents, Lost, Policy, Report, Slots,
    Statistics, count,
};
use crate::x86::{ArchEvent, CounterConfig, EventFilter, EventKind, Ring};

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

/// What the guest's registers say of one counter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// IA32_PERFEVTSELx; nothing for a fixed counter.
    pub(super) raw: RawPerfEvtSel,
    /// The guest's counter, without what the host has counted since it was last asked.
    pub(super) value: u64,
    /// Why the value is wrong.
    pub(super) lost: Option<Lost>,
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
    pub(super) hosted: HostEvents<CounterConfig>,

    pub(super) slots: Slots<Slot>,
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

    /// Whether the vCPU runs, so that counters may.
    pub(super) loaded: bool,
    /// Counters that the guest has enabled by their own controls.
    pub(super) enabled: CounterSet,
    /// Counters that ask for an interrupt.
    pub(super) interrupting: CounterSet,
    /// Counters for which a host event is to run when they are enabled.
    pub(super) countable: CounterSet,
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
            hosted: HostEvents::new(config.policy),
            config,
            events,
            slots: Slots::default(),
            fixed_ctrl: 0,
            global: CounterSet::EMPTY,
            overflowed: CounterSet::EMPTY,
            status: 0,
            debugctl: 0,
            pmi_due: false,
            loaded: true,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            countable: CounterSet::EMPTY,
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
        let counted = self.hosted.report(counter, report, host);
        self.note_deficit(counter);
        if !self.advance(counter, counted) {
            count(&mut self.hosted.statistics_mut().spurious_reports);
        }
        if self.due(counter).is_some() {
            // The host event may be further than what it reported, and is asked again from there.
            self.settle(CounterSet::of(counter), host);
        }
        self.apply(host);
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
        for n in self.active() {
            let config = self.counter_config(n);
            let same = config.architectural() == Some(event) && config.counts_in(ring);
            if same && self.slots[n].lost.is_none() && self.unsupported(n).is_none() {
                concerned.insert(n);
            }
        }
        if !concerned.is_empty() {
            // Only a counter whose report must move has to be read for it.
            self.settle(concerned & self.interrupting, host);
            for n in concerned {
                self.advance(n, times);
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
        if !self.loaded {
            self.loaded = true;
            self.ask_again();
            self.apply(host);
        }
    }

    /// The vCPU stops running: nothing counts, and all that was counted is in the registers, so
    /// [`pmi_due`](Self::pmi_due) is exact. It is the end of a slice (see
    /// [`end_slice`](Self::end_slice)). No call of the host for a guest that uses no counter.
    ///
    /// Not needed where host events stop and start with the vCPU's thread by themselves.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.loaded {
            self.loaded = false;
            self.apply(host);
            self.settle(self.hosted.unsettled(), host);
            self.hosted.end_slice(host);
        }
    }

    /// A scheduling slice has ended: host events that the guest did not use in it are released, so a
    /// guest that stops profiling costs nothing again. For hosts that have no use for
    /// [`put`](Self::put), at any regular moment, minutes apart at most.
    pub fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.settle_unreported(host);
        self.hosted.end_slice(host);
        self.ask_again();
        self.apply(host);
    }

    /// Back to power-on reset, with every host event released: for a vCPU that is reset or goes
    /// away. INIT leaves a PMU as it is (SDM vol. 3A, table 10-1).
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.hosted.release(self.hosted.backed(), host);
        for n in self.hosted.unsettled() {
            let _ = self.hosted.collect(n, host);
        }
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
        self.hosted.statistics()
    }

    /// What `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        if !self.implemented().contains(counter) {
            return None;
        }
        Some(match self.slots[counter].lost {
            Some(reason) => CounterState::Lost(reason),
            None if self.hosted.running().contains(counter) => CounterState::Counting,
            None => CounterState::Paused,
        })
    }

    /// The observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.events
    }

    /// Every counter there is.
    pub(super) const fn implemented(&self) -> CounterSet {
        self.config.capability.counters()
    }

    /// Counters that the guest has enabled in every way, and that may count.
    pub(super) fn active(&self) -> CounterSet {
        if self.status & global_status::CTR_FRZ != 0 {
            return CounterSet::EMPTY;
        }
        self.global & self.enabled & self.countable
    }

    pub(super) fn counter_config(&self, n: u8) -> CounterConfig {
        match fixed_index(n) {
            Some(fixed) => fixed_ctrl::config(self.fixed_ctrl, fixed),
            None => self.slots[n].raw.config(self.config.capability.version),
        }
    }

    /// Finds out anew what the registers of `counters` say, now that they may have changed. Losses
    /// are forgotten: the host is asked again.
    pub(super) fn classify(&mut self, counters: CounterSet) {
        for n in counters {
            let config = self.counter_config(n);
            let (on, interrupting) = match fixed_index(n) {
                Some(fixed) => {
                    let field = fixed_ctrl::field(self.fixed_ctrl, fixed);
                    (true, field & fixed_ctrl::PMI != 0)
                }
                None => {
                    let raw = self.slots[n].raw;
                    (raw.has(RawPerfEvtSel::EN), raw.has(RawPerfEvtSel::INT))
                }
            };
            put(&mut self.enabled, n, on && (config.user || config.kernel));
            put(&mut self.interrupting, n, interrupting);
            put(
                &mut self.countable,
                n,
                self.config.filter.allows(config.event),
            );
            self.slots[n].lost = None;
        }
    }

    /// Why no host can count what `n` is to count, as far as the PMU itself knows.
    pub(super) fn unsupported(&self, n: u8) -> Option<Lost> {
        let any_thread = match fixed_index(n) {
            Some(fixed) => fixed_ctrl::field(self.fixed_ctrl, fixed) & fixed_ctrl::ANY_THREAD != 0,
            None => self.slots[n].raw.has(RawPerfEvtSel::ANY_THREAD),
        };
        let config = self.counter_config(n);
        let absent = match (config.event, config.event.architectural()) {
            (EventKind::General { .. }, Some(event)) => !self.config.capability.has_event(event),
            _ => false,
        };
        // The other threads of the core are not the guest's, whatever it is told.
        (any_thread || absent).then_some(Lost::Unsupported)
    }

    pub(super) fn lose(&mut self, n: u8, reason: Lost) {
        self.slots[n].lost = Some(reason);
        self.countable.remove(n);
        self.events.lost(n, reason);
    }

    /// Counters that the host could not back for a reason that may pass.
    fn ask_again(&mut self) {
        let mut again = CounterSet::EMPTY;
        for n in self.implemented() - self.countable {
            if matches!(self.slots[n].lost, Some(Lost::Busy | Lost::Failed)) {
                again.insert(n);
            }
        }
        self.classify(again);
    }

    /// Registers as after power-on reset: general counters are enabled globally (SDM vol. 3A, table
    /// 10-1), everything else is zero.
    pub(super) fn clear(&mut self) {
        self.slots = Slots::default();
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

fn put(set: &mut CounterSet, n: u8, member: bool) {
    if member {
        set.insert(n);
    } else {
        set.remove(n);
    }
}
