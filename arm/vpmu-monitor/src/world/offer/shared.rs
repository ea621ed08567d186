//! What two guests on a machine are offered: less than one alone.
//!
//! The registers of a feature are either switched between the guests or reached by none. Switched are those that every
//! arm64 CPU has, and the vectors of 128 bits. All other features are hidden from both guests, and their registers trap
//! ([`Sharing::Two`](super::Sharing)).

use vpmu::arm::Encoding;

use super::{MMFR1, Offer, PFR0, PFR1, PFR2, id_register};
use crate::regs::{
    IdAa64isar1El1 as Isar1, IdAa64isar2El1 as Isar2, IdAa64isar3El1 as Isar3,
    IdAa64mmfr1El1 as Mmfr1, IdAa64pfr0El1 as Pfr0, IdAa64pfr1El1 as Pfr1, IdAa64pfr2El1 as Pfr2,
};
use Offer::{AtMost, Hidden};

const ISAR1: (u8, u8) = (6, 1);
const ISAR2: (u8, u8) = (6, 2);
const ISAR3: (u8, u8) = (6, 3);
/// Registers of which all fields are hidden: `ID_AA64ZFR0_EL1`, `ID_AA64SMFR0_EL1`, `ID_AA64FPFR0_EL1` and
/// `ID_AA64MMFR3_EL1`, whose features are the extensions of translation that `HCRX_EL2` opens.
const WHOLE: [(u8, u8); 4] = [(4, 4), (4, 5), (4, 7), (7, 3)];

const FIELDS: &[((u8, u8), u32, Offer)] = &[
    // CPTR_EL2.TZ and TSM.
    (PFR0, Pfr0::SVE_SHIFT, Hidden),
    (PFR1, Pfr1::SME_SHIFT, Hidden),
    // HCR_EL2.TERR.
    (PFR0, Pfr0::RAS_SHIFT, Hidden),
    (PFR1, Pfr1::RAS_FRAC_SHIFT, Hidden),
    // HCR_EL2.EnSCXT = 0.
    (PFR0, Pfr0::CSV2_SHIFT, AtMost(1)),
    (PFR1, Pfr1::CSV2_FRAC_SHIFT, Hidden),
    // HCR_EL2.ATA = 0.
    (PFR1, Pfr1::MTE_SHIFT, Hidden),
    (PFR1, Pfr1::MTE_FRAC_SHIFT, Hidden),
    (PFR1, Pfr1::MTEX_SHIFT, Hidden),
    // HCR_EL2.API and APK = 0.
    (ISAR1, Isar1::APA_SHIFT, Hidden),
    (ISAR1, Isar1::API_SHIFT, Hidden),
    (ISAR1, Isar1::GPA_SHIFT, Hidden),
    (ISAR1, Isar1::GPI_SHIFT, Hidden),
    (ISAR2, Isar2::APA3_SHIFT, Hidden),
    (ISAR2, Isar2::GPA3_SHIFT, Hidden),
    (ISAR2, Isar2::PAC_FRAC_SHIFT, Hidden),
    (ISAR3, Isar3::PACM_SHIFT, Hidden),
    (ISAR3, Isar3::PAC_FRAC2_SHIFT, Hidden),
    // HCR_EL2.TWI traps WFIT as WFI, whose waits here have no time of their own.
    (ISAR2, Isar2::WFXT_SHIFT, Hidden),
    // HCRX_EL2 = 0.
    (ISAR1, Isar1::LS64_SHIFT, Hidden),
    (ISAR2, Isar2::MOPS_SHIFT, Hidden),
    (ISAR2, Isar2::SYSREG_128_SHIFT, Hidden),
    (ISAR2, Isar2::SYSINSTR_128_SHIFT, Hidden),
    (PFR1, Pfr1::GCS_SHIFT, Hidden),
    (PFR2, Pfr2::FPMR_SHIFT, Hidden),
    // HFGRTR_EL2.nRCWMASK_EL1 = 0.
    (PFR1, Pfr1::THE_SHIFT, Hidden),
    // HCR_EL2.TLOR.
    (MMFR1, Mmfr1::LO_SHIFT, Hidden),
];

/// What either of two guests reads in the ID register `register`, where the machine has `physical`.
pub fn shared_id_register(register: Encoding, physical: u64) -> u64 {
    let at = (register.crm, register.op2);
    if WHOLE.contains(&at) {
        return 0;
    }
    super::offered(FIELDS, at, id_register(register, physical))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_switched_is_hidden() {
        let id = |(crm, op2)| shared_id_register(Encoding::new(3, 0, 0, crm, op2), !0);
        for (at, shift, offer) in FIELDS {
            let field = id(*at) >> shift & 0xf;
            match offer {
                Hidden => assert_eq!(field, 0, "{at:?} {shift}"),
                AtMost(most) => assert!(field <= *most, "{at:?} {shift}"),
                _ => {}
            }
        }
        for at in WHOLE {
            assert_eq!(id(at), 0, "{at:?}");
        }
        // WFIT, of which HCR_EL2.TWI would make a WFI.
        assert_eq!(id(ISAR2) & 0xf, 0);
        // Floating point stays, and what no guest has at all is hidden still.
        assert_eq!(id(PFR0) >> Pfr0::FP_SHIFT & 0xf, 0xf);
        assert_eq!(id(PFR0) >> Pfr0::EL2_SHIFT & 0xf, 0);
    }
}
