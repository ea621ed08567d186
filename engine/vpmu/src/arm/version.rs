/// Which PMUv3 a guest sees. Later ones order higher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PmuVersion {
    /// PMUv3: event numbers of 10 bits.
    V3,
    /// PMUv3 for Armv8.1: event numbers of 16 bits, MDCR_EL2.HPMD.
    V3p1,
    /// PMUv3 for Armv8.4: PMMIR_EL1.
    V3p4,
    /// PMUv3 for Armv8.5: event counters of 64 bits, PMCR_EL0.LP, MDCR_EL2.{HLP, HCCD}.
    V3p5,
}

impl PmuVersion {
    /// Decodes ID_AA64DFR0_EL1.PMUVer. A later version than this engine knows is offered as
    /// PMUv3p5, which every later one contains. `None`: no PMU, or one of the implementer's own.
    pub const fn from_id_aa64dfr0(value: u64) -> Option<Self> {
        match value >> 8 & 0xf {
            0 | 0xf => None,
            // 2 and 3 are reserved values. Each value contains the lower ones, so these are PMUv3 at least.
            1..=3 => Some(Self::V3),
            4 => Some(Self::V3p1),
            5 => Some(Self::V3p4),
            _ => Some(Self::V3p5),
        }
    }

    /// Returns the value of ID_AA64DFR0_EL1.PMUVer (bits 11:8) that says this version.
    pub const fn pmuver(self) -> u8 {
        match self {
            Self::V3 => 1,
            Self::V3p1 => 4,
            Self::V3p4 => 5,
            Self::V3p5 => 6,
        }
    }

    /// Returns which bits of an event number exist.
    pub const fn event_mask(self) -> u16 {
        match self {
            // evtCount is PMEVTYPERn_EL0[9:0] at first, and [15:0] from PMUv3p1 on.
            Self::V3 => 0x3ff,
            _ => 0xffff,
        }
    }

    /// Returns which bits of an event counter exist.
    pub const fn counter_mask(self) -> u64 {
        match self {
            // Before PMUv3p5 bits 63:32 of PMEVCNTRn_EL0 are RES0.
            Self::V3p5 => u64::MAX,
            _ => 0xffff_ffff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_survive_the_id_register() {
        for version in [
            PmuVersion::V3,
            PmuVersion::V3p1,
            PmuVersion::V3p4,
            PmuVersion::V3p5,
        ] {
            let dfr0 = 0x1000_0000_0000_f0ff | u64::from(version.pmuver()) << 8;
            assert_eq!(PmuVersion::from_id_aa64dfr0(dfr0), Some(version));
        }
        assert_eq!(PmuVersion::from_id_aa64dfr0(0x900), Some(PmuVersion::V3p5));
        assert_eq!(PmuVersion::from_id_aa64dfr0(0xf00), None);
        assert_eq!(PmuVersion::from_id_aa64dfr0(0), None);
    }
}
