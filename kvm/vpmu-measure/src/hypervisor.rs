//! Statistics of this project's hypervisors.

use alloc::{collections::BTreeMap, string::String, vec::Vec};

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

/// A part of the host's profile of its guest: samples of one processor. A profile has one record or more for each.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostProfile {
    /// The processor's number.
    pub cpu: u32,
    /// Samples for which there was no room. In a processor's first record, as `events` and `vectors`.
    #[serde(default)]
    pub lost: u64,
    /// Each event's number, and how often it has occurred in the guest, to the last sample.
    #[serde(default)]
    pub events: Vec<(u16, u64)>,
    /// `VBAR_EL1` when the guest ended: where its kernel's exception vectors are.
    #[serde(default)]
    pub vectors: u64,
    /// The samples, in the order of time.
    pub samples: Vec<HostSample>,
}

/// One sample of the guest: time (ticks of the system counter), PC, exception level, CONTEXTIDR_EL1, VMID, and the
/// place of its event in `events`.
pub type HostSample = (u64, u64, u8, u32, u16, u8);

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
    /// How often a counter of the guest was found to have counted only part of the time: its value is too low.
    #[serde(default)]
    pub part_time: u64,
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
