//! The KVM host: how its guest ended, and its kernel's statistics.

use alloc::{collections::BTreeMap, string::String};

use serde::{Deserialize, Serialize};

/// About the KVM host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The version line of its VMM.
    pub vmm: String,
    /// Its exit status.
    pub status: i32,
    /// The host gave up on a guest that turned in a circle with its
    /// interrupts off, or waited for one that was lost.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub stuck: bool,
}

/// The KVM host's statistics around the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kvm {
    /// Just before.
    pub begin: Snapshot,
    /// Just after.
    pub end: Snapshot,
}

/// The KVM host's statistics at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The first line of `/proc/stat`, hundredths of a second.
    pub cpu: String,
    /// `/sys/kernel/debug/kvm/*exit*`.
    pub exits: BTreeMap<String, u64>,
    /// What the guest's PMU has cost until then, where the VMM is a QEMU that tells: `kicks`, `msr-exits`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pmu: BTreeMap<String, u64>,
}

/// Counts of KVM's tracepoints while the guest measured, by tracepoint and key.
/// `woken` counts the wake-ups of halted vCPUs by the interrupt that was
/// injected next.
pub type Trace = BTreeMap<String, BTreeMap<String, u64>>;

impl Kvm {
    /// All exits between the two, KVM's own and those to its VMM.
    pub fn exits(&self) -> Option<u64> {
        let all = |snapshot: &Snapshot| snapshot.exits.get("exits").copied();
        Some(all(&self.end)?.saturating_sub(all(&self.begin)?))
    }
}
