//! A timer as one plain value, for migration and snapshots.

use core::fmt;

use super::LvtTimer;

/// What must reach the other side for a guest not to lose a deadline. The slot goes with the
/// guest's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeadlineState {
    /// The layout of this value: [`DeadlineState::LAYOUT`].
    pub layout: u16,
    /// IA32_TSC_DEADLINE as the guest reads it, in its own TSC.
    pub deadline: u64,
    /// A deadline that has fired and whose MSR write may still come; 0: none.
    pub fired: u64,
    /// The LVT timer register.
    pub lvt: LvtTimer,
    /// Whether the guest shares a slot.
    pub shared: bool,
}

impl DeadlineState {
    /// The layout this engine writes and reads.
    pub const LAYOUT: u16 = 1;
}

/// Why a saved timer cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by an engine with another layout.
    Layout {
        /// What the state says.
        saved: u16,
    },
    /// The guest shares a slot and the caller gave none: the guest would go on leaving out writes, for which no host
    /// would make up.
    SlotMissing,
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layout { saved } => write!(
                f,
                "restore a deadline timer of layout {saved}: this engine reads {}",
                DeadlineState::LAYOUT
            ),
            Self::SlotMissing => {
                f.write_str("restore a guest that shares a deadline slot: no slot was given")
            }
        }
    }
}

impl core::error::Error for RestoreError {}
