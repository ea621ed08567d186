//! A PMU's registers as one plain value, for migration, snapshots and tests.

use core::fmt;

use super::{MAX_FIXED, MAX_GENERAL, Version};
use crate::x86::lbr;

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs
/// with equal states are the same to their guests.
///
/// Registers are held as the guest reads them. Those of counters that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// The version the guest was told.
    pub version: Version,
    /// General counters, and their width in bits.
    // In the state, although the guest's CPUID has it: the next host compares before the guest can notice.
    pub general: (u8, u8),
    /// Fixed counters as a bitmap, and their width in bits.
    pub fixed: (u32, u8),
    /// IA32_PERFEVTSELx.
    pub perfevtsel: [u64; MAX_GENERAL as usize],
    /// IA32_PMCx.
    pub pmc: [u64; MAX_GENERAL as usize],
    /// IA32_FIXED_CTRx.
    pub fixed_ctr: [u64; MAX_FIXED as usize],
    /// IA32_FIXED_CTR_CTRL.
    pub fixed_ctr_ctrl: u64,
    /// IA32_PERF_GLOBAL_CTRL.
    pub global_ctrl: u64,
    /// IA32_PERF_GLOBAL_STATUS.
    pub global_status: u64,
    /// IA32_DEBUGCTL.
    pub debugctl: u64,
    /// A PMI has been requested and not taken.
    // In no register: without it, an overflow shortly before the save would never interrupt.
    pub pmi_due: bool,
    /// IA32_PEBS_ENABLE.
    pub pebs_enable: u64,
    /// MSR_PEBS_DATA_CFG.
    pub pebs_data_cfg: u64,
    /// IA32_DS_AREA.
    pub ds_area: u64,
    /// The registers of the last branch records, where the guest has them.
    pub lbr: Option<lbr::intel::State>,
}

impl PmuState {
    /// The layout this engine writes and reads.
    // Another number for each change of the fields: an older engine then refuses a state that it would misread.
    pub const LAYOUT: u16 = 4;
}

/// Why a saved PMU cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by an engine with another layout.
    Layout {
        /// What the state says.
        saved: u16,
    },
    /// The guest was told another version.
    Version {
        /// What the state says.
        saved: Version,
        /// What this PMU offers.
        offered: Version,
    },
    // More counters are refused, too: the MSRs of those that the guest lacks must fault.
    /// The guest was told another number of general counters, or another width.
    General {
        /// What the state says.
        saved: (u8, u8),
        /// What this PMU offers.
        offered: (u8, u8),
    },
    /// The guest was told other fixed counters, or another width.
    Fixed {
        /// What the state says.
        saved: (u32, u8),
        /// What this PMU offers.
        offered: (u32, u8),
    },
    /// Of the guest that was saved and this one, only one has last branch records.
    Lbr,
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
            Self::Layout { saved } => write!(
                f,
                "restore a PMU state of layout {saved}: this engine reads {}",
                PmuState::LAYOUT
            ),
            Self::Version { saved, offered } => {
                write!(f, "restore a guest of {saved:?} to a PMU of {offered:?}")
            }
            Self::General { saved, offered } => write!(
                f,
                "restore a guest with {} general counters of {} bits to a PMU with {} of {}",
                saved.0, saved.1, offered.0, offered.1
            ),
            Self::Fixed { saved, offered } => write!(
                f,
                "restore a guest with fixed counters {:#x} of {} bits to a PMU with {:#x} of {}",
                saved.0, saved.1, offered.0, offered.1
            ),
            Self::Lbr => {
                f.write_str("restore a guest: only one of the two PMUs has last branch records")
            }
            Self::Reserved { register, value } => write!(
                f,
                "restore {register} = {value:#x}: reserved bits are set in the saved state"
            ),
        }
    }
}

impl core::error::Error for RestoreError {}
