//! What the guest is offered: its ID registers, and the control registers of EL2 that keep the rest from it.
//!
//! An ID register promises, and a guest may rely on what it promises. So a feature is either virtualized (the
//! guest has it whole, or the monitor keeps its state) or hidden, and the registers of a hidden feature trap,
//! so that no guest uses it unseen. Hidden is what EL2 would have to switch or to share and does not:
//! statistical profiling, trace and branch records, partition identifiers, activity monitors, the PMU after
//! PMUv3p5, and what only exists for a hypervisor.
//!
//! ID registers trap by `HCR_EL2.TID3`, which costs some 50 exits for each CPU that starts (Arm ARM DDI 0487,
//! chapter D24, the pages of the ID registers and of the EL2 registers named here).

use vpmu::arm::{Encoding, PmuVersion};

use crate::regs::{
    IdAa64dfr0El1 as Dfr0, IdAa64dfr1El1 as Dfr1, IdAa64mmfr0El1 as Mmfr0, IdAa64mmfr1El1 as Mmfr1,
    IdAa64mmfr2El1 as Mmfr2, IdAa64mmfr3El1 as Mmfr3, IdAa64mmfr4El1 as Mmfr4,
    IdAa64pfr0El1 as Pfr0, IdAa64pfr1El1 as Pfr1, IdAa64pfr2El1 as Pfr2,
};

mod controls;
mod shared;
pub use controls::{Control, Machine, Sharing, controls, hcr, traps};
pub use shared::shared_id_register;

/// What the guest reads of a field of an ID register.
#[derive(Clone, Copy)]
enum Offer {
    /// 0: the feature does not exist.
    Hidden,
    /// The machine's value, but this one at most.
    AtMost(u64),
    /// This value, where the machine has another than 0.
    Instead(u64),
    /// The PMU version that the engine offers for the machine's; 0 is none. `ID_DFR0_EL1` counts PMUv3 as 3.
    Pmu { v3: u64 },
}
use Offer::{AtMost, Hidden, Instead, Pmu};

/// CRm and op2 of `ID_DFR0_EL1`, `ID_DFR1_EL1` and the `ID_AA64` registers; all are S3_0_C0.
const ID_DFR0: (u8, u8) = (1, 2);
const ID_DFR1: (u8, u8) = (3, 5);
const PFR0: (u8, u8) = (4, 0);
const PFR1: (u8, u8) = (4, 1);
const PFR2: (u8, u8) = (4, 2);
const DFR0: (u8, u8) = (5, 0);
const DFR1: (u8, u8) = (5, 1);
const MMFR0: (u8, u8) = (7, 0);
const MMFR1: (u8, u8) = (7, 1);
const MMFR2: (u8, u8) = (7, 2);
const MMFR3: (u8, u8) = (7, 3);
const MMFR4: (u8, u8) = (7, 4);

/// The fields, each 4 bits wide, that the guest does not read as the machine has them.
const FIELDS: &[((u8, u8), u32, Offer)] = &[
    // The PMU as far as the engine has it. What came later traps by HDFGRTR2_EL2 and HDFGWTR2_EL2 = 0.
    (DFR0, Dfr0::PMUVER_SHIFT, Pmu { v3: 1 }),
    (DFR0, Dfr0::PMSS_SHIFT, Hidden),
    (DFR1, Dfr1::PMICNTR_SHIFT, Hidden),
    (DFR1, Dfr1::EBEP_SHIFT, Hidden),
    (DFR1, Dfr1::DPFZS_SHIFT, Hidden),
    // MDCR_EL2.EnSPM = 0 traps the system PMU.
    (DFR1, Dfr1::SPMU_SHIFT, Hidden),
    (DFR1, Dfr1::SYSPMUID_SHIFT, Hidden),
    (DFR1, Dfr1::SYSPMUID_SHIFT + 4, Hidden),
    // MDCR_EL2.MTPME = 0, which 0xf says.
    (DFR0, Dfr0::MTPMU_SHIFT, Instead(0xf)),
    // HPMN is EL2's.
    (DFR0, Dfr0::HPMN0_SHIFT, Hidden),
    // Statistical profiling: MDCR_EL2.TPMS and E2PB.
    (DFR0, Dfr0::PMSVER_SHIFT, Hidden),
    // Trace: CPTR_EL2.TTA, MDCR_EL2.TTRF and E2TB.
    (DFR0, Dfr0::TRACEVER_SHIFT, Hidden),
    (DFR0, Dfr0::TRACEFILT_SHIFT, Hidden),
    (DFR0, Dfr0::TRACEBUFFER_SHIFT, Hidden),
    (DFR0, Dfr0::EXTTRCBUFF_SHIFT, Hidden),
    (DFR1, Dfr1::ITE_SHIFT, Hidden),
    // Branch records: the nBRB bits of HDFGRTR_EL2, HDFGWTR_EL2 and HFGITR_EL2 = 0.
    (DFR0, Dfr0::BRBE_SHIFT, Hidden),
    // Breakpoints by address range and banks: HDFGRTR2_EL2.nMDSELR_EL1 = 0.
    (DFR1, Dfr1::ABLE_SHIFT, Hidden),
    (DFR1, Dfr1::ABL_CMPS_SHIFT, Hidden),
    (DFR1, Dfr1::ABL_CMPS_SHIFT + 4, Hidden),
    // Partition identifiers: MPAM2_EL2.
    (PFR0, Pfr0::MPAM_SHIFT, Hidden),
    (PFR1, Pfr1::MPAM_FRAC_SHIFT, Hidden),
    (PFR2, Pfr2::MPAM2_SHIFT, Hidden),
    // Activity monitors: CPTR_EL2.TAM. They would count EL2 as well.
    (PFR0, Pfr0::AMU_SHIFT, Hidden),
    // List registers carry neither superpriority nor what GICv4.1 and GICv5 add: HCRX_EL2.TALLINT.
    (PFR1, Pfr1::NMI_SHIFT, Hidden),
    (PFR0, Pfr0::GIC_SHIFT, AtMost(1)),
    (PFR2, Pfr2::GCIE_SHIFT, Hidden),
    // HFGRTR2_EL2 = 0 but for what is named in `HFGRTR2_OPEN`.
    (PFR1, Pfr1::PFAR_SHIFT, Hidden),
    (MMFR4, Mmfr4::SRMASK_SHIFT, Hidden),
    (MMFR4, Mmfr4::TLBID_SHIFT, Hidden),
    (MMFR4, Mmfr4::TPS_SHIFT, Hidden),
    (MMFR4, Mmfr4::TEV_SHIFT, Hidden),
    (MMFR4, Mmfr4::SCRX_SHIFT, Hidden),
    // HFGITR2_EL2 = 0.
    (MMFR4, Mmfr4::POPS_SHIFT, Hidden),
    // HCR_EL2.RW: EL1 is AArch64.
    (PFR0, Pfr0::EL1_SHIFT, AtMost(1)),
    // What a guest without an EL2 cannot have.
    (PFR0, Pfr0::EL2_SHIFT, Hidden),
    (PFR0, Pfr0::SEL2_SHIFT, Hidden),
    (PFR0, Pfr0::RME_SHIFT, Hidden),
    (MMFR0, Mmfr0::FGT_SHIFT, Hidden),
    (MMFR0, Mmfr0::ECV_SHIFT, AtMost(1)),
    (MMFR1, Mmfr1::VH_SHIFT, Hidden),
    (MMFR1, Mmfr1::TWED_SHIFT, Hidden),
    (MMFR1, Mmfr1::HCX_SHIFT, Hidden),
    (MMFR2, Mmfr2::NV_SHIFT, Hidden),
    (MMFR2, Mmfr2::FWB_SHIFT, Hidden),
    (MMFR3, Mmfr3::S2PIE_SHIFT, Hidden),
    (MMFR3, Mmfr3::S2POE_SHIFT, Hidden),
    (MMFR3, Mmfr3::MEC_SHIFT, Hidden),
    (MMFR4, Mmfr4::NV_FRAC_SHIFT, Hidden),
    (MMFR4, Mmfr4::HACDBS_SHIFT, Hidden),
    (MMFR4, Mmfr4::FGWTE3_SHIFT, Hidden),
    // The same for AArch32, which the guest's EL0 may have: PerfMon, CopTrc, MMapTrc, TraceFilt, MTPMU.
    (ID_DFR0, 24, Pmu { v3: 3 }),
    (ID_DFR0, 12, Hidden),
    (ID_DFR0, 16, Hidden),
    (ID_DFR0, 28, Hidden),
    (ID_DFR1, 0, Instead(0xf)),
];

/// Whether `register` is an ID register whose reads `HCR_EL2.TID3` traps.
pub fn is_id_register(register: Encoding) -> bool {
    (register.op0, register.op1, register.crn) == (3, 0, 0) && (1..=7).contains(&register.crm)
}

/// What the guest reads in the ID register `register`, where the machine has `physical`.
pub fn id_register(register: Encoding, physical: u64) -> u64 {
    offered(FIELDS, (register.crm, register.op2), physical)
}

/// What `fields` leave of `physical`, the value of the register with this CRm and op2.
fn offered(fields: &[((u8, u8), u32, Offer)], register: (u8, u8), physical: u64) -> u64 {
    let mut value = physical;
    for &(_, shift, offer) in fields.iter().filter(|(at, ..)| *at == register) {
        let field = physical >> shift & 0xf;
        let offered = match offer {
            Hidden => 0,
            AtMost(most) => field.min(most),
            Instead(_) if field == 0 => 0,
            Instead(other) => other,
            Pmu { v3 } => pmu(field, v3),
        };
        value = value & !(0xf << shift) | offered << shift;
    }
    value
}

/// The offered PMU version for `field`, in a register that counts PMUv3 as `v3` and later ones like PMUVer.
fn pmu(field: u64, v3: u64) -> u64 {
    // Below `v3` are the AArch32 PMUs of Armv7.
    if field < v3 {
        return 0;
    }
    match PmuVersion::from_id_aa64dfr0(field << 8) {
        None => 0,
        Some(PmuVersion::V3) => v3,
        Some(version) => version.pmuver().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn id(crm: u8, op2: u8) -> Encoding {
        Encoding::new(3, 0, 0, crm, op2)
    }

    #[test]
    fn a_later_pmu_is_offered_as_far_as_it_is_virtualized() {
        // PMUv3p9 with PMICNTR, thread-aware counting, SPE, BRBE, TRBE, trace.
        let dfr0 = 0x11f1_1111_1010_1911;
        assert_eq!(id_register(id(5, 0), dfr0) >> 8 & 0xf, 6);
        assert_eq!(id_register(id(5, 0), dfr0), 0x000f_0010_1010_1601);
        assert_eq!(id_register(id(5, 1), u64::MAX), 0x0000_0000_ffff_ff00);
        // Earlier ones as they are; a PMU of the implementer's own not at all.
        for version in [1, 4, 5, 6] {
            assert_eq!(id_register(id(5, 0), version << 8), version << 8);
        }
        assert_eq!(id_register(id(5, 0), 0xf00), 0);
        // AArch32 says the same.
        assert_eq!(id_register(id(1, 2), 0x9001_1666), 0x0000_0666);
        for (perfmon, offered) in [(0, 0), (2, 0), (3, 3), (4, 4), (6, 6), (9, 6), (0xf, 0)] {
            assert_eq!(id_register(id(1, 2), perfmon << 24), offered << 24);
        }
    }

    #[test]
    fn what_only_a_hypervisor_has_is_not_the_guests() {
        let pfr0 = id_register(id(4, 0), 0x1111_1111_1111_1111);
        assert_eq!(pfr0 >> 8 & 0xf, 0, "EL2");
        assert_eq!(pfr0 >> 40 & 0xff, 0, "MPAM and AMU");
        assert_eq!(pfr0 >> 12 & 0xf, 1, "EL3 stays");
        assert_eq!(id_register(id(7, 0), 0x2 << 60) >> 60, 1);
        // A register without a row is the machine's.
        assert_eq!(id_register(id(6, 0), 0x1234_5678), 0x1234_5678);
    }
}
