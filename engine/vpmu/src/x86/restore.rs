//! Why a saved PMU cannot go on here, and the checks that the vendors' states have in common.

use core::fmt;

use super::{amd, intel};

/// Why a saved PMU cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by an engine with another layout.
    Layout {
        /// What the state says.
        saved: u16,
        /// What this engine reads.
        reads: u16,
    },
    // A guest's kernel has chosen its driver at boot.
    /// The guest's processor is of the other vendor.
    Vendor,
    /// The guest has another version of Intel's PMU.
    Version {
        /// What the state says.
        saved: intel::Version,
        /// What this PMU offers.
        offered: intel::Version,
    },
    // More counters are refused, too: the MSRs of those that the guest lacks must fault.
    /// The guest has another number of general counters, or another width.
    General {
        /// What the state says.
        saved: (u8, u8),
        /// What this PMU offers.
        offered: (u8, u8),
    },
    /// The guest has other fixed counters, or another width.
    Fixed {
        /// What the state says.
        saved: (u32, u8),
        /// What this PMU offers.
        offered: (u32, u8),
    },
    // A newer interface is refused, too, as the driver would not use it.
    /// The guest reaches AMD's counters another way.
    Interface {
        /// What the state says.
        saved: amd::Interface,
        /// What this PMU offers.
        offered: amd::Interface,
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
            Self::Layout { saved, reads } => write!(
                f,
                "restore a PMU state of layout {saved}: this engine reads {reads}"
            ),
            Self::Vendor => f.write_str("restore a guest's PMU to one of the other vendor"),
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
            Self::Interface { saved, offered } => write!(
                f,
                "restore a guest of the interface {saved:?} to a PMU with {offered:?}"
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

/// Refuses a state of another layout than this engine `reads`.
pub(super) const fn layout_fits(saved: u16, reads: u16) -> Result<(), RestoreError> {
    if saved == reads {
        Ok(())
    } else {
        Err(RestoreError::Layout { saved, reads })
    }
}

/// Refuses a register with a bit of `reserved`.
pub(super) fn fits(register: &'static str, value: u64, reserved: u64) -> Result<(), RestoreError> {
    if value & reserved == 0 {
        Ok(())
    } else {
        Err(RestoreError::Reserved { register, value })
    }
}

/// Refuses last branch records that are there in one of two PMUs alone, and those that `check` refuses.
pub(super) fn lbr_fits<S, C>(
    state: Option<&S>,
    capability: Option<&C>,
    // The stack's own check names the register, because it has several.
    check: impl FnOnce(&S, &C) -> Result<(), (&'static str, u64)>,
) -> Result<(), RestoreError> {
    match (state, capability) {
        (None, None) => Ok(()),
        (Some(state), Some(capability)) => check(state, capability)
            .map_err(|(register, value)| RestoreError::Reserved { register, value }),
        (Some(_), None) | (None, Some(_)) => Err(RestoreError::Lbr),
    }
}
