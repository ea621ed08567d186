//! The emulated PMU: every access traps, and host counters stand behind the guest's.
//!
//! # Why it is built this way
//!
//! A trap is paid anyway; what the engine can save is everything the host does because of it.
//! Three rules follow, and the calls they save are counted in [`Statistics`]:
//!
//! - *Only what changed is touched.* A host counter is created when a guest counter first has to
//!   count, and then kept: it is paused and resumed, given another period, but only a new event or
//!   filter replaces it. Writing a counter moves the guest's value, not the host's: the guest's
//!   counter is a value plus what the host has counted since. It is released when a whole slice
//!   between [`load`](EmulatedPmu::load) and [`put`](EmulatedPmu::put) went by without its use, so
//!   a guest that stops profiling costs nothing again.
//! - *Nothing is read twice.* After a pause a host counter's total stands still; it is read once,
//!   when someone first wants to know, and from then on the guest's value is exact.
//! - *An overflow report is asked for only where an interrupt depends on it*: the counter's bit in
//!   PMINTEN is set and its bit in PMOVS is not, or it carries into a CHAIN counter of which that
//!   is true. All other wraps are found when PMOVS or the counter is looked at, by arithmetic on
//!   totals, however many there were.
//!
//! Every write first *settles* what the host has counted for the counters it concerns, under the
//! configuration it was counted with; then it changes registers; then `apply` brings the host to
//! the new state, through the [life of a host event](crate::counter::HostEvents) that x86 shares. And the interrupt line is computed from the
//! registers alone.
//!
//! # Choices where the architecture leaves one
//!
//! - An event counter that does not exist (n >= N) is UNDEFINED, direct or through PMXEV*_EL0, and
//!   so is PMXEVCNTR_EL0 with PMSELR_EL0.SEL = 31: required with FEAT_FGT, one of the permitted
//!   behaviours without (DDI 0487, K1.2.6).
//! - PMCR_EL0.{D, LC, X, DP} are all readable and writable. D and LC work; X and DP have nothing to
//!   work on, as there is no trace unit here and nothing at EL1 or EL0 is prohibited.
//! - Registers whose reset value is UNKNOWN are zero after reset.
//! - Where an even counter and its CHAIN counter filter differently, a carry counts if it may have
//!   happened at a level that both count.

mod accesses;
mod config;
mod counters;
mod save;

use super::{
    CHAIN, CPU_CYCLES, CYCLE_COUNTER, CounterConfig, EventFilter, EventKind, MAX_EVENT_COUNTERS,
    PmuVersion, RawPmevtyper, SW_INCR, pmcr,
};
use crate::counter::{
    CounterHost, CounterSet, CounterState, Events, HostEvents, Lost, Policy, Slots, Statistics,
};
use counters::{Levels, Slot};

pub use config::{ConfigError, EmulatedConfig, Identity};

/// One vCPU's PMU. `V` is told what happens; by default nobody is.
///
/// No call of it panics, whatever a guest writes and whatever a host answers.
#[derive(Clone, Debug)]
pub struct EmulatedPmu<V = ()> {
    config: EmulatedConfig,
    events: V,
    hosted: HostEvents<CounterConfig>,

    /// PMCR_EL0's readable and writable bits.
    pmcr: u64,
    pmselr: u8,
    pmuserenr: u64,
    enabled: CounterSet,
    interrupting: CounterSet,
    overflowed: CounterSet,
    slots: Slots<Slot>,
    /// Cycles towards the next increment while PMCR_EL0.D divides: 0 to 63.
    prescaler: u8,

    /// Whether the vCPU runs, so that counters may.
    loaded: bool,
    /// Counters for which a host counter is to run when they are enabled.
    countable: CounterSet,
}

impl EmulatedPmu {
    /// A PMU out of reset, on a vCPU that runs (see [`put`](Self::put)), that nobody watches.
    ///
    /// # Errors
    ///
    /// Refuses a configuration the architecture has no room for.
    pub fn new(config: EmulatedConfig) -> Result<Self, ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> EmulatedPmu<V> {
    /// As [`new`](EmulatedPmu::new), and `events` is told what happens.
    ///
    /// # Errors
    ///
    /// Refuses a configuration the architecture has no room for.
    pub fn with_events(config: EmulatedConfig, events: V) -> Result<Self, ConfigError> {
        if config.counters > MAX_EVENT_COUNTERS {
            return Err(ConfigError::Counters(config.counters));
        }
        let mut pmu = Self {
            config,
            events,
            // The cheapest one: the others are what x86 is measured against.
            hosted: HostEvents::new(Policy::ReusePaused),
            pmcr: 0,
            pmselr: 0,
            pmuserenr: 0,
            enabled: CounterSet::EMPTY,
            interrupting: CounterSet::EMPTY,
            overflowed: CounterSet::EMPTY,
            slots: Slots::default(),
            prescaler: 0,
            loaded: true,
            countable: CounterSet::EMPTY,
        };
        pmu.classify(pmu.implemented());
        Ok(pmu)
    }

    /// The host reports that `counter` has counted as far as was asked. Answers the interrupt line.
    ///
    /// Reports may come late, early or for nothing: whether the guest's counter overflowed is found
    /// by reading it. Works between [`put`](Self::put) and [`load`](Self::load) too, so that a
    /// report that arrives after its vCPU stopped still wakes it.
    pub fn overflow<H: CounterHost<CounterConfig>>(&mut self, counter: u8, host: &mut H) -> bool {
        self.report(counter, host);
        self.apply(host);
        self.line()
    }

    /// The level of the overflow interrupt: whether an enabled counter's overflow bit is set. It
    /// can change with every call of this PMU that takes a host, and with nothing else.
    pub fn line(&self) -> bool {
        self.pmcr & pmcr::E != 0 && !(self.overflowed & self.interrupting).is_empty()
    }

    /// The vCPU starts to run: what the guest has enabled counts again. No call of the host for a
    /// guest that has nothing enabled.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if !self.loaded {
            self.loaded = true;
            self.apply(host);
        }
    }

    /// The vCPU stops running: nothing counts, and all that was counted is in the registers, so
    /// [`line`](Self::line) is exact. Host counters that did not run since the load are released.
    /// No call of the host for a guest that uses no counter.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        if self.loaded {
            self.loaded = false;
            self.apply(host);
            self.settle(self.hosted.unsettled(), host);
            self.hosted.end_slice(host);
        }
    }

    /// Back to reset, with every host counter released: for a vCPU that is reset or goes away.
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.hosted.release(self.hosted.backed(), host);
        for n in self.hosted.unsettled() {
            let _ = self.hosted.collect(n, host);
        }
        self.pmcr = 0;
        self.pmselr = 0;
        self.pmuserenr = 0;
        self.enabled = CounterSet::EMPTY;
        self.interrupting = CounterSet::EMPTY;
        self.overflowed = CounterSet::EMPTY;
        self.slots = Slots::default();
        self.prescaler = 0;
        self.classify(self.implemented());
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        self.config.filter = filter;
        self.classify(self.implemented());
        self.apply(host);
    }

    /// How often the host was called, and what it could not do.
    pub fn statistics(&self) -> Statistics {
        self.hosted.statistics()
    }

    /// What `counter` (31: the cycle counter) is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: u8) -> Option<CounterState> {
        if !self.implemented().contains(counter) {
            return None;
        }
        let slot = &self.slots[counter];
        let in_software = matches!(self.event(counter), Some(SW_INCR | CHAIN));
        let counting = self.hosted.running().contains(counter)
            || in_software && self.loaded && self.is_enabled(counter);
        Some(match slot.lost {
            Some(reason) => CounterState::Lost(reason),
            None if counting => CounterState::Counting,
            None => CounterState::Paused,
        })
    }

    /// The observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        &mut self.events
    }

    /// The bits of PMCR_EL0 that keep what is written.
    fn pmcr_bits(&self) -> u64 {
        use pmcr::{D, DP, E, LC, LP, X};
        let lp = if self.config.version >= PmuVersion::V3p5 {
            LP
        } else {
            0
        };
        E | D | X | DP | LC | lp
    }

    /// Every counter there is, the cycle counter included.
    fn implemented(&self) -> CounterSet {
        CounterSet::first(self.config.counters) | CounterSet::of(CYCLE_COUNTER)
    }

    /// Whether the guest has `n` enabled, by its own bit and PMCR_EL0.E.
    fn is_enabled(&self, n: u8) -> bool {
        self.pmcr & pmcr::E != 0 && self.enabled.contains(n)
    }

    /// The event number of event counter `n`; `None` for the cycle counter.
    fn event(&self, n: u8) -> Option<u16> {
        (n != CYCLE_COUNTER).then(|| self.slots[n].raw.event(self.config.version))
    }

    fn counter_config(&self, n: u8) -> CounterConfig {
        self.config_of(n, self.slots[n].raw)
    }

    /// What `raw` makes counter `n` count.
    fn config_of(&self, n: u8, raw: RawPmevtyper) -> CounterConfig {
        if n == CYCLE_COUNTER {
            raw.cycles_config()
        } else {
            raw.config(self.config.version)
        }
    }

    /// Finds out anew which of `counters` want a host counter, now that their configuration may
    /// have changed. Losses are forgotten: the host is asked again.
    fn classify(&mut self, counters: CounterSet) {
        for n in counters {
            let config = self.counter_config(n);
            let allowed = match config.event {
                EventKind::Cycles => self.config.filter.allows(CPU_CYCLES),
                EventKind::Event(SW_INCR | CHAIN) => false,
                EventKind::Event(event) => self.config.filter.allows(event),
            };
            self.slots[n].lost = None;
            if allowed && (config.el0 || config.el1) {
                self.countable.insert(n);
            } else {
                self.countable.remove(n);
            }
        }
    }

    fn lose(&mut self, n: u8, reason: Lost) {
        self.slots[n].lost = Some(reason);
        self.countable.remove(n);
        self.events.lost(n, reason);
    }
}
