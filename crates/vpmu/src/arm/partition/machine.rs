//! What a plan must know of the machine: what its ID registers say, and what only a probe tells.

use crate::arm::PmuVersion;

/// What the ID registers of a CPU say about its PMU. All clusters of a machine may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Which PMUv3 (ID_AA64DFR0_EL1.PMUVer).
    pub version: PmuVersion,
    /// FEAT_FGT: HDFGRTR_EL2 and HDFGWTR_EL2 exist (ID_AA64MMFR0_EL1.FGT). Where there is an EL3,
    /// its SCR_EL3.FGTEn must allow them too: accesses of EL2 to them trap to EL3 otherwise.
    pub fgt: bool,
    /// FEAT_HPMN0: MDCR_EL2.HPMN may be 0 (ID_AA64DFR0_EL1.HPMN0).
    pub hpmn0: bool,
    /// PMEVTYPERn_EL0.MT may have an effect (ID_AA64DFR0_EL1.MTPMU is not 0b1111).
    pub mtpmu: bool,
    /// The CPU shares its core with other threads (MPIDR_EL1.MT), which MT would count too.
    pub multithreaded: bool,
}

impl Features {
    /// Decodes ID_AA64DFR0_EL1, ID_AA64MMFR0_EL1 and MPIDR_EL1. `None`: the CPU has no PMUv3.
    pub const fn from_registers(id_aa64dfr0: u64, id_aa64mmfr0: u64, mpidr: u64) -> Option<Self> {
        let Some(version) = PmuVersion::from_id_aa64dfr0(id_aa64dfr0) else {
            return None;
        };
        Some(Self {
            version,
            fgt: id_aa64mmfr0 >> 56 & 0xf != 0,
            hpmn0: id_aa64dfr0 >> 60 & 0xf == 1,
            mtpmu: id_aa64dfr0 >> 48 & 0xf != 0xf,
            multithreaded: mpidr >> 24 & 1 != 0,
        })
    }
}

/// What a machine really does with MDCR_EL2.HPMN: for each way from EL1 to the counters at or
/// above it, whether the way is closed, as the architecture says all are. No ID register tells;
/// the caller tries each at boot, with HPMN lowered, from EL1.
///
/// QEMU up to at least 10.0 closes none of the ways that are listed here except, with
/// [`el2_prohibited`](Self::el2_prohibited), the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isolation {
    /// PMCNTENSET/CLR_EL0 neither show nor change the enable bits of host counters.
    pub pmcnten: bool,
    /// PMINTENSET/CLR_EL1 neither show nor change the interrupt enables of host counters.
    pub pminten: bool,
    /// PMOVSSET/CLR_EL0 neither show nor change the overflow bits of host counters.
    pub pmovs: bool,
    /// PMCR_EL0.P leaves host counters alone.
    pub pmcr_p: bool,
    /// PMSWINC_EL0 does not increment host counters.
    pub pmswinc: bool,
    /// PMEVCNTRn_EL0, PMEVTYPERn_EL0, PMXEVCNTR_EL0 and PMXEVTYPER_EL0 do not reach the registers
    /// of host counters: they trap to EL2 (FEAT_FGT), are undefined, or do nothing.
    pub indexed: bool,
    /// MDCR_EL2.{HPMD, HCCD} stop the guest's event counters and the cycle counter at EL2, even
    /// when their NSH bits ask to count there.
    pub el2_prohibited: bool,
}

impl Isolation {
    /// What the architecture promises, from PMUv3p5 on.
    pub const ALL: Self = Self {
        pmcnten: true,
        pminten: true,
        pmovs: true,
        pmcr_p: true,
        pmswinc: true,
        indexed: true,
        el2_prohibited: true,
    };

    /// Nothing is promised: what to assume before the probe has run.
    pub const NONE: Self = Self {
        pmcnten: false,
        pminten: false,
        pmovs: false,
        pmcr_p: false,
        pmswinc: false,
        indexed: false,
        el2_prohibited: false,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_come_from_their_fields() {
        let all = Features {
            version: PmuVersion::V3p5,
            fgt: true,
            hpmn0: true,
            mtpmu: true,
            multithreaded: true,
        };
        let (hpmn0, mtpmu, fgt, mt) = (1 << 60, 1 << 48, 1 << 56, 1 << 24);
        let version = 6 << 8;
        assert_eq!(
            Features::from_registers(hpmn0 | mtpmu | version, fgt, mt),
            Some(all)
        );
        let none = Features {
            fgt: false,
            hpmn0: false,
            mtpmu: false,
            multithreaded: false,
            ..all
        };
        assert_eq!(
            Features::from_registers(0xf << 48 | version, !(0xf << 56), !mt),
            Some(none)
        );
        assert_eq!(Features::from_registers(0, fgt, mt), None);
    }
}
