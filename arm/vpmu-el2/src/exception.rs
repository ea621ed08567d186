//! An exception into EL1, as the processor would take it (Arm ARM DDI 0487, pseudocode `AArch64.TakeException`), and the
//! end of an instruction that EL2 has completed. All of it is arithmetic on register values.

use vpmu::arm::ExceptionLevel;

use crate::aarch32;

/// `ESR_EL1` of an Undefined exception: class 0, 32-bit instruction.
pub const ESR_UNDEFINED: u64 = 1 << 25;

/// `ESR_ELx.EC`: an instruction abort or a data abort from the same exception level. One less is the class from a
/// lower level.
const EC_LOWER_INSTRUCTION_ABORT: u64 = 0x20;
const EC_INSTRUCTION_ABORT_SAME: u64 = 0x21;
const EC_DATA_ABORT_SAME: u64 = 0x25;
/// `ESR_ELx.IL`: the instruction is 32 bits long.
const ESR_IL: u64 = 1 << 25;
/// `ESR_ELx.WnR` and `CM` of a data abort.
const ESR_ABORT_KIND: u64 = 1 << 6 | 1 << 8;
/// `ESR_ELx.IFSC` and `DFSC`: synchronous external abort, not on a table walk. The level of a walk at which hardware
/// would report one is not in a stage-2 syndrome, so an abort of a walk is reported as this one, too.
const FSC_EXTERNAL: u64 = 0b01_0000;

/// Returns the `ESR_EL1` of the synchronous external abort that a guest gets for the access with this `ESR_EL2`, a
/// stage-2 fault. `level` is the exception level of the access.
pub const fn external_abort(esr_el2: u64, level: ExceptionLevel) -> u64 {
    let same = match level {
        ExceptionLevel::El0 => 0,
        ExceptionLevel::El1 => 1,
    };
    if esr_el2 >> 26 & 0x3f == EC_LOWER_INSTRUCTION_ABORT {
        (EC_INSTRUCTION_ABORT_SAME - 1 + same) << 26 | ESR_IL | FSC_EXTERNAL
    } else {
        let kept = esr_el2 & (ESR_IL | ESR_ABORT_KIND);
        (EC_DATA_ABORT_SAME - 1 + same) << 26 | kept | FSC_EXTERNAL
    }
}

/// PSTATE after the instruction that trapped in state `spsr` has been completed for the guest: its
/// branch type is used up, a debugger's single step, and in AArch32 one instruction of an IT block.
pub const fn stepped(spsr: u64) -> u64 {
    if spsr & PSTATE_AARCH32 != 0 {
        return aarch32::advance_it(spsr & !PSTATE_SS);
    }
    spsr & !(PSTATE_SS | PSTATE_BTYPE)
}

const PSTATE_SS: u64 = 1 << 21;
const PSTATE_BTYPE: u64 = 3 << 10;
const PSTATE_NZCV: u64 = 0xf << 28;
const PSTATE_TCO: u64 = 1 << 25;
const PSTATE_DIT: u64 = 1 << 24;
const PSTATE_PAN: u64 = 1 << 22;
const PSTATE_ALLINT: u64 = 1 << 13;
const PSTATE_SSBS: u64 = 1 << 12;
const PSTATE_DAIF: u64 = 0xf << 6;
const PSTATE_AARCH32: u64 = 1 << 4;
const MODE_EL1H: u64 = 0b0101;
const SCTLR_SPAN: u64 = 1 << 23;
const SCTLR_DSSBS: u64 = 1 << 44;
const SCTLR_NMI: u64 = 1 << 61;
const SCTLR_SPINTMASK: u64 = 1 << 62;

/// Where an exception to EL1 continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExceptionEntry {
    /// The new PC: `VBAR_EL1` plus the vector of the exception's origin.
    pub pc: u64,
    /// The new PSTATE, in `SPSR` form.
    pub pstate: u64,
}

impl ExceptionEntry {
    /// A synchronous exception to EL1 taken in state `spsr`.
    ///
    /// `mte` says whether PSTATE.TCO exists; it is then set, as for any exception.
    pub fn synchronous(spsr: u64, vbar_el1: u64, sctlr_el1: u64, mte: bool) -> Self {
        let offset = match spsr & 0x1f {
            mode if mode & PSTATE_AARCH32 != 0 => 0x600,
            MODE_EL1H => 0x200,
            0b0100 => 0x000,
            _ => 0x400,
        };
        let mut pstate = spsr & (PSTATE_NZCV | PSTATE_DIT | PSTATE_PAN) | PSTATE_DAIF | MODE_EL1H;
        if sctlr_el1 & SCTLR_SPAN == 0 {
            pstate |= PSTATE_PAN;
        }
        if sctlr_el1 & SCTLR_DSSBS != 0 {
            pstate |= PSTATE_SSBS;
        }
        // Else an interrupt with superpriority would come before the handler has saved ELR_EL1.
        if sctlr_el1 & (SCTLR_NMI | SCTLR_SPINTMASK) == SCTLR_NMI {
            pstate |= PSTATE_ALLINT;
        }
        if mte {
            pstate |= PSTATE_TCO;
        }
        Self {
            pc: vbar_el1.wrapping_add(offset),
            pstate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_enter_el1_as_the_processor_would() {
        let from = |spsr| ExceptionEntry::synchronous(spsr, 0x1000, SCTLR_SPAN, false);
        assert_eq!(from(0b0101).pc, 0x1200);
        assert_eq!(from(0b0100).pc, 0x1000);
        assert_eq!(from(0b0000).pc, 0x1400);
        assert_eq!(from(0b10000).pc, 0x1600);
        assert_eq!(
            from(PSTATE_NZCV).pstate,
            PSTATE_NZCV | PSTATE_DAIF | MODE_EL1H
        );
        let masks = |sctlr| ExceptionEntry::synchronous(0, 0, sctlr, false).pstate & PSTATE_ALLINT;
        assert_eq!(masks(SCTLR_NMI), PSTATE_ALLINT);
        assert_eq!((masks(0), masks(SCTLR_NMI | SCTLR_SPINTMASK)), (0, 0));
        let pan = ExceptionEntry::synchronous(0, 0, 0, true).pstate;
        assert_eq!(pan & (PSTATE_PAN | PSTATE_TCO), PSTATE_PAN | PSTATE_TCO);
    }

    #[test]
    fn a_completed_instruction_uses_up_branch_type_and_single_step() {
        let spsr = PSTATE_NZCV | PSTATE_SS | PSTATE_BTYPE | MODE_EL1H;
        assert_eq!(stepped(spsr), PSTATE_NZCV | MODE_EL1H);
        // In AArch32 the bits of BTYPE are of an IT block, which only T32 has.
        let aarch32 = PSTATE_BTYPE | PSTATE_AARCH32;
        assert_eq!(stepped(aarch32), aarch32);
    }

    #[test]
    fn a_fault_of_stage_2_becomes_the_abort_that_hardware_gives() {
        // A store of a pair from EL1: ISV is 0, WnR 1, stage-2 translation fault at level 3.
        let store = 0x24 << 26 | ESR_IL | 1 << 6 | 0x07;
        assert_eq!(external_abort(store, ExceptionLevel::El1), 0x9600_0050);
        assert_eq!(external_abort(store, ExceptionLevel::El0), 0x9200_0050);
        // A load whose instruction is described: no part of the description is EL1's.
        let load = 0x24 << 26 | ESR_IL | 1 << 24 | 3 << 22 | 5 << 16 | 0x07;
        assert_eq!(external_abort(load, ExceptionLevel::El1), 0x9600_0010);
        let fetch = 0x20 << 26 | ESR_IL | 0x07;
        assert_eq!(external_abort(fetch, ExceptionLevel::El1), 0x8600_0010);
        assert_eq!(external_abort(fetch, ExceptionLevel::El0), 0x8200_0010);
    }
}
