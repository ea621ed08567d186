//! Statistics of this project's hypervisors.

use alloc::{collections::BTreeMap, string::String};

use serde::{Deserialize, Serialize};

use crate::kvm::Kvm;

/// The monitor's statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Monitor {
    /// Counters of the guest, without the cycle counter.
    pub guest_counters: Option<u32>,
    /// Counters that the monitor keeps.
    pub host_counters: Option<u32>,
    /// Between the two doorbells; `None` when they were not rung.
    pub measured: Option<Span>,
    /// From guest entry to power-off.
    pub total: Span,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The x86 VMM's statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Vmm {
    /// What becomes of a host event that the guest does not use.
    pub policy: String,
    /// What the guest's counters count with.
    pub backing: Option<String>,
    /// General-purpose counters of the guest.
    pub general: Option<u32>,
    /// Between the two doorbells; `None` when they were not rung.
    pub measured: Option<VmmSpan>,
    /// From guest entry to power-off.
    pub total: VmmSpan,
    /// The host's statistics at the two doorbells.
    #[serde(default)]
    pub host: Option<Kvm>,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The x86 VMM's statistics of a span of time. Kinds that did not happen are not
/// listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmmSpan {
    /// PMU interrupts delivered.
    pub pmis: u64,
    /// Exits to the VMM, by kind: `msr:write:0x38f`, `rdpmc`.
    pub exits: BTreeMap<String, u64>,
    /// What was asked of the host's events, by kind: `create`, `pause`.
    #[serde(default)]
    pub host_operations: BTreeMap<String, u64>,
    /// How often a counter of the guest was to count what the host cannot count: it stood still.
    #[serde(default)]
    pub lost: u64,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The monitor's statistics of a span of time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Its length, of the architected timer.
    pub ticks: u64,
    /// How much of it was spent at EL2, all processors together.
    pub el2_ticks: u64,
    /// PMU interrupts; `None` where they do not pass through the monitor.
    pub pmis: Option<u64>,
    /// How often each kind of exit was taken.
    pub exits: BTreeMap<String, u64>,
    /// The time each kind took, ticks.
    #[serde(default)]
    pub exit_ticks: BTreeMap<String, u64>,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}
