//! One vCPU's PMU: a vendor's registers and the counters, and between them what an access does.
//!
//! Registers only answer. Here is what follows from their answers, for both vendors: counts are
//! taken under the controls that they were counted with, then the counters adopt what the registers say now, then the
//! host is brought to that.
//!
//! # Why they only answer
//!
//! A write of an MSR has two sides: the register keeps a value, and the counters do something. When counts are taken,
//! and in which order the host is called, is the same for both vendors and easy to get wrong. So [`Registers`] know
//! neither counters nor host: a read answers with a [`Source`], a write with an [`Effect`], and the PMU alone acts on
//! them. They get the counters only to be saved or restored with them.

mod branches;
mod vcpu;

use super::counters::{Control, Counters, Effect, Source};
use super::intel::ConfigError;
use super::{
    Capability, CounterConfig, Outcome, PmuConfig, PmuState, RestoreError, Ring, amd, intel, lbr,
};
use crate::counter::{Counter, CounterHost, CounterSet, Events, Model};

/// One vCPU's PMU. `V` observes what happens; the default observes nothing.
///
/// No call panics, whatever a guest writes and whatever a host answers.
///
/// Intel's general counter *n* is *n* for a host and in a [`CounterSet`], its fixed counter *n* is
/// [`FIXED`](super::intel::FIXED) + *n*; AMD's counter *n* is *n*.
///
#[derive(Clone, Debug)]
pub struct Pmu<V = ()> {
    registers: Registers,
    counters: Counters<V>,
}

impl Pmu {
    /// Makes a PMU out of reset, for a vCPU that runs (see [`put`](Self::put)), without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a capability of Intel's that cannot be. Nothing can be wrong with AMD's: no field of it contradicts another.
    pub fn new(config: PmuConfig) -> Result<Self, ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> Pmu<V> {
    /// Makes a PMU as [`new`](Pmu::new) does, and reports to `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a capability of Intel's that cannot be.
    pub fn with_events(config: PmuConfig, events: V) -> Result<Self, ConfigError> {
        if let Capability::Intel(capability) = &config.capability {
            capability.check()?;
        }
        let registers = Registers::power_on(config.capability);
        let existing = registers.counters();
        let mut counters = Counters::new(existing, config.filter, config.policy, events);
        counters.global.gate = registers.gate_at_reset();
        counters.lbr = registers.lbr();
        let mut pmu = Self {
            registers,
            counters,
        };
        pmu.adopt_all();
        Ok(pmu)
    }

    /// Performs RDMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn rdmsr<H: CounterHost<CounterConfig>>(&mut self, address: u32, host: &mut H) -> Outcome {
        let Some(source) = self.registers.read(address) else {
            return self.read_lbr(address, host);
        };
        self.begin_access(host);
        let value = source.map(|source| match source {
            Source::Register(value) => value,
            Source::Counter(n) => self.read_counter(n, host),
            Source::Status => self.read_status(host),
            Source::Gate => {
                // Before version 4 an overflow that freezes clears the register.
                self.settle_acting(host);
                self.counters.apply(host);
                self.registers.global_bits(self.counters.global.gate)
            }
        });
        self.end_access(host);
        value.map_or(Outcome::GeneralProtection, Outcome::Value)
    }

    /// Performs WRMSR of `address`. The caller has made sure that the guest is at CPL 0.
    pub fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        // What is counted until now is counted as the counters' controls say, which are not the register's yet.
        let Some(effect) = self.registers.write(address, value) else {
            return self.write_lbr(address, value, host);
        };
        self.begin_access(host);
        // A refused write settles, too. That changes nothing that a guest can see.
        self.settle_acting(host);
        if let Some(effect) = effect {
            self.perform(effect, host);
        }
        // Sampling that goes on under other registers would write records of the wrong period.
        if !self.counters.pebs.sampling.counters.is_empty() {
            self.counters.end_unfit_sampling(host);
        }
        self.end_access(host);
        self.counters.apply(host);
        match effect {
            Some(_) => Outcome::Done,
            None => Outcome::GeneralProtection,
        }
    }

    /// Performs RDPMC with this ECX. `ring` is who executes it, and `pce` is CR4.PCE: user space may read
    /// counters only with it.
    ///
    /// Intel's ECX\[31:16\] is the type: 0 for general counters, 0x4000 for fixed ones (SDM vol. 2B); AMD's ECX is
    /// the counter's number (APM vol. 3). Others, such as performance metrics or northbridge counters, are not there.
    pub fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        ecx: u32,
        ring: Ring,
        pce: bool,
        host: &mut H,
    ) -> Outcome {
        match self.registers.indexed(ecx) {
            Some(n) if ring == Ring::Kernel || pce => {
                self.begin_access(host);
                let value = self.read_counter(n, host);
                self.end_access(host);
                Outcome::Value(value)
            }
            // As a processor, which faults alike for an index without a counter and for a forbidden one.
            _ => Outcome::GeneralProtection,
        }
    }

    /// Returns whether an overflow has requested a PMI that [`take_pmi`](Self::take_pmi) has not taken. Every call of
    /// this PMU that takes a host can set it.
    pub const fn pmi_due(&self) -> bool {
        self.counters.global.pmi_due
    }

    /// Takes the PMI that is due, if one is. The caller delivers it as LVTPC says; if LVTPC is
    /// masked, it is lost, and the next overflow requests the next.
    ///
    /// Overflows that were counted since the last call are one PMI, as they are in a local APIC
    /// that has not delivered the first of them.
    #[must_use = "the PMI is gone unless the caller delivers it"]
    pub const fn take_pmi(&mut self) -> bool {
        self.counters.global.take_pmi()
    }

    /// The guest accesses its PMU: what it reads is what there is, and it is not followed into its own driver.
    fn begin_access<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        self.end_delay(host);
        // An overflow that this access finds is requested at once: the branches that follow are the driver's.
        self.counters.lbr.delays = false;
    }

    /// Finds out anew whether a PMI has to wait for branches, now that registers or the status may have changed.
    fn end_access<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // Nothing waits for branches where there are none.
        if self.counters.lbr.exists() && !self.counters.find_delays(host.follows_branches()) {
            self.end_delay(host);
        }
    }

    fn perform<H: CounterHost<CounterConfig>>(&mut self, effect: Effect, host: &mut H) {
        match effect {
            // The register keeps its value.
            Effect::Nothing => {}
            Effect::Configure(concerned) => self.configure(concerned, host),
            // No count is taken: what counted until now counted under the same controls.
            Effect::Gate(gate) => {
                let before = self.counters.global.open();
                let changed = (gate - before) | (before - gate);
                let concerned = changed & self.counters.switched_on;
                self.counters.bank_mut().hosted.touch(concerned, host);
                self.counters.global.gate = gate;
            }
            Effect::Counter(n, value) => self.write_counter(n, value, host),
            Effect::ClearStatus(counters, others) => {
                // What overflowed before this write is cleared by it, noticed or not.
                self.counters.settle_doubtful(counters, host);
                self.counters.global.clear_status(counters, others);
            }
            Effect::SetStatus(counters, others) => {
                // A bit that is set already hides nothing; an overflow behind a new one would be lost in it.
                let new =
                    counters & (self.counters.implemented() - self.counters.global.overflowed);
                self.counters.settle(new, host);
                self.counters.global.set_status(new, others);
            }
            Effect::Freezing => {
                // What overflowed before the guest wanted it to freeze does not freeze.
                self.counters.settle(self.counters.interrupting, host);
                self.adopt_freezing();
            }
            Effect::RecordGroups => {
                let sampled = self.counters.pebs.sampling.counters;
                self.counters.settle_sampled(sampled, host);
                self.adopt_records();
            }
            // An area is read when a record is written.
            Effect::RecordArea => self.adopt_records(),
        }
    }

    /// Has `concerned` do what the registers say now.
    fn configure<H: CounterHost<CounterConfig>>(&mut self, concerned: CounterSet, host: &mut H) {
        let (mut changed, mut otherwise) = (CounterSet::EMPTY, CounterSet::EMPTY);
        let mut other_events = CounterSet::EMPTY;
        for n in concerned {
            let (before, after) = (self.counters.controls[n], self.registers.control(n));
            changed.put(n, before.is_changed_by(&after));
            otherwise.put(n, before.counts_otherwise(&after));
            other_events.put(n, before.event != after.event);
        }
        // Only what counts something else has to stop. A new wish for an interrupt leaves the event running.
        self.counters.bank_mut().hosted.touch(changed, host);
        self.counters.bank_mut().hosted.stop(otherwise, host);
        // Under the old controls, and after the pause, so that once is enough.
        self.counters.settle(changed, host);
        self.counters.end_sampling(other_events, host);
        // All that are concerned: the groups of records may be another for those that are not changed.
        self.adopt(concerned);
        self.counters.reclassify(changed);
    }

    /// All counters do what the registers say now. Losses are forgotten: the host is asked again.
    fn adopt_all(&mut self) {
        let all = self.counters.implemented();
        self.adopt_freezing();
        self.adopt_records();
        self.adopt(all);
        self.counters.reclassify(all);
    }

    /// PEBS records are written as the registers say now.
    fn adopt_records(&mut self) {
        if let Some(registers) = self.registers.intel() {
            self.counters.pebs.registers = registers.pebs;
        }
    }

    fn adopt(&mut self, counters: CounterSet) {
        for n in counters {
            self.counters.adopt(n, self.registers.control(n));
        }
    }

    /// RDMSR or RDPMC of counter `n`, which exists.
    fn read_counter<H: CounterHost<CounterConfig>>(&mut self, n: Counter, host: &mut H) -> u64 {
        self.settle_acting(host);
        self.counters.settle_read(n, host);
        self.counters.apply(host);
        self.counters.value(n)
    }

    /// WRMSR of counter `n`, which exists and has all bits of `value`.
    fn write_counter<H: CounterHost<CounterConfig>>(
        &mut self,
        n: Counter,
        value: u64,
        host: &mut H,
    ) {
        self.counters.settle_read(n, host);
        // The same value leaves the host's period and the counter's in step.
        if self.counters.value(n) != value {
            self.counters.end_sampling(n.alone(), host);
        }
        self.counters.set_value(n, value);
        // Without a status register the handler clears an overflow by writing the counter.
        if !self.registers.has_status() {
            self.counters.global.clear_status(n.alone(), 0);
        }
        self.counters.rearm(n, host);
    }

    /// RDMSR of the global status register.
    fn read_status<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> u64 {
        // A counter whose bit is set already cannot change anything, unless it has another one set.
        let clear = (self.counters.implemented() - self.counters.global.overflowed)
            | self.counters.recording;
        self.counters.settle_doubtful(clear, host);
        self.counters.apply(host);
        self.registers.global_bits(self.counters.global.overflowed) | self.counters.global.status
    }

    /// An overflow that stops all counters, or writes to the guest's memory, must be known before anything that comes
    /// after it.
    fn settle_acting<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // Counters that only set a status bit can wait until somebody reads that.
        let acting = self.counters.acting();
        self.counters.settle_doubtful(acting, host);
    }
}

/// The registers of either vendor: what a guest has written, and nothing that counting changes.
#[derive(Clone, Debug)]
enum Registers {
    Intel(intel::Registers),
    Amd(amd::Registers),
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
    fn power_on(capability: Capability) -> Self {
        match capability {
            Capability::Intel(capability) => Self::Intel(intel::Registers::power_on(capability)),
            Capability::Amd(capability) => Self::Amd(amd::Registers::power_on(capability)),
        }
    }

    /// Goes back to power-on reset.
    fn reset(&mut self) {
        *self = Self::power_on(self.capability());
    }

    /// Returns what the guest is offered.
    fn capability(&self) -> Capability {
        each!(self, registers => registers.capability.into())
    }

    /// Says what a read of the MSR at `address` shows. `Some(None)`: #GP; `None`: that is none of a PMU's.
    // Decoded before any capability is asked: #GP is for an MSR that the guest lacks, `NotHandled` for all others. A guest
    // must not find the other vendor's registers, which have addresses of their own.
    fn read(&self, address: u32) -> Option<Option<Source>> {
        match self {
            Self::Intel(registers) => intel::Msr::decode(address).map(|msr| registers.read(msr)),
            Self::Amd(registers) => amd::Msr::decode(address).map(|msr| registers.read(msr)),
        }
    }

    /// Keeps `value` in the MSR at `address`, and says what the write does to the counters. `Some(None)`: #GP, and nothing has
    /// changed; `None`: that is none of a PMU's.
    fn write(&mut self, address: u32, value: u64) -> Option<Option<Effect>> {
        match self {
            Self::Intel(registers) => {
                intel::Msr::decode(address).map(|msr| registers.write(msr, value))
            }
            Self::Amd(registers) => {
                amd::Msr::decode(address).map(|msr| registers.write(msr, value))
            }
        }
    }

    /// Returns the counter that RDPMC reads with this ECX, if it exists.
    fn indexed(&self, ecx: u32) -> Option<Counter> {
        each!(self, registers => registers.indexed(ecx))
    }

    /// Returns every counter there is.
    fn counters(&self) -> CounterSet {
        each!(self, registers => registers.capability.counters())
    }

    /// Returns `counters` as the global registers show them.
    fn global_bits(&self, counters: CounterSet) -> u64 {
        match self {
            Self::Intel(_) => intel::to_global(counters),
            Self::Amd(_) => counters.bits().into(),
        }
    }

    /// Returns what the global control register lets count after power-on reset.
    fn gate_at_reset(&self) -> CounterSet {
        match self {
            // General counters are enabled globally (SDM vol. 3A, table 10-1).
            Self::Intel(registers) => CounterSet::first(registers.capability.general),
            // Every counter: so it is, too, where no register says so.
            Self::Amd(registers) => registers.capability.counters(),
        }
    }

    /// Returns what the registers have counter `n` do.
    fn control(&self, n: Counter) -> Control {
        each!(self, registers => registers.control(n))
    }

    /// Returns everything as one plain value.
    fn save<V: Events>(&self, counters: &Counters<V>) -> PmuState {
        match self {
            Self::Intel(registers) => PmuState::Intel(registers.save(counters)),
            Self::Amd(registers) => PmuState::Amd(registers.save(counters)),
        }
    }

    /// Refuses a state that this capability cannot have come to.
    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.check(state),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.check(state),
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Err(RestoreError::Vendor)
            }
        }
    }

    /// Takes the registers from `state`, which [`check`](Self::check) has accepted, and gives the rest of it to `counters`, which
    /// are reset.
    fn restore<V: Events>(&mut self, state: &PmuState, counters: &mut Counters<V>) {
        match (self, state) {
            (Self::Intel(registers), PmuState::Intel(state)) => registers.restore(state, counters),
            (Self::Amd(registers), PmuState::Amd(state)) => registers.restore(state, counters),
            // `check` has refused it.
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {}
        }
    }

    /// Returns whether the guest has a status register that shows which counters have overflowed.
    // AMD's older interfaces have none: there a write of the counter acknowledges.
    fn has_status(&self) -> bool {
        match self {
            Self::Intel(_) => true,
            Self::Amd(registers) => registers.capability.interface >= amd::Interface::V2,
        }
    }

    fn intel(&self) -> Option<&intel::Registers> {
        match self {
            Self::Intel(registers) => Some(registers),
            Self::Amd(_) => None,
        }
    }

    /// Returns the last branch records as they are after power-on reset.
    fn lbr(&self) -> lbr::Unit {
        let unit = match self {
            Self::Intel(registers) => registers.capability.lbr.map(lbr::Unit::intel),
            Self::Amd(registers) => registers.capability.offered_lbr().map(lbr::Unit::amd),
        };
        unit.unwrap_or_else(lbr::Unit::none)
    }
}
