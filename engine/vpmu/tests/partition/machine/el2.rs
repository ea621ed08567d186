//! The PMU as EL2 sees it: every register, whatever HPMN says.

use vpmu::arm::partition::{Attacker, PmuRegisters, ProbedCpu, TrapRegisters};
use vpmu::arm::{ExceptionLevel, Register};

use super::{Exit, Machine, Place};

impl PmuRegisters for Machine {
    fn read(&mut self, register: Register) -> u64 {
        self.el2_accesses += 1;
        match register {
            Register::Pmcr => self.pmcr_with(self.implemented),
            Register::PmcntenSet | Register::PmcntenClr => self.cnten,
            Register::PmintenSet | Register::PmintenClr => self.inten,
            Register::PmovsSet | Register::PmovsClr => self.ovs,
            other => self.read_below_el2(other, true),
        }
    }

    fn write(&mut self, register: Register, value: u64) {
        self.el2_accesses += 1;
        let bits = value & self.all();
        match register {
            Register::Pmcr => self.write_pmcr(value, self.implemented),
            Register::PmcntenSet => self.cnten |= bits,
            Register::PmcntenClr => self.cnten &= !bits,
            Register::PmintenSet => self.inten |= bits,
            Register::PmintenClr => self.inten &= !bits,
            Register::PmovsSet => self.ovs |= bits,
            Register::PmovsClr => self.ovs &= !bits,
            Register::Pmswinc => self.software_increment(bits, Place::El2),
            other => self.write_plain(other, value),
        }
    }
}

impl ProbedCpu for Machine {
    fn set_mdcr_el2(&mut self, value: u64) {
        self.traps = TrapRegisters {
            mdcr_el2: value,
            ..TrapRegisters::default()
        };
    }

    fn attack(&mut self, from: Attacker, register: Register, write: Option<u64>) -> u64 {
        self.aarch32 = from == Attacker::El0AArch32;
        let el = match from {
            Attacker::El1 => ExceptionLevel::El1,
            Attacker::El0 | Attacker::El0AArch32 => ExceptionLevel::El0,
        };
        let exit = self.guest(register, write, el);
        self.aarch32 = false;
        match exit {
            Exit::Value(value) => value,
            _ => 0,
        }
    }

    fn spend_time_at_el2(&mut self) {
        self.happen(0x11, Place::El2, 64);
    }
}
