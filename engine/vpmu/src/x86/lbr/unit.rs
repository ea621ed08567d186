//! The records of one PMU: what the registers let record, and when a PMI waits for it.

use core::mem;

use super::{Branch, Filter, Kind, Stack, Statistics, amd, intel};
use crate::counter::{Counter, CounterSet, count};
use crate::x86::Outcome;
use crate::x86::status::Freeze;

/// A vendor's registers, without the stack.
#[derive(Clone, Debug)]
enum Registers {
    /// The guest has no last branch records.
    None,
    Intel(intel::Registers),
    Amd(amd::Registers),
}

/// The last branch records of one PMU.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    registers: Registers,
    stack: Stack,
    /// How many branches the run has recorded; `None`: the guest is not followed.
    run: Option<u8>,
    /// Whether the stack may be recorded into, as the guest's registers were last read.
    armed: bool,
    /// Whether a PMI and records have to wait for branches.
    pub(in crate::x86) delays: bool,
    /// A PMI waits until the guest has been followed. It has not been requested.
    pub(in crate::x86) pmi_delayed: bool,
    /// Counters whose PEBS record waits for the same.
    pub(in crate::x86) records_delayed: CounterSet,
    pub(in crate::x86) statistics: Statistics,
}

impl Unit {
    /// The unit of a guest without last branch records, which records none.
    pub(in crate::x86) fn none() -> Self {
        Self::new(Registers::None, 0)
    }

    pub(in crate::x86) fn intel(capability: intel::Capability) -> Self {
        let depth = capability.deepest();
        Self::new(
            Registers::Intel(intel::Registers::power_on(capability)),
            depth,
        )
    }

    pub(in crate::x86) fn amd(capability: amd::Capability) -> Self {
        Self::new(
            Registers::Amd(amd::Registers::power_on(capability)),
            amd::DEPTH,
        )
    }

    fn new(registers: Registers, depth: u8) -> Self {
        Self {
            registers,
            stack: Stack::new(depth),
            run: None,
            armed: false,
            delays: false,
            pmi_delayed: false,
            records_delayed: CounterSet::EMPTY,
            statistics: Statistics::default(),
        }
    }

    /// Goes back to power-on reset. The statistics go on.
    pub(in crate::x86) fn reset(&mut self) {
        let fresh = match &self.registers {
            Registers::None => Self::none(),
            Registers::Intel(registers) => Self::intel(registers.capability),
            Registers::Amd(registers) => Self::amd(registers.capability),
        };
        *self = Self {
            statistics: self.statistics,
            ..fresh
        };
    }

    /// Whether the guest has last branch records.
    pub(in crate::x86) const fn exists(&self) -> bool {
        !matches!(self.registers, Registers::None)
    }

    /// RDMSR of `address`.
    pub(in crate::x86) fn read(&self, address: u32) -> Outcome {
        let stack = &self.stack;
        let value = match &self.registers {
            Registers::None => None,
            Registers::Intel(own) => intel::Msr::decode(address).map(|msr| own.read(msr, stack)),
            Registers::Amd(own) => amd::Msr::decode(address).map(|msr| own.read(msr, stack)),
        };
        match value {
            Some(value) => value.map_or(Outcome::GeneralProtection, Outcome::Value),
            None => Outcome::NotHandled,
        }
    }

    /// WRMSR of `address`.
    pub(in crate::x86) fn write(&mut self, address: u32, value: u64) -> Outcome {
        let stack = &mut self.stack;
        let written = match &mut self.registers {
            Registers::None => None,
            Registers::Intel(own) => {
                intel::Msr::decode(address).map(|msr| own.write(msr, value, stack))
            }
            Registers::Amd(own) => {
                amd::Msr::decode(address).map(|msr| own.write(msr, value, stack))
            }
        };
        match written {
            Some(Some(())) => Outcome::Done,
            Some(None) => Outcome::GeneralProtection,
            None => Outcome::NotHandled,
        }
    }

    /// Returns what the registers let record; `None`: they are disabled.
    pub(in crate::x86) fn filter(&self) -> Option<Filter> {
        match &self.registers {
            Registers::None => None,
            Registers::Intel(registers) => registers.filter(),
            Registers::Amd(registers) => registers.filter(),
        }
    }

    /// Clears the bit that enables the unit, and returns whether it was set.
    pub(in crate::x86) fn disable(&mut self) -> bool {
        match &mut self.registers {
            Registers::None => false,
            Registers::Intel(registers) => registers.disable(),
            Registers::Amd(registers) => registers.disable(),
        }
    }

    /// Returns how the request of a PMI stops counters and records, where the unit has the register that says so:
    /// AMD's.
    pub(in crate::x86) const fn freezing(&self) -> (Option<Freeze>, bool) {
        match &self.registers {
            Registers::None | Registers::Intel(_) => (None, false),
            Registers::Amd(registers) => registers.freezing(),
        }
    }

    /// Takes note whether branches can be recorded now. `follows`: the embedder follows its guest only for a PMI.
    /// Returns whether a PMI has to wait for branches.
    pub(in crate::x86) fn find_delays(&mut self, frozen: bool, follows: bool) -> bool {
        let armed = follows && !frozen && self.filter().is_some();
        if armed && !self.armed {
            // What the last run has recorded is not what the guest took last.
            self.stack.clear();
        }
        // Kept, so that a second read does not clear what was recorded since.
        self.armed = armed;
        self.delays = armed;
        armed
    }

    /// Returns the records, if they are the last branches that the guest has taken up to now.
    pub(in crate::x86) fn last(&self) -> Option<&Stack> {
        // Where the guest is followed, none of those that it takes outside a run is recorded. What can record nothing has
        // what its registers have.
        (!self.armed || self.run.is_some()).then_some(&self.stack)
    }

    /// Has a PMI wait for branches. `false`: it has to be requested now. `due`: one is already.
    pub(in crate::x86) fn delay_pmi(&mut self, due: bool) -> bool {
        let begins = self.begin_run(due);
        self.pmi_delayed |= begins;
        begins
    }

    /// Has the PEBS record of `n` wait for branches. `false`: it has to be written now. `due`: a PMI is.
    pub(in crate::x86) fn delay_record(&mut self, n: Counter, due: bool) -> bool {
        let begins = self.begin_run(due);
        self.records_delayed.put(n, begins);
        begins
    }

    /// Begins to wait for branches, or goes on. `false`: nothing is to wait for any.
    fn begin_run(&mut self, due: bool) -> bool {
        // Only once: a PMI that is due already finds the records that there are.
        let begins = self.delays && !due;
        // A second overflow during a run waits for the same branches, and the records stay.
        if begins && self.run.is_none() {
            self.stack.clear();
            self.run = Some(0);
        }
        begins
    }

    /// Whether something waits for branches.
    pub(in crate::x86) fn is_anything_delayed(&self) -> bool {
        self.pmi_delayed || !self.records_delayed.is_empty()
    }

    /// What the run has recorded is not what the guest has taken last.
    pub(in crate::x86) fn lose(&mut self) {
        if let Some(recorded) = &mut self.run {
            self.stack.clear();
            *recorded = 0;
        }
    }

    /// Nothing waits for branches any more. Returns whether a PMI has waited.
    pub(in crate::x86) fn end_run(&mut self) -> bool {
        match self.run.take() {
            None => {}
            Some(recorded) if recorded >= self.stack.depth() => count(&mut self.statistics.full),
            Some(_) => count(&mut self.statistics.short),
        }
        mem::take(&mut self.pmi_delayed)
    }

    /// Returns how many branches more fill the stack; 0: no PMI waits for any.
    pub(in crate::x86) fn awaited(&self) -> u8 {
        match self.run {
            Some(recorded) => self.stack.depth().saturating_sub(recorded),
            None => 0,
        }
    }

    /// The guest has taken `branch`, and nothing freezes the records.
    pub(in crate::x86) fn record(&mut self, branch: &Branch) {
        let Some(filter) = self.filter() else {
            return self.drop_branch();
        };
        match filter.call_stack {
            true => self.call_or_return(&filter, branch),
            false if filter.passes(branch) => self.push(&filter, branch),
            false => self.drop_branch(),
        }
    }

    /// `branch` is not recorded.
    pub(in crate::x86) fn drop_branch(&mut self) {
        if self.exists() {
            count(&mut self.statistics.filtered);
        }
    }

    /// Calls and returns in call-stack mode.
    fn call_or_return(&mut self, filter: &Filter, branch: &Branch) {
        match branch.kind {
            _ if !filter.passes(branch) => self.drop_branch(),
            Kind::RelativeCall | Kind::IndirectCall => self.push(filter, branch),
            Kind::Return => self.stack.pop(),
            // A call of the next instruction reads RIP and has no return. Other kinds have no place on a call stack.
            Kind::NextCall
            | Kind::Conditional
            | Kind::RelativeJump
            | Kind::IndirectJump
            | Kind::Other => self.drop_branch(),
        }
    }

    fn push(&mut self, filter: &Filter, branch: &Branch) {
        let entry = match &self.registers {
            Registers::None => return,
            Registers::Intel(registers) => registers.entry(filter, branch),
            Registers::Amd(registers) => registers.entry(branch),
        };
        self.stack.push(entry);
        count(&mut self.statistics.recorded);
        if let Some(recorded) = &mut self.run {
            *recorded = recorded.saturating_add(1);
        }
    }

    /// Returns the registers as Intel's state has them; `None`: it has none of Intel's.
    pub(in crate::x86) fn save_intel(&self) -> Option<intel::State> {
        match &self.registers {
            Registers::Intel(registers) => Some(intel::State {
                control: registers.control,
                stack: self.stack.clone(),
            }),
            Registers::None | Registers::Amd(_) => None,
        }
    }

    /// Returns the registers as AMD's state has them; `None`: it has none of AMD's.
    pub(in crate::x86) fn save_amd(&self) -> Option<amd::State> {
        match &self.registers {
            Registers::None | Registers::Intel(_) => None,
            Registers::Amd(registers) => Some(registers.save(&self.stack)),
        }
    }

    /// Goes on from a state that was checked.
    pub(in crate::x86) fn restore_intel(&mut self, state: &intel::State) {
        if let Registers::Intel(registers) = &mut self.registers {
            registers.control = state.control;
            self.stack = state.stack.clone();
            // The records are of the guest that goes on: enabled, they stay.
            self.armed = true;
        }
    }

    /// Goes on from a state that was checked.
    pub(in crate::x86) fn restore_amd(&mut self, state: &amd::State) {
        if let Registers::Amd(registers) = &mut self.registers {
            registers.restore(state);
            self.stack = state.stack.clone();
            // The records are of the guest that goes on: enabled, they stay.
            self.armed = true;
        }
    }
}
