//! The registers of EL2 that trap PMU accesses, as far as they concern the PMU.

use crate::arm::Register;

/// The PMU's fields of the trap registers; all other bits are zero.
///
/// MDCR_EL2 holds much else (debug, profiling, trace): the caller ORs its own bits in, and must
/// leave HPMN, TPM, TPMCR, HPMD, HCCD, HPME and HLP to this value. So too for the fine-grained
/// ones, where some bits of other features (those whose names begin with n) trap when *zero*.
/// Where FEAT_FGT is missing, HDFGRTR_EL2 and HDFGWTR_EL2 do not exist: their values here are zero
/// and must not be written. The PMU bits of HDFGRTR2_EL2 and HDFGWTR2_EL2 (FEAT_FGT2) stay zero,
/// which traps what came after PMUv3p8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrapRegisters {
    /// MDCR_EL2.
    pub mdcr_el2: u64,
    /// HDFGRTR_EL2.
    pub hdfgrtr_el2: u64,
    /// HDFGWTR_EL2.
    pub hdfgwtr_el2: u64,
}

/// Fields of MDCR_EL2.
pub(super) mod mdcr {
    pub(in crate::arm::partition) const HPMN_MASK: u64 = 0x1f;
    pub(in crate::arm::partition) const TPMCR: u64 = 1 << 5;
    pub(in crate::arm::partition) const TPM: u64 = 1 << 6;
    pub(in crate::arm::partition) const HPME: u64 = 1 << 7;
    pub(in crate::arm::partition) const HPMD: u64 = 1 << 17;
    pub(in crate::arm::partition) const HCCD: u64 = 1 << 23;
    pub(in crate::arm::partition) const HLP: u64 = 1 << 26;
}

/// The bit of HDFGRTR_EL2 and HDFGWTR_EL2 for a register. One bit covers a register, all its
/// indices, its set/clear twin and its selected form.
pub(super) const fn fine_bit(register: Register) -> u64 {
    1 << match register {
        Register::Pmevcntr(_) | Register::Pmxevcntr => 12,
        Register::Pmevtyper(_) | Register::Pmxevtyper => 13,
        Register::Pmccfiltr => 14,
        Register::Pmccntr => 15,
        Register::PmcntenSet | Register::PmcntenClr => 16,
        Register::PmintenSet | Register::PmintenClr => 17,
        Register::PmovsSet | Register::PmovsClr => 18,
        Register::Pmselr => 19,
        // The next two are write traps only: nothing traps just the reads of PMCR_EL0.
        Register::Pmswinc => 20,
        Register::Pmcr => 21,
        // The next and the last are read traps only.
        Register::Pmmir => 22,
        Register::Pmuserenr => 57,
        Register::Pmceid0 | Register::Pmceid1 => 58,
    }
}
