//! The emulated PMU: the engine performs accesses on a model, and host counters stand behind the guest's.
//! [`EmulatedPmu`] is this model over any host, and all accesses trap; [`BackedPmu`] is the same model on the counters
//! of a CPU.
//!
//! # Why it is built this way
//!
//! The cost of a trap is paid in any case. The engine can save everything that the host does because of the trap. Three
//! rules follow, and the calls they save are counted in [`Statistics`]:
//!
//! - *Only what changed is touched.* A host counter is created when a guest counter first has to
//!   count, and then kept: it is paused and resumed, given another period, but only a new event or
//!   filter replaces it. Writing a counter moves the guest's value, not the host's: the guest's
//!   counter is a value plus what the host has counted since. It is released when a whole slice
//!   between [`load`](EmulatedPmu::load) and [`put`](EmulatedPmu::put) went by without its use, so
//!   a guest that stops profiling costs nothing again.
//! - *Nothing is read twice.* After a pause a host counter's total stands still. The engine reads the total once, when
//!   it is first needed, and from then on the guest's value is exact.
//! - *An overflow report is asked for only where an interrupt depends on it*: the counter's bit in PMINTEN is set and
//!   its bit in PMOVS is not, or the counter carries into a CHAIN counter of which that is true. All other wraps are
//!   found when PMOVS or the counter is read, by arithmetic on totals, however many there were.
//!
//! The counters and the host events behind them are a bank that the models of x86 have, too
//! (`counter/bank.rs`); here are the registers over it. The interrupt line is computed from the
//! registers alone.
//!
//! # Choices where the architecture leaves one
//!
//! - An event counter that does not exist (n >= N) is UNDEFINED, direct or through PMXEV*_EL0, and
//!   so is PMXEVCNTR_EL0 with PMSELR_EL0.SEL = 31: required with FEAT_FGT, one of the permitted
//!   behaviours without (DDI 0487, K1.2.6).
//! - PMCR_EL0.{D, LC, X, DP} are all readable and writable, but for LC where it is RES1. D and LC work; X and DP have nothing to
//!   work on, as there is no trace unit here and nothing at EL1 or EL0 is prohibited.
//! - Registers whose reset value is UNKNOWN are zero after reset.
//! - Where an even counter and its CHAIN counter filter differently, a carry counts if it may have
//!   happened at a level that both count.

mod accesses;
mod backed;
mod config;
mod counters;
mod save;

use super::{CHAIN, CYCLE_COUNTER, CounterConfig, EventFilter, RawPmevtyper, SW_INCR, pmcr};
use crate::counter::{
    Bank, Counter, CounterHost, CounterSet, CounterState, Events, Model, Report, Slots, Statistics,
};

pub use backed::BackedPmu;
pub use config::{ConfigError, EmulatedConfig, Identity};

/// One vCPU's PMU. `V` observes what happens; the default observes nothing.
///
/// No call panics, whatever a guest writes and whatever a host answers.
#[derive(Clone, Debug)]
// No latch of the line, which could disagree with the registers that it comes from: `line_shown` is what the caller knows.
pub struct EmulatedPmu<V = ()> {
    config: EmulatedConfig,
    bank: Bank<CounterConfig, V>,

    /// PMCR_EL0's readable and writable bits.
    // Without P and C, which are commands, and without N and the identity, which are the configuration's.
    pmcr: u64,
    pmselr: u8,
    pmuserenr: u64,
    enabled: CounterSet,
    interrupting: CounterSet,
    overflowed: CounterSet,
    /// PMEVTYPERn_EL0 and PMCCFILTR_EL0.
    types: Slots<RawPmevtyper>,
    /// Cycles towards the next increment while PMCR_EL0.D divides: 0 to 63.
    prescaler: u8,
    /// The guest has its values in host counters that it reaches itself ([`BackedPmu`]): they
    /// overflow where the guest's do, and PMCR_EL0.E starts and stops them.
    open: bool,
    /// The level that [`Self::line_changed`] has returned last.
    line_shown: bool,
}

impl EmulatedPmu {
    /// Makes a PMU out of reset, for a vCPU that runs (see [`put`](Self::put)), without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a configuration the architecture has no room for.
    pub fn new(config: EmulatedConfig) -> Result<Self, ConfigError> {
        Self::with_events(config, ())
    }

    /// Returns a PMU without counters, for a place that needs a value before the
    /// configuration is known, such as a static. [`init`](Self::init) makes it the PMU that is wanted, where it stands: a
    /// PMU has some kilobytes, which a hypervisor's stack need not have.
    pub const fn vacant() -> Self {
        Self::vacant_with(())
    }
}

impl<V: Events> EmulatedPmu<V> {
    /// Makes a PMU as [`new`](EmulatedPmu::new) does, and reports to `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a configuration the architecture has no room for.
    pub fn with_events(config: EmulatedConfig, events: V) -> Result<Self, ConfigError> {
        config.check()?;
        let mut pmu = Self::vacant_with(events);
        pmu.set_config(&config);
        Ok(pmu)
    }

    const fn vacant_with(events: V) -> Self {
        let config = EmulatedConfig::VACANT;
        // All zeros, which a hypervisor's library need not have among its data. What is no zero comes with `set_config`.
        let mut bank = Bank::new(config.policy, CounterSet::EMPTY, events);
        bank.loaded = false;
        Self {
            bank,
            config,
            pmcr: 0,
            pmselr: 0,
            pmuserenr: 0,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            overflowed: CounterSet::EMPTY,
            types: Slots::filled(RawPmevtyper(0)),
            prescaler: 0,
            open: false,
            line_shown: false,
        }
    }

    /// Makes this PMU, whatever it was, the one that [`new`](EmulatedPmu::new) makes. Releases every host counter.
    /// Nothing larger than some words passes through the stack.
    ///
    /// # Errors
    ///
    /// As [`new`](EmulatedPmu::new). This PMU is then as it was.
    pub fn init<H: CounterHost<CounterConfig>>(
        &mut self,
        config: &EmulatedConfig,
        host: &mut H,
    ) -> Result<(), ConfigError> {
        config.check()?;
        self.reset(host);
        self.set_config(config);
        Ok(())
    }

    /// Gives a PMU out of reset another configuration, which is checked.
    fn set_config(&mut self, config: &EmulatedConfig) {
        self.config.clone_from(config);
        self.bank.hosted.restart(config.policy);
        self.bank.existing = CounterSet::first(config.counters) | CounterSet::of(CYCLE_COUNTER);
        self.bank.loaded = true;
        self.pmcr = self.config.res1_pmcr();
        self.reclassify(self.implemented());
    }

    /// Takes the host's report that `counter` has counted as far as was asked. Returns the level of the interrupt line.
    ///
    /// With [`Report::Unsure`], reports may come late, early or for nothing. Works between
    /// [`put`](Self::put) and [`load`](Self::load) too, so that a report that arrives after its vCPU
    /// stopped still wakes it.
    pub fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) -> bool {
        self.report(counter, report, host);
        self.line()
    }

    /// Returns the level of the overflow interrupt: whether an enabled counter's overflow bit is set. Only a call that
    /// takes a host can change the level.
    pub fn line(&self) -> bool {
        self.pmcr & pmcr::E != 0 && !(self.overflowed & self.interrupting).is_empty()
    }

    /// Returns the level of [`line`](Self::line) if it is another than when this was asked last; low at first. For a
    /// hypervisor that changes a virtual interrupt only then.
    pub fn line_changed(&mut self) -> Option<bool> {
        let level = self.line();
        let changed = level != self.line_shown;
        self.line_shown = level;
        changed.then_some(level)
    }

    /// Starts what the guest has enabled, as the vCPU starts to run. A guest that has nothing enabled costs no call of
    /// the host. A host that was too busy to back a counter is asked again.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.start_vcpu(host);
    }

    /// Stops all counters, as the vCPU stops running, and takes what they have counted into the registers, so that
    /// [`line`](Self::line) is exact. Releases host counters that did not run since the load. A guest that uses no
    /// counter costs no call of the host.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.stop_vcpu(host);
    }

    /// Resets the PMU and releases every host counter: for a vCPU that is reset or goes away.
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.bank.reset(host);
        self.pmcr = self.config.res1_pmcr();
        self.pmselr = 0;
        self.pmuserenr = 0;
        self.enabled = CounterSet::EMPTY;
        self.interrupting = CounterSet::EMPTY;
        self.overflowed = CounterSet::EMPTY;
        for (_, event_type) in self.types.iter_mut() {
            *event_type = RawPmevtyper(0);
        }
        self.prescaler = 0;
        self.reclassify(self.implemented());
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        self.config.filter = filter;
        // Nothing is taken before: an event that is stopped here can still be read.
        self.reclassify(self.implemented());
        self.apply(host);
    }

    /// Returns how often the host was called, and what it could not do.
    pub fn statistics(&self) -> Statistics {
        self.bank.hosted.statistics()
    }

    /// Returns what `counter` (31: the cycle counter) is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        if !self.implemented().contains(counter) {
            return None;
        }
        // No host event runs for these two, and yet they count.
        let in_software = matches!(self.event_number(counter), Some(SW_INCR | CHAIN))
            && self.bank.loaded
            && self.enabled().contains(counter);
        Some(self.bank.state(counter, in_software))
    }

    /// Returns the observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.bank.observer
    }

    /// What stays in PMCR_EL0 of `value`.
    fn kept_pmcr(&self, value: u64) -> u64 {
        value & pmcr::kept(self.config.version) | self.config.res1_pmcr()
    }

    /// Gives every host counter back; what they have counted is taken.
    fn detach<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let backed = self.bank.hosted.backed();
        self.bank.hosted.release(backed, host);
        // The release has read what the events had counted; the registers have it only now.
        self.settle(self.unsettled(), host);
    }

    /// The event number of event counter `n`; `None` for the cycle counter.
    fn event_number(&self, n: Counter) -> Option<u16> {
        (n != CYCLE_COUNTER).then(|| self.types[n].event(self.config.version))
    }

    /// What `raw` makes counter `n` count.
    fn config_of(&self, n: Counter, raw: RawPmevtyper) -> CounterConfig {
        if n == CYCLE_COUNTER {
            raw.cycles_config()
        } else {
            raw.config(self.config.version)
        }
    }
}
