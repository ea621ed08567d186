//! Cache maintenance by set and way, which traps: an operand can name a line that a guest has nothing to do with.
//!
//! Source: Arm ARM DDI 0487, D24 (CLIDR_EL1, CCSIDR_EL1, CSSELR_EL1) and C5.3 (DC ISW, CSW and CISW). An operand beyond the
//! cache is CONSTRAINED UNPREDICTABLE, and may be undefined, so it does nothing here.

use vpmu::arm::Encoding;

use crate::regs::IdAa64mmfr2El1 as Mmfr2;

/// Whether `instruction` is DC ISW, CSW or CISW, or one of their forms for allocation tags.
pub fn is_operation(instruction: Encoding) -> bool {
    let (crm, op2) = (instruction.crm, instruction.op2);
    instruction == Encoding::new(1, 0, 7, crm, op2)
        && matches!((crm, op2), (6 | 10 | 14, 2 | 4 | 6))
}

/// Returns the `CSSELR_EL1` that selects the data cache of an operand's level.
pub const fn select(operand: u64) -> u64 {
    operand & LEVEL
}

const LEVEL: u64 = 0b111 << 1;

/// The ID registers that describe a cache, of the selected level.
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// `CLIDR_EL1`.
    pub clidr: u64,
    /// `CCSIDR_EL1`.
    pub ccsidr: u64,
    /// `ID_AA64MMFR2_EL1`, which says how CCSIDR_EL1 is laid out.
    pub mmfr2: u64,
}

impl Cache {
    /// Whether `operand` names a line of a data or unified cache that is there, and nothing else.
    pub const fn contains(&self, operand: u64) -> bool {
        let level = (operand & LEVEL) >> 1;
        // CLIDR_EL1.Ctype: 2 to 4 have data.
        if level == 7 || self.clidr >> (3 * level) & 0b111 < 2 {
            return false;
        }
        let (ways, sets) = if self.mmfr2 >> Mmfr2::CCIDX_SHIFT & 0xf != 0 {
            (self.ccsidr >> 3 & 0x1f_ffff, self.ccsidr >> 32 & 0xff_ffff)
        } else {
            (self.ccsidr >> 3 & 0x3ff, self.ccsidr >> 13 & 0x7fff)
        };
        // Both fields are one less. The number of the way is at the top of 32 bits, that of the set above the line's bytes.
        let line = (self.ccsidr & 0b111) as u32 + 4;
        let way_bits = u64::BITS - ways.leading_zeros();
        let (way, rest) = if way_bits == 0 {
            (0, operand)
        } else {
            let at = 32 - way_bits;
            (
                operand >> at & ((1 << way_bits) - 1),
                operand & !(((1 << way_bits) - 1) << at),
            )
        };
        let set = (rest & !LEVEL) >> line;
        way <= ways && set <= sets && rest & ((1 << line) - 1) & !LEVEL == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a Cortex-A72: level 1 has 2 ways of 256 sets, lines of 64 bytes.
    const L1: Cache = Cache {
        clidr: 0x0a20_0023,
        ccsidr: 255 << 13 | 1 << 3 | 2,
        mmfr2: 0,
    };

    #[test]
    fn only_lines_that_exist_are_named() {
        for operand in [0, 255 << 6, 1 << 31, 1 << 31 | 255 << 6] {
            assert!(L1.contains(operand), "{operand:#x}");
        }
        // Sets, levels and bits that are not there.
        for operand in [256 << 6, 2 << 1, 7 << 1, 1 << 4, 1, 1 << 32, !0] {
            assert!(!L1.contains(operand), "{operand:#x}");
        }
        let wide = Cache {
            ccsidr: 255 << 32 | 1 << 3 | 2,
            mmfr2: 1 << Mmfr2::CCIDX_SHIFT,
            ..L1
        };
        assert!(wide.contains(1 << 31 | 255 << 6));
        assert!(!wide.contains(256 << 6));
    }

    #[test]
    fn the_three_operations_and_their_forms_for_tags_are_recognized() {
        for crm in [6, 10, 14] {
            for op2 in [2, 4, 6] {
                assert!(is_operation(Encoding::new(1, 0, 7, crm, op2)));
            }
            assert!(!is_operation(Encoding::new(1, 0, 7, crm, 1)), "by address");
        }
        assert!(!is_operation(Encoding::new(3, 0, 7, 6, 2)), "a register");
    }
}
