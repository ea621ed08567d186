//! PMU accesses of an AArch32 EL0.
//!
//! EL0 may run in AArch32 under an AArch64 EL1. Its MRC, MCR, MRRC and MCRR instructions reach the same
//! counters by other names, with exception classes of their own (Arm ARM DDI 0487, "ISS encoding for an
//! exception from an MCR or MRC access" and "from an MCRR or MRRC access"; chapter G8.4 for the registers).
//! PMUSERENR_EL0 decides what EL0 may do, as in AArch64: with EN, or the bit for the register, the access is
//! performed; without, it traps to EL1 with the syndrome that it came with.

use vpmu::arm::{Encoding, Register};

/// A trapped MRC, MCR, MRRC or MCRR of coprocessor 15.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Which PMU register; `None` when it is none that EL0 has.
    pub register: Option<Register>,
    /// Which bits of it.
    pub part: Part,
    /// General-purpose register; it gets or has the low word.
    pub rt: usize,
    /// General-purpose register of the high word, for [`Part::Whole`].
    pub rt2: usize,
    /// To the PMU rather than from it.
    pub write: bool,
    /// Condition of the instruction where the syndrome has it.
    condition: Option<u8>,
}

/// The bits of a 64-bit register that an access reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Bits 31:0. A write to a counter or an event type leaves the others as they are.
    Low,
    /// Bits 63:32.
    High,
    /// All, in two general-purpose registers.
    Whole,
}

impl Access {
    /// Decodes the syndrome of an MCR or MRC (exception class 0x03).
    pub fn from_mcr(iss: u32) -> Self {
        let field = |at: u32, mask: u32| (iss >> at & mask) as u8;
        let (op2, op1) = (field(17, 7), field(14, 7));
        let (crn, crm) = (field(10, 15), field(1, 15));
        let (encoding, part) = match (crn, crm, op2) {
            // PMCEID2 and PMCEID3 are the upper halves of PMCEID0_EL0 and PMCEID1_EL0.
            (9, 14, 4 | 5) => (Encoding::new(3, 3, 9, 12, op2 + 2), Part::High),
            // All others have the operands of their AArch64 form.
            _ => (Encoding::new(3, 3, crn, crm, op2), Part::Low),
        };
        Self {
            register: Register::decode(encoding).filter(|_| op1 == 0),
            part,
            rt: field(5, 31).into(),
            rt2: 31,
            write: iss & 1 == 0,
            condition: condition(iss),
        }
    }

    /// Decodes the syndrome of an MCRR or MRRC (exception class 0x04).
    pub fn from_mcrr(iss: u32) -> Self {
        let field = |at: u32, mask: u32| (iss >> at & mask) as u8;
        // Opc1 and CRm.
        let is_cycle_counter = (field(16, 15), field(1, 15)) == (0, 9);
        Self {
            register: is_cycle_counter.then_some(Register::Pmccntr),
            part: Part::Whole,
            rt: field(5, 31).into(),
            rt2: field(10, 31).into(),
            write: iss & 1 == 0,
            condition: condition(iss),
        }
    }

    /// Whether the instruction's condition holds in state `spsr`: a processor may trap one whose condition
    /// fails, and then it does nothing.
    pub fn is_executed(&self, spsr: u64) -> bool {
        let state = it_state(spsr);
        let condition = match self.condition {
            Some(condition) => condition,
            // T32 without a condition in the syndrome: that of the IT block.
            None if state == 0 => return true,
            None => (state >> 4) as u8,
        };
        let flag = |n: u32| spsr >> n & 1 != 0;
        let (n, z, c, v) = (flag(31), flag(30), flag(29), flag(28));
        let holds = match condition >> 1 {
            0 => z,
            1 => c,
            2 => n,
            3 => v,
            4 => c && !z,
            5 => n == v,
            6 => n == v && !z,
            _ => return true,
        };
        holds != (condition & 1 != 0)
    }

    /// Whether a write leaves bits 63:32 as they are: of counters and event types, it does.
    pub const fn keeps_upper_half(&self) -> bool {
        matches!(self.part, Part::Low)
            && matches!(
                self.register,
                Some(
                    Register::Pmccntr
                        | Register::Pmccfiltr
                        | Register::Pmevcntr(_)
                        | Register::Pmevtyper(_)
                        | Register::Pmxevcntr
                        | Register::Pmxevtyper
                )
            )
    }

    /// The 64 bits to write, for Rt and Rt2, where the register holds `before`; that counts only where
    /// [`Self::keeps_upper_half`].
    pub const fn written(&self, rt: u64, rt2: u64, before: u64) -> u64 {
        let upper = match self.part {
            Part::Whole => rt2 << 32,
            Part::Low | Part::High if self.keeps_upper_half() => before & !LOW,
            Part::Low | Part::High => 0,
        };
        upper | rt & LOW
    }

    /// What a read of a register that holds `value` leaves in Rt and, for [`Part::Whole`], in Rt2.
    pub const fn halves(&self, value: u64) -> (u64, u64) {
        match self.part {
            Part::Low | Part::Whole => (value & LOW, value >> 32),
            Part::High => (value >> 32, 0),
        }
    }
}

const LOW: u64 = 0xffff_ffff;

fn condition(iss: u32) -> Option<u8> {
    const CV: u32 = 1 << 24;
    (iss & CV != 0).then_some((iss >> 20 & 15) as u8)
}

/// PSTATE.T: T32.
const PSTATE_T: u64 = 1 << 5;
/// PSTATE.IT, in two pieces: IT\[7:2\] and IT\[1:0\].
const PSTATE_IT: u64 = 0x3f << 10 | 3 << 25;

/// PSTATE.IT of a program in T32; 0 in A32.
const fn it_state(spsr: u64) -> u64 {
    if spsr & PSTATE_T == 0 {
        return 0;
    }
    spsr >> 8 & 0xfc | spsr >> 25 & 3
}

/// `spsr` with its IT block one instruction on (`AArch32.ITAdvance`).
pub const fn advance_it(spsr: u64) -> u64 {
    if spsr & PSTATE_T == 0 {
        return spsr;
    }
    let state = it_state(spsr);
    let next = if state & 7 == 0 {
        0
    } else {
        state & 0xe0 | state << 1 & 0x1f
    };
    spsr & !PSTATE_IT | (next & 0xfc) << 8 | (next & 3) << 25
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALWAYS: u32 = 1 << 24 | 0xe << 20;

    fn mcr(crn: u32, crm: u32, op2: u32) -> Access {
        Access::from_mcr(ALWAYS | op2 << 17 | crn << 10 | 3 << 5 | crm << 1)
    }

    #[test]
    fn the_registers_are_those_of_aarch64() {
        for (crn, crm, op2, register) in [
            (9, 12, 0, Register::Pmcr),
            (9, 12, 3, Register::PmovsClr),
            (9, 13, 0, Register::Pmccntr),
            (9, 13, 2, Register::Pmxevcntr),
            (9, 14, 0, Register::Pmuserenr),
            (9, 14, 3, Register::PmovsSet),
            (14, 8, 5, Register::Pmevcntr(5)),
            (14, 15, 6, Register::Pmevtyper(30)),
            (14, 15, 7, Register::Pmccfiltr),
        ] {
            let access = mcr(crn, crm, op2);
            assert_eq!(access.register, Some(register));
            assert_eq!((access.part, access.rt, access.write), (Part::Low, 3, true));
        }
        let upper = mcr(9, 14, 5);
        assert_eq!(
            (upper.register, upper.part),
            (Some(Register::Pmceid1), Part::High)
        );
        assert_eq!(upper.halves(0x1234_0000_0000).0, 0x1234);
        // PMINTENSET is EL1's, and there is no other coprocessor register here.
        assert_eq!(mcr(9, 14, 1).register, None);
        assert_eq!(
            Access::from_mcr(ALWAYS | 1 << 14 | 9 << 10 | 12 << 1).register,
            None
        );
    }

    #[test]
    fn the_cycle_counter_has_a_form_of_64_bits() {
        let access = Access::from_mcrr(ALWAYS | 4 << 10 | 3 << 5 | 9 << 1 | 1);
        assert_eq!(access.register, Some(Register::Pmccntr));
        assert_eq!((access.rt, access.rt2, access.write), (3, 4, false));
        assert_eq!(access.halves(0x0000_0007_1234_5678), (0x1234_5678, 7));
        assert_eq!(Access::from_mcrr(ALWAYS | 2 << 1).register, None);
    }

    #[test]
    fn a_counter_keeps_its_upper_half_and_a_set_of_bits_does_not() {
        let counter = mcr(9, 13, 0);
        assert!(counter.keeps_upper_half());
        let written = counter.written(0xffff_0000_0001, 9, 0x5_0000_0009);
        assert_eq!(written, 0x5_0000_0001);
        let set = mcr(9, 12, 1);
        assert_eq!(set.written(2, 9, 0x5_0000_0009), 2);
        let whole = Access::from_mcrr(ALWAYS | 9 << 1);
        assert_eq!(whole.written(0xffff_0000_0001, 9, 5), 0x9_0000_0001);
    }

    #[test]
    fn conditions() {
        let with = |condition: u32| Access::from_mcr(1 << 24 | condition << 20);
        let (z, c, n, v) = (1 << 30, 1 << 29, 1 << 31, 1 << 28);
        for (condition, state, executed) in [
            (0, z, true),
            (0, 0, false),
            (1, z, false),
            (2, c, true),
            (8, c, true),
            (8, c | z, false),
            (9, c | z, true),
            (10, n | v, true),
            (11, n, true),
            (12, 0, true),
            (13, z, true),
            (14, 0, true),
            (15, 0, true),
        ] {
            assert_eq!(with(condition).is_executed(state), executed, "{condition}");
        }
        // T32: ITTE EQ (0x06) at its first, its second and its third instruction.
        let t32 = Access::from_mcr(0);
        let mut spsr = PSTATE_T | 0x06 << 8 & 0xfc00 | (0x06 & 3) << 25;
        for expected in [false, false, true, true] {
            assert_eq!(t32.is_executed(spsr), expected, "{spsr:#x}");
            spsr = advance_it(spsr);
        }
        assert_eq!(spsr, PSTATE_T, "the block is over");
        assert!(Access::from_mcr(0).is_executed(0), "A32 is executed always");
    }
}
