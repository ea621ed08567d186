//! A PMU's registers as one plain value, for migration, snapshots and tests.

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
    /// The version that the guest has found.
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
