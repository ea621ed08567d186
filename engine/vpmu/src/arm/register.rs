//! The PMU's system registers, and the numbers that name them in an instruction.
//!
//! A hypervisor meets a register as five small numbers in the syndrome of a trap (DDI 0487,
//! ESR_ELx, "ISS encoding for an exception from MSR, MRS, or System instruction execution"). They
//! are turned into a [`Register`] here and only here.

use super::config::MAX_EVENT_COUNTERS;

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

/// Defines the registers by one table: what each is, its name, and the op1, CRn, CRm and op2 of its encoding, whose op0 is 3.
/// The encodings of indexed registers have their number in CRm and op2. The order is that of the [`ordinal`](Register::ordinal)s.
macro_rules! registers {
    ($($(#[$about:meta])* $register:ident $(($index:ty))? = $name:literal
       $(, $op1:literal $crn:literal $crm:literal $op2:literal)?;)*) => {
        /// A PMU system register. The number in an indexed one is 0 to 30.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Register {
            $($(#[$about])* $register $(($index))?,)*
        }

        /// The registers without an index, which the table gives an encoding.
        const SINGLE: [Register; Register::COUNT - 2] = [$($({ let _ = $op1; Register::$register },)?)*];

        impl Register {
            /// Returns the register that `encoding` names, or `None` if it names none of the PMU's.
            // Once in a program, not in each decoder around it.
            #[inline(never)]
            pub const fn decode(encoding: Encoding) -> Option<Self> {
                let Encoding { op0, op1, crn, crm, op2 } = encoding;
                Some(match (op0, op1, crn, crm, op2) {
                    // Before the indexed ones, among which PMCCFILTR_EL0 stands.
                    $($((3, $op1, $crn, $crm, $op2) => Self::$register,)?)*
                    (3, 3, 14, 8..=15, 0..=7) => {
                        // CRm[2] chooses between value and type; CRm[1:0] and op2 are the counter's number.
                        let n = (crm & 3) << 3 | op2;
                        match (crm < 12, n < MAX_EVENT_COUNTERS) {
                            (true, true) => Self::Pmevcntr(n),
                            (false, _) => Self::Pmevtyper(n),
                            // There is no PMEVCNTR31_EL0: the encoding is unallocated.
                            (true, false) => return None,
                        }
                    }
                    _ => return None,
                })
            }

            /// Returns the operands that name this register. An index above 30 is taken modulo 32, and so names the place
            /// where the register would be.
            pub const fn encoding(self) -> Encoding {
                match self {
                    $($(Self::$register => Encoding::new(3, $op1, $crn, $crm, $op2),)?)*
                    Self::Pmevcntr(n) => Encoding::new(3, 3, 14, 8 | n >> 3 & 3, n & 7),
                    Self::Pmevtyper(n) => Encoding::new(3, 3, 14, 12 | n >> 3 & 3, n & 7),
                }
            }

            /// Returns a dense number in `0..COUNT`, to count accesses by. All indexed registers of a kind share one.
            pub const fn ordinal(self) -> usize {
                // Variants with an index have no discriminant that could be cast.
                enum Ordinal { $($register,)* }
                match self {
                    $(Self::$register { .. } => Ordinal::$register as usize,)*
                }
            }

            /// Returns the architecture's name, with `n` for the index of an indexed register.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$register { .. } => $name,)*
                }
            }
        }
    };
}

registers! {
    /// PMCR_EL0: control, and the number of event counters.
    Pmcr = "PMCR_EL0", 3 9 12 0;
    /// PMCNTENSET_EL0: enables counters.
    PmcntenSet = "PMCNTENSET_EL0", 3 9 12 1;
    /// PMCNTENCLR_EL0: disables counters.
    PmcntenClr = "PMCNTENCLR_EL0", 3 9 12 2;
    /// PMOVSSET_EL0: sets overflow bits.
    PmovsSet = "PMOVSSET_EL0", 3 9 14 3;
    /// PMOVSCLR_EL0: clears overflow bits.
    PmovsClr = "PMOVSCLR_EL0", 3 9 12 3;
    /// PMINTENSET_EL1: enables overflow interrupts.
    PmintenSet = "PMINTENSET_EL1", 0 9 14 1;
    /// PMINTENCLR_EL1: disables overflow interrupts.
    PmintenClr = "PMINTENCLR_EL1", 0 9 14 2;
    /// PMSWINC_EL0: software increment, write only.
    Pmswinc = "PMSWINC_EL0", 3 9 12 4;
    /// PMSELR_EL0: which counter PMXEVTYPER_EL0 and PMXEVCNTR_EL0 mean.
    Pmselr = "PMSELR_EL0", 3 9 12 5;
    /// PMXEVTYPER_EL0: the selected counter's event type.
    Pmxevtyper = "PMXEVTYPER_EL0", 3 9 13 1;
    /// PMXEVCNTR_EL0: the selected counter.
    Pmxevcntr = "PMXEVCNTR_EL0", 3 9 13 2;
    /// `PMEVTYPER<n>_EL0`: event type and filter of event counter n.
    Pmevtyper(u8) = "PMEVTYPERn_EL0";
    /// `PMEVCNTR<n>_EL0`: event counter n.
    Pmevcntr(u8) = "PMEVCNTRn_EL0";
    /// PMCCNTR_EL0: the cycle counter.
    Pmccntr = "PMCCNTR_EL0", 3 9 13 0;
    /// PMCCFILTR_EL0: the cycle counter's filter, encoded where PMEVTYPER31_EL0 would be.
    Pmccfiltr = "PMCCFILTR_EL0", 3 14 15 7;
    /// PMUSERENR_EL0: what EL0 may do.
    Pmuserenr = "PMUSERENR_EL0", 3 9 14 0;
    /// PMCEID0_EL0: which common events 0x0000-0x001f and 0x4000-0x401f exist.
    Pmceid0 = "PMCEID0_EL0", 3 9 12 6;
    /// PMCEID1_EL0: which common events 0x0020-0x003f and 0x4020-0x403f exist.
    Pmceid1 = "PMCEID1_EL0", 3 9 12 7;
    /// PMMIR_EL1: machine identification, from PMUv3p4 on.
    Pmmir = "PMMIR_EL1", 0 9 14 6;
}

impl Register {
    /// How many different [`ordinal`](Self::ordinal)s there are.
    pub const COUNT: usize = 19;

    /// Returns every register, indexed ones with each index from 0 to 30: 79 of them.
    pub fn all() -> impl Iterator<Item = Self> {
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
