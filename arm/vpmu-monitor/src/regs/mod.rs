//! Bits of the registers that the monitor uses, by name.
//!
//! Layouts that the `arm-sysregs` crate has are taken from there (Arm ARM DDI 0487, chapter D24, "AArch64
//! System Register Descriptions"); this room adds those that it lacks.

pub mod list_register;

pub use arm_sysregs::{
    el0::registers::CtrEl0,
    el1::registers::{
        IccCtlrEl1, IdAa64dfr0El1, IdAa64dfr1El1, IdAa64isar1El1, IdAa64isar2El1, IdAa64isar3El1,
        IdAa64mmfr0El1, IdAa64mmfr1El1, IdAa64mmfr2El1, IdAa64mmfr3El1, IdAa64mmfr4El1,
        IdAa64pfr0El1, IdAa64pfr1El1, IdAa64pfr2El1, MpamidrEl1,
    },
    el2::registers::{
        CptrEl2, HcrEl2, HcrxEl2, HdfgrtrEl2, HfgitrEl2, Hfgrtr2El2, HfgrtrEl2, HfgwtrEl2,
        IccSreEl2, IchHcrEl2, MairEl2, MdcrEl2, Mpam2El2, MpamhcrEl2, SctlrEl2, SpsrEl2, TcrEl2,
        VtcrEl2, VttbrEl2,
    },
};

/// `CPTR_EL2.TTA` where `HCR_EL2.E2H` is 0: accesses to the trace unit's registers trap.
pub const CPTR_TTA: u64 = 1 << 20;

/// `CNTHCTL_EL2` where `HCR_EL2.E2H` is 0: EL1PCTEN and EL1PCEN, the physical counter and timer do not trap.
pub const CNTHCTL_EL1_PHYSICAL: u64 = 0b11;

/// `ZCR_EL2.LEN` and `SMCR_EL2.LEN`: as long as the machine has vectors.
pub const VECTOR_LENGTH: u64 = 0xf;
/// `SMCR_EL2.FA64` and `EZT0`: all instructions in streaming mode, and ZT0, do not trap.
pub const SMCR_OPEN: u64 = 0b11 << 30;

/// `PMBIDR_EL1.P` and `TRBIDR_EL1.P`: the buffer belongs to a higher exception level, and its registers trap.
pub const BUFFER_IS_NOT_OURS: u64 = 1 << 4;

/// `SCTLR_EL2` where `HCR_EL2.E2H` is 0: bits that read as 1.
pub const SCTLR_EL2_RES1: u64 = 0x30c5_0830;
/// `SCTLR_EL1` with its RES1 bits and nothing else: MMU and caches off, little-endian.
pub const SCTLR_EL1_RESET: u64 = 0x30d0_0800;

/// Bytes of a frame of the GIC's: a distributor has one, a GICv3's redistributor two.
pub const GIC_FRAME: u64 = 0x1_0000;

/// `SPSR_EL2` of a CPU that enters an arm64 kernel: EL1 on SP_EL1, D, A, I and F masked.
pub const SPSR_EL1H_MASKED: u64 = SpsrEl2::D
    .union(SpsrEl2::A)
    .union(SpsrEl2::I)
    .union(SpsrEl2::F)
    .with_m_3_0(0b0101)
    .bits();
