//! The physical PMU registers of this CPU.
//!
//! UNSAFETY: writes system registers. PMU registers change no memory; what they count and whom they
//! interrupt is decided by the engine, through [`PmuRegisters`].

use vpmu::arm::{Register, partition::PmuRegisters};

use crate::sysreg::{isb, numbered_sysreg, read_sysreg, write_sysreg};

/// The PMU of the CPU that executes a call, at EL2.
#[derive(Clone, Copy, Debug, Default)]
pub struct PhysicalPmu;

/// The registers of one event counter: `$name` with the number `$n` of the counter in it.
macro_rules! of_counter {
    ($access:ident $name:literal, $n:expr $(, $value:expr)?) => {
        numbered_sysreg!($access $name, $n, "_el0" $(, $value)?; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17
            18 19 20 21 22 23 24 25 26 27 28 29 30)
    };
}

impl PmuRegisters for PhysicalPmu {
    fn read(&mut self, register: Register) -> u64 {
        match register {
            Register::Pmcr => read_sysreg!("pmcr_el0"),
            Register::PmcntenSet | Register::PmcntenClr => read_sysreg!("pmcntenset_el0"),
            Register::PmovsSet | Register::PmovsClr => read_sysreg!("pmovsset_el0"),
            Register::PmintenSet | Register::PmintenClr => read_sysreg!("pmintenset_el1"),
            Register::Pmselr => read_sysreg!("pmselr_el0"),
            Register::Pmxevtyper => read_sysreg!("pmxevtyper_el0"),
            Register::Pmxevcntr => read_sysreg!("pmxevcntr_el0"),
            Register::Pmevtyper(n) => of_counter!(read "pmevtyper", n),
            Register::Pmevcntr(n) => of_counter!(read "pmevcntr", n),
            Register::Pmccntr => read_sysreg!("pmccntr_el0"),
            Register::Pmccfiltr => read_sysreg!("pmccfiltr_el0"),
            Register::Pmuserenr => read_sysreg!("pmuserenr_el0"),
            Register::Pmceid0 => read_sysreg!("pmceid0_el0"),
            Register::Pmceid1 => read_sysreg!("pmceid1_el0"),
            Register::Pmmir => read_sysreg!("s3_0_c9_c14_6"),
            Register::Pmswinc => 0,
        }
    }

    fn write(&mut self, register: Register, value: u64) {
        // SAFETY: PMU registers reach no memory; the engine keeps guest and host apart.
        unsafe {
            match register {
                Register::Pmcr => write_sysreg!("pmcr_el0", value),
                Register::PmcntenSet => write_sysreg!("pmcntenset_el0", value),
                Register::PmcntenClr => write_sysreg!("pmcntenclr_el0", value),
                Register::PmovsSet => write_sysreg!("pmovsset_el0", value),
                Register::PmovsClr => write_sysreg!("pmovsclr_el0", value),
                Register::PmintenSet => write_sysreg!("pmintenset_el1", value),
                Register::PmintenClr => write_sysreg!("pmintenclr_el1", value),
                Register::Pmswinc => write_sysreg!("pmswinc_el0", value),
                Register::Pmselr => write_sysreg!("pmselr_el0", value),
                Register::Pmxevtyper => write_sysreg!("pmxevtyper_el0", value),
                Register::Pmxevcntr => write_sysreg!("pmxevcntr_el0", value),
                Register::Pmevtyper(n) => of_counter!(write "pmevtyper", n, value),
                Register::Pmevcntr(n) => of_counter!(write "pmevcntr", n, value),
                Register::Pmccntr => write_sysreg!("pmccntr_el0", value),
                Register::Pmccfiltr => write_sysreg!("pmccfiltr_el0", value),
                Register::Pmuserenr => write_sysreg!("pmuserenr_el0", value),
                // Read-only.
                Register::Pmceid0 | Register::Pmceid1 | Register::Pmmir => {}
            }
        }
        // A read that follows, PMXEVCNTR after PMSELR for one, must see the write.
        isb();
    }
}
