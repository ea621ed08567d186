//! What passes between the model and the guest's open registers: the model takes what the guest may have written
//! without a trap, and writes back what it has made of a write that trapped.

use super::BackedPmu;
use super::backing::value_register;
use crate::arm::partition::PmuRegisters;
use crate::arm::{CYCLE_COUNTER, ExceptionLevel, Register, pmcr, pmuserenr};
use crate::counter::{CounterSet, Events, Model};

impl<V: Events> BackedPmu<V> {
    /// Takes from open registers what the model needs to perform this access.
    pub(super) fn take_for<R: PmuRegisters>(
        &mut self,
        register: Register,
        level: ExceptionLevel,
        regs: &mut R,
    ) {
        self.take_overflow_bits(regs);
        if level == ExceptionLevel::El0 || register == Register::Pmuserenr {
            self.pmu.pmuserenr = regs.read(Register::Pmuserenr) & pmuserenr::MASK;
        }
        match register {
            Register::Pmselr | Register::Pmxevtyper => self.take_selection(regs),
            Register::Pmevcntr(_) | Register::Pmccntr | Register::Pmxevcntr | Register::Pmswinc => {
                self.take_selection(regs);
                self.take_values(regs);
            }
            _ => {}
        }
    }

    pub(super) fn take_overflow_bits<R: PmuRegisters>(&mut self, regs: &mut R) {
        let bits = regs.read(Register::PmovsSet) as u32;
        let now = CounterSet::from_bits(bits) & self.pmu.implemented();
        for n in now - self.pmu.overflowed {
            self.pmu.bank.observer.overflowed(n);
        }
        self.pmu.overflowed = now;
    }

    fn take_selection<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.pmu.pmselr = regs.read(Register::Pmselr) as u8 & 0x1f;
    }

    fn take_values<R: PmuRegisters>(&mut self, regs: &mut R) {
        for n in self.pmu.implemented() {
            self.pmu.bank.counters[n].value = regs.read(value_register(n));
        }
    }

    pub(super) fn take_all<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.take_overflow_bits(regs);
        self.pmu.pmuserenr = regs.read(Register::Pmuserenr) & pmuserenr::MASK;
        self.take_selection(regs);
        self.take_values(regs);
    }

    /// Brings open registers to what the model made of a write.
    pub(super) fn publish<R: PmuRegisters>(
        &mut self,
        register: Register,
        value: u64,
        regs: &mut R,
    ) {
        match register {
            Register::Pmcr => {
                // Written at EL2, P would reset the host's counters too.
                if value & pmcr::P != 0 {
                    self.write_values(CounterSet::first(self.pmu.config.counters), regs);
                }
                if value & pmcr::C != 0 {
                    self.write_values(CounterSet::of(CYCLE_COUNTER), regs);
                }
                regs.write(Register::Pmcr, self.pmu.pmcr);
            }
            Register::PmovsSet | Register::PmovsClr => self.write_overflows(regs),
            Register::Pmevcntr(_) | Register::Pmccntr | Register::Pmxevcntr | Register::Pmswinc => {
                self.write_values(self.pmu.implemented(), regs);
                self.write_overflows(regs);
            }
            Register::Pmselr => regs.write(register, self.pmu.pmselr.into()),
            Register::Pmuserenr => regs.write(register, self.pmu.pmuserenr),
            _ => {}
        }
    }

    pub(super) fn write_values<R: PmuRegisters>(&self, counters: CounterSet, regs: &mut R) {
        for n in counters {
            regs.write(value_register(n), self.pmu.bank.counters[n].value);
        }
    }

    pub(super) fn write_overflows<R: PmuRegisters>(&self, regs: &mut R) {
        let clear = self.pmu.implemented() - self.pmu.overflowed;
        regs.write(Register::PmovsClr, clear.bits().into());
        if !self.pmu.overflowed.is_empty() {
            regs.write(Register::PmovsSet, self.pmu.overflowed.bits().into());
        }
    }
}
