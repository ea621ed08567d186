//! System registers by encoding, so that the tests can access any of them,
//! named or not. The tests assemble the instruction that they need (see
//! `cell`).

use core::fmt;

/// op0, op1, CRn, CRm and op2 as they lie in bits 19:5 of `MRS` and `MSR`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Encoding(u16);

impl Encoding {
    /// Number of encodings with op0 = 3.
    pub const OP0_3: u16 = 1 << 14;

    /// Returns the register S3_`op1`_C`crn`_C`crm`_`op2`.
    pub const fn op0_3(op1: u16, crn: u16, crm: u16, op2: u16) -> Self {
        Self(1 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2)
    }

    /// Returns number `index` of the encodings with op0 = 3.
    pub const fn nth_op0_3(index: u16) -> Self {
        Self(1 << 14 | index & (Self::OP0_3 - 1))
    }

    /// Returns number `index` of the encodings with op0 = 2 and 3.
    pub const fn nth(index: u16) -> Self {
        Self(index & (2 * Self::OP0_3 - 1))
    }

    /// Returns op1.
    pub const fn op1(self) -> u16 {
        self.0 >> 11 & 7
    }

    /// Returns CRn.
    pub const fn crn(self) -> u16 {
        self.0 >> 7 & 15
    }

    /// Returns CRm.
    pub const fn crm(self) -> u16 {
        self.0 >> 3 & 15
    }

    /// Returns op2.
    pub const fn op2(self) -> u16 {
        self.0 & 7
    }

    const fn op0(self) -> u16 {
        2 + (self.0 >> 14)
    }

    /// Returns `MRS X0, <this>`.
    pub const fn mrs_x0(self) -> u32 {
        0xd530_0000 | (self.0 as u32) << 5
    }

    /// Returns `MSR <this>, X0`.
    pub const fn msr_x0(self) -> u32 {
        0xd510_0000 | (self.0 as u32) << 5
    }

    /// Returns the syndrome (ESR_EL1) of this register's access with X0 when it
    /// is trapped as EC 0x18.
    pub const fn trap_syndrome(self, access: Access) -> u64 {
        let direction = match access {
            Access::Read => 1,
            Access::Write => 0,
        };
        0x18 << 26
            | 1 << 25
            | (self.op0() as u64) << 20
            | (self.op2() as u64) << 17
            | (self.op1() as u64) << 14
            | (self.crn() as u64) << 10
            | (self.crm() as u64) << 1
            | direction
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "S{}_{}_C{}_C{}_{}",
            self.op0(),
            self.op1(),
            self.crn(),
            self.crm(),
            self.op2()
        )
    }
}

/// The direction of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// `MRS`
    Read,
    /// `MSR`
    Write,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

macro_rules! registers {
    ($($name:ident = $op1:literal $crn:literal $crm:literal $op2:literal;)*) => {
        $(
            #[doc = stringify!($name)]
            pub const $name: Encoding = Encoding::op0_3($op1, $crn, $crm, $op2);
        )*
    };
}

registers! {
    PMCR_EL0 = 3 9 12 0;
    PMCNTENSET_EL0 = 3 9 12 1;
    PMCNTENCLR_EL0 = 3 9 12 2;
    PMOVSCLR_EL0 = 3 9 12 3;
    PMSWINC_EL0 = 3 9 12 4;
    PMSELR_EL0 = 3 9 12 5;
    PMCEID0_EL0 = 3 9 12 6;
    PMCEID1_EL0 = 3 9 12 7;
    PMCCNTR_EL0 = 3 9 13 0;
    PMXEVTYPER_EL0 = 3 9 13 1;
    PMXEVCNTR_EL0 = 3 9 13 2;
    PMUSERENR_EL0 = 3 9 14 0;
    PMOVSSET_EL0 = 3 9 14 3;
    PMINTENSET_EL1 = 0 9 14 1;
    PMINTENCLR_EL1 = 0 9 14 2;
    PMMIR_EL1 = 0 9 14 6;
    PMCCFILTR_EL0 = 3 14 15 7;
    ID_AA64PFR0_EL1 = 0 0 4 0;
    ID_AA64PFR1_EL1 = 0 0 4 1;
    ID_AA64DFR0_EL1 = 0 0 5 0;
    ID_AA64DFR1_EL1 = 0 0 5 1;
    ID_AA64MMFR0_EL1 = 0 0 7 0;
    CURRENT_EL = 0 4 2 2;
    TPIDR_EL1 = 0 13 0 4;
    MDCR_EL2 = 4 1 1 1;
}

/// Returns PMEVCNTR`n`_EL0, n < 31 (31 is the encoding after the last one).
pub const fn pmevcntr(n: u8) -> Encoding {
    Encoding::op0_3(3, 14, 8 | n as u16 >> 3, n as u16 & 7)
}

/// Returns PMEVTYPER`n`_EL0, n < 31 (31 is PMCCFILTR_EL0).
pub const fn pmevtyper(n: u8) -> Encoding {
    Encoding::op0_3(3, 14, 12 | n as u16 >> 3, n as u16 & 7)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions() {
        // An assembler gives the same values.
        assert_eq!(PMCR_EL0.mrs_x0(), 0xd53b_9c00);
        assert_eq!(PMCR_EL0.msr_x0(), 0xd51b_9c00);
        assert_eq!(PMINTENSET_EL1.mrs_x0(), 0xd538_9e20);
        assert_eq!(pmevcntr(30).mrs_x0(), 0xd53b_ebc0);
        assert_eq!(pmevtyper(31), PMCCFILTR_EL0);
    }

    #[test]
    fn fields() {
        let register = Encoding::op0_3(3, 14, 11, 6);
        assert_eq!(register, pmevcntr(30));
        assert_eq!(
            (
                register.op1(),
                register.crn(),
                register.crm(),
                register.op2()
            ),
            (3, 14, 11, 6)
        );
        assert_eq!(register.to_string(), "S3_3_C14_C11_6");
        assert_eq!(Encoding::nth_op0_3(0), Encoding::op0_3(0, 0, 0, 0));
        assert_eq!(
            Encoding::nth_op0_3(Encoding::OP0_3 - 1),
            Encoding::op0_3(7, 15, 15, 7)
        );
    }

    #[test]
    fn syndrome() {
        // mrs x0, pmccntr_el0 from EL0: EC 0x18, IL, op0 3, op1 3, C9, C13.
        assert_eq!(PMCCNTR_EL0.trap_syndrome(Access::Read), 0x6230_e41b);
        assert_eq!(PMSWINC_EL0.trap_syndrome(Access::Write), 0x6238_e418);
    }
}
