//! A PMU as a value, for migration, snapshots and tests.

use super::{Interface, MAX_COUNTERS};
use crate::x86::lbr;

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs with equal states
/// are the same to their guests.
///
/// Registers are held as the guest reads them. Those that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// How the guest reaches its counters.
    pub interface: Interface,
    /// PERF_CTL.
    pub perf_ctl: [u64; MAX_COUNTERS as usize],
    /// PERF_CTR.
    pub perf_ctr: [u64; MAX_COUNTERS as usize],
    /// PerfCntrGlobalCtl.
    pub global_ctl: u64,
    /// PerfCntrGlobalStatus.
    pub global_status: u64,
    /// A PMI has been requested and not taken.
    // In no register: without it, an overflow shortly before the save would never interrupt.
    pub pmi_due: bool,
    /// The registers of the last branch records, where the guest has them.
    pub lbr: Option<lbr::amd::State>,
}

impl PmuState {
    /// The layout this engine writes and reads.
    // Another number for each change of the fields: an older engine then refuses a state that it would misread.
    pub const LAYOUT: u16 = 2;
}
