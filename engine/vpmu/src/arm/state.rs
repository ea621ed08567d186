//! A PMU's registers as one plain value, for migration, snapshots and tests.

use core::fmt;

use super::{MAX_EVENT_COUNTERS, PmuVersion, Register};

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs
/// with equal states are the same to their guests. The emulated and the partitioned design share
/// it, so a guest can move from one to the other.
///
/// Registers are held as the guest reads them. Fields of counters that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// The PMU that the guest finds.
    pub version: PmuVersion,
    /// PMCR_EL0, with the number of event counters in its N.
    pub pmcr: u64,
    // All 64 bits of the registers, although 32 have a meaning: a restore refuses the others and does not drop them.
    /// PMCNTENSET_EL0.
    pub pmcnten: u64,
    /// PMINTENSET_EL1.
    pub pminten: u64,
    /// PMOVSSET_EL0.
    pub pmovs: u64,
    /// PMSELR_EL0.
    pub pmselr: u64,
    /// PMUSERENR_EL0.
    pub pmuserenr: u64,
    /// PMCCNTR_EL0.
    pub pmccntr: u64,
    /// PMCCFILTR_EL0.
    pub pmccfiltr: u64,
    /// PMEVCNTRn_EL0.
    pub pmevcntr: [u64; MAX_EVENT_COUNTERS as usize],
    /// PMEVTYPERn_EL0.
    pub pmevtyper: [u64; MAX_EVENT_COUNTERS as usize],
}

impl PmuState {
    /// The layout this engine writes and reads.
    // Another number for each change of the fields: an older engine then refuses a state that it would misread.
    pub const LAYOUT: u16 = 1;

    /// Returns the state of a PMU out of reset, with `counters` event counters and nothing enabled.
    pub const fn reset(version: PmuVersion, counters: u8) -> Self {
        Self {
            layout: Self::LAYOUT,
            version,
            pmcr: (counters as u64) << super::pmcr::N_SHIFT & super::pmcr::N_MASK,
            // The architecture leaves these UNKNOWN at reset. Zero shows nothing of another guest.
            pmcnten: 0,
            pminten: 0,
            pmovs: 0,
            pmselr: 0,
            pmuserenr: 0,
            pmccntr: 0,
            pmccfiltr: 0,
            pmevcntr: [0; MAX_EVENT_COUNTERS as usize],
            pmevtyper: [0; MAX_EVENT_COUNTERS as usize],
        }
    }

    /// Returns what a register sets or clears bits of, and whether it sets them; `None`: the register is another.
    pub(super) const fn bits(&mut self, register: Register) -> Option<(&mut u64, bool)> {
        Some(match register {
            Register::PmcntenSet => (&mut self.pmcnten, true),
            Register::PmcntenClr => (&mut self.pmcnten, false),
            Register::PmintenSet => (&mut self.pminten, true),
            Register::PmintenClr => (&mut self.pminten, false),
            Register::PmovsSet => (&mut self.pmovs, true),
            Register::PmovsClr => (&mut self.pmovs, false),
            _ => return None,
        })
    }

    /// Refuses a state of another layout, or of another PMU than this.
    pub(super) fn check(&self, version: PmuVersion, counters: u8) -> Result<(), RestoreError> {
        if self.layout != Self::LAYOUT {
            return Err(RestoreError::Layout { saved: self.layout });
        }
        if self.version != version {
            return Err(RestoreError::Version {
                saved: self.version,
                offered: version,
            });
        }
        if self.counters() != counters {
            return Err(RestoreError::Counters {
                saved: self.counters(),
                offered: counters,
            });
        }
        Ok(())
    }

    /// Returns PMCR_EL0.N: how many event counters the guest has.
    pub const fn counters(&self) -> u8 {
        // From the register, not from a field beside it: the two could disagree.
        ((self.pmcr & super::pmcr::N_MASK) >> super::pmcr::N_SHIFT) as u8
    }
}

/// Why a saved PMU cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// The PMU has to be put first.
    Loaded,
    /// Written by an engine with another layout.
    Layout {
        /// What the state says.
        saved: u16,
    },
    // A later version is refused, too: the guest has read the ID register and does not read it again.
    /// The guest has another PMU version.
    Version {
        /// What the state says.
        saved: PmuVersion,
        /// What this PMU offers.
        offered: PmuVersion,
    },
    // More are refused, too: bits that the guest knows as RES0 would begin to work.
    /// The guest has another number of event counters.
    Counters {
        /// What the state says.
        saved: u8,
        /// What this PMU offers.
        offered: u8,
    },
    /// A register holds bits that do not exist here: the state is damaged or from elsewhere.
    Reserved {
        /// The register's name.
        register: &'static str,
        /// What the state says.
        value: u64,
    },
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded => f.write_str("restore a PMU: still loaded; put it first"),
            Self::Layout { saved } => {
                write!(
                    f,
                    "restore a PMU state of layout {saved}: this engine reads {}",
                    PmuState::LAYOUT
                )
            }
            Self::Version { saved, offered } => {
                write!(f, "restore a guest of {saved:?} to a PMU of {offered:?}")
            }
            Self::Counters { saved, offered } => {
                write!(
                    f,
                    "restore a guest with {saved} event counters to a PMU with {offered}"
                )
            }
            Self::Reserved { register, value } => {
                write!(
                    f,
                    "restore {register} = {value:#x}: reserved bits are set in the saved state"
                )
            }
        }
    }
}

impl core::error::Error for RestoreError {}

/// Refuses a register with a bit that is not one of `bits`.
pub(super) const fn fits(
    register: &'static str,
    value: u64,
    bits: u64,
) -> Result<(), RestoreError> {
    if value & !bits == 0 {
        Ok(())
    } else {
        Err(RestoreError::Reserved { register, value })
    }
}
