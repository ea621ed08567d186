//! The PMU's system registers, and the numbers that name them in an instruction.
//!
//! A hypervisor meets a register as five small numbers in the syndrome of a trap (DDI 0487,
//! ESR_ELx, "ISS encoding for an exception from MSR, MRS, or System instruction execution"). They
//! are turned into a [`Register`] here and only here.

use super::config::{CYCLE_COUNTER, MAX_EVENT_COUNTERS};

/// The operands of an MRS or MSR instruction that name a system register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Encoding {
    /// 0 to 3.
    pub op0: u8,
    /// 0 to 7.
    pub op1: u8,
    /// 0 to 15.
    pub crn: u8,
    /// 0 to 15.
    pub crm: u8,
    /// 0 to 7.
    pub op2: u8,
}

impl Encoding {
    /// Returns the encoding of `op0, op1, CRn, CRm, op2`, as register pages print it.
    pub const fn new(op0: u8, op1: u8, crn: u8, crm: u8, op2: u8) -> Self {
        Self {
            op0,
            op1,
            crn,
            crm,
            op2,
        }
    }

    /// Takes the operands out of the ISS of a trapped access (EC 0x18). Any value is fine; the
    /// direction and the general register are the caller's to decode.
    pub const fn from_iss(iss: u32) -> Self {
        Self {
            op0: (iss >> 20 & 3) as u8,
            // In the ISS, Op2 stands above Op1 and Rt between CRn and CRm: it is no shifted encoding.
            op2: (iss >> 17 & 7) as u8,
            op1: (iss >> 14 & 7) as u8,
            crn: (iss >> 10 & 15) as u8,
            crm: (iss >> 1 & 15) as u8,
        }
    }

    /// Returns the ISS bits that hold these operands; direction and general register are zero.
    pub const fn to_iss(self) -> u32 {
        (self.op0 as u32) << 20
            | (self.op2 as u32) << 17
            | (self.op1 as u32) << 14
            | (self.crn as u32) << 10
            | (self.crm as u32) << 1
    }
}

/// A PMU system register. The number in an indexed one is 0 to 30.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// PMCR_EL0: control, and the number of event counters.
    Pmcr,
    /// PMCNTENSET_EL0: enables counters.
    PmcntenSet,
    /// PMCNTENCLR_EL0: disables counters.
    PmcntenClr,
    /// PMOVSSET_EL0: sets overflow bits.
    PmovsSet,
    /// PMOVSCLR_EL0: clears overflow bits.
    PmovsClr,
    /// PMINTENSET_EL1: enables overflow interrupts.
    PmintenSet,
    /// PMINTENCLR_EL1: disables overflow interrupts.
    PmintenClr,
    /// PMSWINC_EL0: software increment, write only.
    Pmswinc,
    /// PMSELR_EL0: which counter PMXEVTYPER_EL0 and PMXEVCNTR_EL0 mean.
    Pmselr,
    /// PMXEVTYPER_EL0: the selected counter's event type.
    Pmxevtyper,
    /// PMXEVCNTR_EL0: the selected counter.
    Pmxevcntr,
    /// `PMEVTYPER<n>_EL0`: event type and filter of event counter n.
    Pmevtyper(u8),
    /// `PMEVCNTR<n>_EL0`: event counter n.
    Pmevcntr(u8),
    /// PMCCNTR_EL0: the cycle counter.
    Pmccntr,
    /// PMCCFILTR_EL0: the cycle counter's filter, encoded where PMEVTYPER31_EL0 would be.
    Pmccfiltr,
    /// PMUSERENR_EL0: what EL0 may do.
    Pmuserenr,
    /// PMCEID0_EL0: which common events 0x0000-0x001f and 0x4000-0x401f exist.
    Pmceid0,
    /// PMCEID1_EL0: which common events 0x0020-0x003f and 0x4020-0x403f exist.
    Pmceid1,
    /// PMMIR_EL1: machine identification, from PMUv3p4 on.
    Pmmir,
}

impl Register {
    /// How many different [`ordinal`](Self::ordinal)s there are.
    pub const COUNT: usize = 19;

    /// Returns the register that `encoding` names, or `None` if it names none of the PMU's.
    // Once in a program, not in each decoder around it.
    #[inline(never)]
    pub const fn decode(encoding: Encoding) -> Option<Self> {
        let Encoding {
            op0,
            op1,
            crn,
            crm,
            op2,
        } = encoding;
        Some(match (op0, op1, crn, crm, op2) {
            (3, 0, 9, 14, 1) => Self::PmintenSet,
            (3, 0, 9, 14, 2) => Self::PmintenClr,
            (3, 0, 9, 14, 6) => Self::Pmmir,
            (3, 3, 9, 12, 0) => Self::Pmcr,
            (3, 3, 9, 12, 1) => Self::PmcntenSet,
            (3, 3, 9, 12, 2) => Self::PmcntenClr,
            (3, 3, 9, 12, 3) => Self::PmovsClr,
            (3, 3, 9, 12, 4) => Self::Pmswinc,
            (3, 3, 9, 12, 5) => Self::Pmselr,
            (3, 3, 9, 12, 6) => Self::Pmceid0,
            (3, 3, 9, 12, 7) => Self::Pmceid1,
            (3, 3, 9, 13, 0) => Self::Pmccntr,
            (3, 3, 9, 13, 1) => Self::Pmxevtyper,
            (3, 3, 9, 13, 2) => Self::Pmxevcntr,
            (3, 3, 9, 14, 0) => Self::Pmuserenr,
            (3, 3, 9, 14, 3) => Self::PmovsSet,
            (3, 3, 14, 8..=15, 0..=7) => {
                // CRm[2] chooses between value and type; CRm[1:0] and op2 are the counter's number.
                let n = (crm & 3) << 3 | op2;
                match (crm < 12, n < MAX_EVENT_COUNTERS) {
                    (true, true) => Self::Pmevcntr(n),
                    (false, true) => Self::Pmevtyper(n),
                    (false, false) => Self::Pmccfiltr,
                    // There is no PMEVCNTR31_EL0: the encoding is unallocated.
                    (true, false) => return None,
                }
            }
            _ => return None,
        })
    }

    /// Returns the operands that name this register. An index above 30 is taken modulo 32, and so names the place where
    /// the register would be.
    pub const fn encoding(self) -> Encoding {
        match self {
            Self::PmintenSet => Encoding::new(3, 0, 9, 14, 1),
            Self::PmintenClr => Encoding::new(3, 0, 9, 14, 2),
            Self::Pmmir => Encoding::new(3, 0, 9, 14, 6),
            Self::Pmcr => Encoding::new(3, 3, 9, 12, 0),
            Self::PmcntenSet => Encoding::new(3, 3, 9, 12, 1),
            Self::PmcntenClr => Encoding::new(3, 3, 9, 12, 2),
            Self::PmovsClr => Encoding::new(3, 3, 9, 12, 3),
            Self::Pmswinc => Encoding::new(3, 3, 9, 12, 4),
            Self::Pmselr => Encoding::new(3, 3, 9, 12, 5),
            Self::Pmceid0 => Encoding::new(3, 3, 9, 12, 6),
            Self::Pmceid1 => Encoding::new(3, 3, 9, 12, 7),
            Self::Pmccntr => Encoding::new(3, 3, 9, 13, 0),
            Self::Pmxevtyper => Encoding::new(3, 3, 9, 13, 1),
            Self::Pmxevcntr => Encoding::new(3, 3, 9, 13, 2),
            Self::Pmuserenr => Encoding::new(3, 3, 9, 14, 0),
            Self::PmovsSet => Encoding::new(3, 3, 9, 14, 3),
            Self::Pmevcntr(n) => Encoding::new(3, 3, 14, 8 | n >> 3 & 3, n & 7),
            Self::Pmevtyper(n) => Encoding::new(3, 3, 14, 12 | n >> 3 & 3, n & 7),
            Self::Pmccfiltr => Encoding::new(3, 3, 14, 12 | CYCLE_COUNTER.number() >> 3, 7),
        }
    }

    // Written out: variants with an index have no discriminant that could be cast.
    /// Returns a dense number in `0..COUNT`, to count accesses by. All indexed registers of a kind share one.
    pub const fn ordinal(self) -> usize {
        match self {
            Self::Pmcr => 0,
            Self::PmcntenSet => 1,
            Self::PmcntenClr => 2,
            Self::PmovsSet => 3,
            Self::PmovsClr => 4,
            Self::PmintenSet => 5,
            Self::PmintenClr => 6,
            Self::Pmswinc => 7,
            Self::Pmselr => 8,
            Self::Pmxevtyper => 9,
            Self::Pmxevcntr => 10,
            Self::Pmevtyper(_) => 11,
            Self::Pmevcntr(_) => 12,
            Self::Pmccntr => 13,
            Self::Pmccfiltr => 14,
            Self::Pmuserenr => 15,
            Self::Pmceid0 => 16,
            Self::Pmceid1 => 17,
            Self::Pmmir => 18,
        }
    }

    /// Returns the architecture's name, with `n` for the index of an indexed register.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pmcr => "PMCR_EL0",
            Self::PmcntenSet => "PMCNTENSET_EL0",
            Self::PmcntenClr => "PMCNTENCLR_EL0",
            Self::PmovsSet => "PMOVSSET_EL0",
            Self::PmovsClr => "PMOVSCLR_EL0",
            Self::PmintenSet => "PMINTENSET_EL1",
            Self::PmintenClr => "PMINTENCLR_EL1",
            Self::Pmswinc => "PMSWINC_EL0",
            Self::Pmselr => "PMSELR_EL0",
            Self::Pmxevtyper => "PMXEVTYPER_EL0",
            Self::Pmxevcntr => "PMXEVCNTR_EL0",
            Self::Pmevtyper(_) => "PMEVTYPERn_EL0",
            Self::Pmevcntr(_) => "PMEVCNTRn_EL0",
            Self::Pmccntr => "PMCCNTR_EL0",
            Self::Pmccfiltr => "PMCCFILTR_EL0",
            Self::Pmuserenr => "PMUSERENR_EL0",
            Self::Pmceid0 => "PMCEID0_EL0",
            Self::Pmceid1 => "PMCEID1_EL0",
            Self::Pmmir => "PMMIR_EL1",
        }
    }

    /// Returns every register, indexed ones with each index from 0 to 30: 79 of them.
    pub fn all() -> impl Iterator<Item = Self> {
        const SINGLE: [Register; Register::COUNT - 2] = [
            Register::Pmcr,
            Register::PmcntenSet,
            Register::PmcntenClr,
            Register::PmovsSet,
            Register::PmovsClr,
            Register::PmintenSet,
            Register::PmintenClr,
            Register::Pmswinc,
            Register::Pmselr,
            Register::Pmxevtyper,
            Register::Pmxevcntr,
            Register::Pmccntr,
            Register::Pmccfiltr,
            Register::Pmuserenr,
            Register::Pmceid0,
            Register::Pmceid1,
            Register::Pmmir,
        ];
        SINGLE
            .into_iter()
            .chain((0..MAX_EVENT_COUNTERS).map(Register::Pmevtyper))
            .chain((0..MAX_EVENT_COUNTERS).map(Register::Pmevcntr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_register_decodes_from_its_own_encoding() {
        for register in Register::all() {
            assert_eq!(Register::decode(register.encoding()), Some(register));
            let iss = register.encoding().to_iss();
            assert_eq!(Encoding::from_iss(iss), register.encoding());
            // Direction, Rt and the reserved bits do not disturb.
            assert_eq!(Encoding::from_iss(iss | 0xffc0_03e1), register.encoding());
        }
        assert_eq!(Register::all().count(), 79);
    }

    #[test]
    fn nothing_else_decodes() {
        let decoded = (0..1 << 22)
            .filter(|iss| iss & 0x3e1 == 0)
            .filter_map(|iss| Register::decode(Encoding::from_iss(iss)))
            .count();
        assert_eq!(decoded, 79);
    }

    #[test]
    fn index_31_is_the_cycle_filter_and_no_counter() {
        let place = |register: Register| Register::decode(register.encoding());
        assert_eq!(place(Register::Pmevtyper(31)), Some(Register::Pmccfiltr));
        assert_eq!(place(Register::Pmevcntr(31)), None);
    }

    #[test]
    fn ordinals_are_dense() {
        let mut seen = [false; Register::COUNT];
        for register in Register::all() {
            seen[register.ordinal()] = true;
        }
        assert_eq!(seen, [true; Register::COUNT]);
    }
}
