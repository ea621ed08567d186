//! The emulated PMU on the counters of the CPU that runs the guest, for a hypervisor at EL2.
//!
//! # Why its registers open and close
//!
//! Of the nine accesses that a profiler makes for each sample, six ask for nothing but what the
//! hardware could answer: a counter's value, the overflow bits, PMCR_EL0. Where each guest counter
//! has the physical counter of the same number for its own, and FEAT_FGT traps single registers, the
//! guest's values are kept in the hardware and the guest reaches them itself: its registers are
//! *open*. What decides what counts still traps, and the model of [`EmulatedPmu`] stays in force for
//! that. [`stays_trapped`](open::stays_trapped) has the table.
//!
//! Where that is not so the registers are *closed*: everything traps, and a physical counter is only a
//! [`CounterHost`]'s counter, set so that it overflows when its next report is due.
//!
//! A guest that never touches its PMU has it closed, and costs nothing at a switch. The first write
//! that traps opens it; a [`put`](BackedPmu::put) closes it.

mod backing;
mod exchange;
mod migrate;
mod open;

use super::{ConfigError, EmulatedConfig, EmulatedPmu, Identity};
use crate::arm::partition::{Plan, PmuRegisters, TrapRegisters};
use crate::arm::{
    CHAIN, EventFilter, ExceptionLevel, Outcome, PmuState, RawPmevtyper, Register, RestoreError,
    pmcr, pmuserenr,
};
use crate::counter::{Counter, CounterSet, CounterState, Events, Model, Report, Statistics};
use backing::Backing;
use open::stays_trapped;

/// One vCPU's emulated PMU, with the physical counter *n* behind guest counter *n*.
///
/// The caller does as for [`PartitionedPmu`](crate::arm::partition::PartitionedPmu): it writes
/// [`trap_registers`](Self::trap_registers) before it enters the guest and whenever they changed, which they may in
/// each call that takes registers; and it calls [`load`](Self::load) and [`put`](Self::put) around the vCPU's time on a
/// CPU. The physical PMU interrupt of the guest's counters is the hypervisor's: the caller calls
/// [`overflow`](Self::overflow) and ends the interrupt. After each call it gives the virtual interrupt the level of
/// [`line`](Self::line).
#[derive(Clone, Debug)]
pub struct BackedPmu<V = ()> {
    pmu: EmulatedPmu<V>,
    backing: Backing,
    plan: Plan,
    /// The guest has found what the machine that it began on has.
    is_the_machines: bool,
    /// What traps while the registers are open; `None`: they never are.
    open_traps: Option<TrapRegisters>,
    /// The registers that the guest does not reach are as the backing needs them, or open.
    ready: bool,
}

impl BackedPmu {
    /// Makes a PMU out of reset, for a vCPU that runs on the CPU with this plan, without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a configuration that the architecture, or the plan's part for the guest, has no room for.
    pub fn new<R: PmuRegisters>(
        config: EmulatedConfig,
        plan: Plan,
        regs: &mut R,
    ) -> Result<Self, ConfigError> {
        Self::with_events(config, plan, (), regs)
    }

    /// Returns a PMU without counters, for a place that needs a value before the configuration is known, such as a static: see [`EmulatedPmu::vacant`].
    pub const fn vacant() -> Self {
        Self::vacant_with(())
    }
}

impl<V: Events> BackedPmu<V> {
    /// Makes a PMU as [`new`](BackedPmu::new) does, and reports to `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a configuration that the architecture, or the plan's part for the guest, has no room for.
    pub fn with_events<R: PmuRegisters>(
        config: EmulatedConfig,
        plan: Plan,
        events: V,
        regs: &mut R,
    ) -> Result<Self, ConfigError> {
        Self::check(&config, &plan)?;
        let mut pmu = Self::vacant_with(events);
        pmu.set_config(&config, &plan, regs);
        Ok(pmu)
    }

    /// Makes this PMU, whatever it was, the one that [`new`](BackedPmu::new) makes. A PMU that is loaded must be so on
    /// this CPU. Nothing larger than some words passes through the stack.
    ///
    /// # Errors
    ///
    /// As [`new`](BackedPmu::new). This PMU is then as it was.
    pub fn init<R: PmuRegisters>(
        &mut self,
        config: &EmulatedConfig,
        plan: &Plan,
        regs: &mut R,
    ) -> Result<(), ConfigError> {
        Self::check(config, plan)?;
        self.take_off(regs);
        self.set_config(config, plan, regs);
        Ok(())
    }

    const fn vacant_with(events: V) -> Self {
        Self {
            pmu: EmulatedPmu::vacant_with(events),
            backing: Backing::new(0, 0),
            open_traps: None,
            is_the_machines: false,
            plan: Plan::BLANK,
            ready: false,
        }
    }

    fn check(config: &EmulatedConfig, plan: &Plan) -> Result<(), ConfigError> {
        config.check()?;
        let (counters, physical) = (config.counters, plan.hpmn());
        if counters > physical {
            return Err(ConfigError::Unbacked { counters, physical });
        }
        Ok(())
    }

    /// Gives a PMU out of reset another configuration, which is checked.
    fn set_config<R: PmuRegisters>(&mut self, config: &EmulatedConfig, plan: &Plan, regs: &mut R) {
        // An open PMCR_EL0 is read without a trap, so N, IMP and IDCODE must be those that the guest was promised.
        self.is_the_machines = config.counters == plan.hpmn()
            && config.version == plan.version()
            && config.identity == Identity::from_pmcr(regs.read(Register::Pmcr));
        self.pmu.set_config(config);
        self.backing
            .resize(plan.version().counter_mask(), plan.hpmn());
        self.open_traps = plan
            .trap_just(stays_trapped)
            .filter(|_| self.is_the_machines);
        self.plan = *plan;
        self.close_registers(regs);
    }

    /// Resets the PMU, for a vCPU that is reset or goes away. Nothing of the guest's counts or interrupts then. A PMU
    /// that is loaded must be so on this CPU.
    pub fn reset<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.take_off(regs);
        // The registers of a vCPU that does not run are another's.
        if self.pmu.bank.loaded {
            self.close_registers(regs);
        }
    }

    fn take_off<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.pmu.reset(&mut self.backing.host(self.pmu.open, regs));
        self.backing.report_only(CounterSet::EMPTY, regs);
        self.pmu.open = false;
    }

    /// Returns the plan in force.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns what the trap registers must hold when the guest is entered.
    pub fn trap_registers(&self) -> TrapRegisters {
        match self.open_traps {
            Some(traps) if self.pmu.open => traps,
            _ => self.plan.trap_all(),
        }
    }

    /// Returns whether an access traps once the guest uses its PMU.
    pub fn is_trapped(&self, register: Register, write: bool) -> bool {
        register.is_accessible(write)
            && (self.open_traps.is_none() || stays_trapped(register, write))
    }

    /// Performs a trapped read at exception level `level` of the guest.
    pub fn read<R: PmuRegisters>(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        regs: &mut R,
    ) -> Outcome {
        if self.pmu.open {
            self.take_for(register, level, regs);
        } else if matches!(register, Register::PmovsSet | Register::PmovsClr) {
            // As the host promises: what has overflowed by now is in the guest's register.
            self.report_overflows(regs);
        }
        let mut host = self.backing.host(self.pmu.open, regs);
        self.pmu.read(register, level, &mut host)
    }

    /// Performs a trapped write at exception level `level` of the guest. Any value may be written.
    pub fn write<R: PmuRegisters>(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        value: u64,
        regs: &mut R,
    ) -> Outcome {
        if self.pmu.open {
            // EL0 needs a permission of PMUSERENR_EL0, which the guest may have changed since the model last read it.
            if level == ExceptionLevel::El1 && self.write_hot(register, value, regs) {
                return Outcome::Done;
            }
            self.take_for(register, level, regs);
            if self.closes(register, value) {
                self.close(regs);
            }
        } else if !self.ready {
            self.close_registers(regs);
        }
        let open = self.pmu.open;
        let mut host = self.backing.host(open, regs);
        let outcome = self.pmu.write(register, level, value, &mut host);
        if open && outcome == Outcome::Done {
            self.publish(register, value, regs);
        } else if outcome == Outcome::Done {
            if register == Register::Pmuserenr {
                self.write_closed_pmuserenr(regs);
            }
            if self.may_open() {
                self.open(regs);
            }
        }
        self.report_open(regs);
        outcome
    }

    /// Takes the physical PMU interrupt. Lowers the part of it that is the guest's, and returns the level of the
    /// guest's line.
    pub fn overflow<R: PmuRegisters>(&mut self, regs: &mut R) -> bool {
        if self.pmu.open {
            self.take_overflow_bits(regs);
            self.report_open(regs);
        } else {
            self.report_overflows(regs);
        }
        self.line()
    }

    /// Returns the level of the guest's PMU interrupt.
    pub fn line(&self) -> bool {
        self.pmu.line()
    }

    /// Returns the level of the guest's PMU interrupt if it is another than when this was asked last: see
    /// [`EmulatedPmu::line_changed`].
    pub fn line_changed(&mut self) -> Option<bool> {
        self.pmu.line_changed()
    }

    /// Starts what the guest has enabled, as the vCPU starts to run on this CPU. A guest that has nothing enabled costs
    /// no register access.
    pub fn load<R: PmuRegisters>(&mut self, regs: &mut R) {
        // Elsewhere the first write closes them: a guest that uses nothing costs nothing here.
        if self.pmu.pmuserenr != 0 || !self.pmu.enabled.is_empty() {
            self.close_registers(regs);
        }
        self.pmu.load(&mut self.backing.host(false, regs));
    }

    /// Takes the guest's counters off this CPU, as the vCPU stops running there. Nothing of the guest's counts or
    /// interrupts then, EL0 has no access, and [`line`](Self::line) is exact. A guest that uses nothing costs no
    /// register access.
    pub fn put<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.pmu.open {
            self.close(regs);
        }
        let mut host = self.backing.host(false, regs);
        self.pmu.put(&mut host);
        // The physical counters are the next vCPU's.
        self.pmu.detach(&mut host);
        if self.pmu.pmuserenr != 0 {
            regs.write(Register::Pmuserenr, 0);
        }
        self.ready = false;
    }

    /// Changes which events the guest may count, from now on: what was counted stays counted.
    pub fn set_filter<R: PmuRegisters>(&mut self, filter: EventFilter, regs: &mut R) {
        let mut host = self.backing.host(self.pmu.open, regs);
        self.pmu.set_filter(filter, &mut host);
    }

    /// Returns all that the guest could find out, up to this moment: see [`EmulatedPmu::save`].
    pub fn save<R: PmuRegisters>(&mut self, regs: &mut R) -> PmuState {
        let mut state = PmuState::reset(self.plan.version(), 0);
        self.save_into(&mut state, regs);
        state
    }

    /// As [`save`](Self::save), into a state that is there already, whatever it holds.
    pub fn save_into<R: PmuRegisters>(&mut self, state: &mut PmuState, regs: &mut R) {
        if self.pmu.open {
            self.take_all(regs);
        }
        let mut host = self.backing.host(self.pmu.open, regs);
        self.pmu.save_into(state, &mut host);
    }

    /// As [`restore`](Self::restore), between a [`put`](Self::put) and a [`load`](Self::load), with less stack.
    ///
    /// # Errors
    ///
    /// As [`EmulatedPmu::restore_put`].
    pub fn restore_put<R: PmuRegisters>(
        &mut self,
        state: &PmuState,
        regs: &mut R,
    ) -> Result<(), RestoreError> {
        self.pmu
            .restore_put(state, &mut self.backing.host(false, regs))
    }

    /// Returns whether the vCPU runs: a [`put`](Self::put) ends that, and a [`load`](Self::load) begins it.
    pub const fn is_loaded(&self) -> bool {
        self.pmu.is_loaded()
    }

    /// Goes on from `state`, in place of what was here: see [`EmulatedPmu::restore`].
    ///
    /// # Errors
    ///
    /// As [`EmulatedPmu::restore`]. This PMU is then as it was.
    pub fn restore<R: PmuRegisters>(
        &mut self,
        state: &PmuState,
        regs: &mut R,
    ) -> Result<(), RestoreError> {
        let runs = self.is_loaded();
        if runs {
            self.put(regs);
        }
        let restored = self.restore_put(state, regs);
        if runs {
            self.load(regs);
        }
        restored
    }

    /// Returns how often the physical counters were programmed, started and stopped.
    pub fn statistics(&self) -> Statistics {
        self.pmu.statistics()
    }

    /// Returns what `counter` (31: the cycle counter) is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        self.pmu.counter_state(counter)
    }

    /// Returns the observer given at the beginning.
    pub fn events(&mut self) -> &mut V {
        self.pmu.events()
    }

    /// Performs the writes of open registers that a sampling driver makes for each sample, in as few steps as
    /// there are: PMCR_EL0 where E alone changes, and PMOVSCLR_EL0. `false`: it is another write.
    fn write_hot<R: PmuRegisters>(&mut self, register: Register, value: u64, regs: &mut R) -> bool {
        match register {
            Register::Pmcr => {
                let control = self.pmu.kept_pmcr(value);
                // P and C reset counters; D, X, LC and LP change what counts, and when it overflows.
                let others = (control ^ self.pmu.pmcr) & !pmcr::E;
                if others != 0 || value & (pmcr::P | pmcr::C) != 0 {
                    return false;
                }
                self.pmu.pmcr = control;
                regs.write(register, control);
            }
            Register::PmovsClr => {
                self.take_overflow_bits(regs);
                let cleared = CounterSet::from_bits(value as u32) & self.pmu.overflowed;
                regs.write(register, cleared.bits().into());
                self.pmu.overflowed -= cleared;
                self.report_open(regs);
            }
            _ => return false,
        }
        true
    }

    fn may_open(&self) -> bool {
        self.open_traps.is_some()
            && self.pmu.bank.loaded
            && self.pmu.pmcr & pmcr::X == 0
            && !CounterSet::first(self.pmu.config.counters)
                .iter()
                .any(|n| self.pmu.event_number(n) == Some(CHAIN))
    }

    /// Whether the registers may not stay open after this write.
    fn closes(&self, register: Register, value: u64) -> bool {
        match register {
            Register::Pmcr => value & pmcr::X != 0,
            Register::Pmevtyper(_) | Register::Pmxevtyper => {
                RawPmevtyper(value).event(self.pmu.config.version) == CHAIN
            }
            _ => false,
        }
    }

    /// Puts the guest's values where the guest reaches them.
    fn open<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.pmu.detach(&mut self.backing.host(false, regs));
        self.pmu.open = true;
        self.write_values(self.pmu.implemented(), regs);
        self.write_overflows(regs);
        regs.write(Register::Pmselr, self.pmu.pmselr.into());
        regs.write(Register::Pmuserenr, self.pmu.pmuserenr);
        regs.write(Register::Pmcr, self.pmu.pmcr);
        self.pmu.apply(&mut self.backing.host(true, regs));
    }

    /// Takes the guest's values back.
    fn close<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.take_all(regs);
        self.pmu.detach(&mut self.backing.host(true, regs));
        self.backing.report_only(CounterSet::EMPTY, regs);
        self.pmu.open = false;
        self.close_registers(regs);
        self.pmu.apply(&mut self.backing.host(false, regs));
    }

    /// Makes the registers that a closed guest cannot reach what the backing needs.
    fn close_registers<R: PmuRegisters>(&mut self, regs: &mut R) {
        let long = pmcr::lp(self.plan.version());
        regs.write(Register::Pmcr, pmcr::E | pmcr::LC | long);
        let guest = self.pmu.implemented() & self.plan.guest_counters();
        regs.write(Register::PmovsClr, guest.bits().into());
        // PMXEVTYPER_EL0 with a selection that does not exist is undefined before it traps.
        regs.write(Register::Pmselr, self.plan.harmless_selection());
        self.write_closed_pmuserenr(regs);
        self.ready = true;
    }

    /// A guest that forbids everything to EL0 has it forbidden without an exit. Any permission is given
    /// as EN, and the engine checks again: QEMU up to at least 10.0 lets what ER, CR or SW permit reach
    /// the counters without asking MDCR_EL2.TPM.
    fn write_closed_pmuserenr<R: PmuRegisters>(&self, regs: &mut R) {
        let some = self.pmu.pmuserenr != 0;
        regs.write(Register::Pmuserenr, if some { pmuserenr::EN } else { 0 });
    }

    /// Has those open counters interrupt whose overflow would raise the guest's line. Of one that has
    /// overflowed the guest sees the bit, so the physical interrupt is taken back by its enable.
    fn report_open<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.pmu.open {
            // A bit that is set already cannot raise the line again.
            let wanted = self.pmu.interrupting - self.pmu.overflowed;
            self.backing.report_only(wanted, regs);
        }
    }

    /// Tells the model of the physical overflows that it waits for.
    fn report_overflows<R: PmuRegisters>(&mut self, regs: &mut R) {
        for counter in self.backing.take_overflows(regs) {
            let mut host = self.backing.host(false, regs);
            self.pmu.overflow(counter, Report::Unsure, &mut host);
        }
    }
}
