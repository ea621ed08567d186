//! The host's own accounts, at the two ends of a measurement: what exits KVM handled by itself, and
//! where the host's time went.

use std::collections::BTreeMap;
use std::fs;

/// The kernel's accounts at one moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Snapshot {
    /// The first line of /proc/stat.
    cpu: String,
    /// KVM's counters of exits, from debugfs; empty where that is not mounted.
    exits: BTreeMap<String, u64>,
}

impl Snapshot {
    pub(super) fn take() -> Self {
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let files = fs::read_dir("/sys/kernel/debug/kvm").into_iter().flatten();
        let exits = files
            .flatten()
            .filter_map(|file| {
                let name = file.file_name().into_string().ok()?;
                if !name.contains("exit") {
                    return None;
                }
                let value = fs::read_to_string(file.path()).ok()?;
                Some((name, value.trim().parse().ok()?))
            })
            .collect();
        Self {
            cpu: stat.lines().next().unwrap_or_default().to_owned(),
            exits,
        }
    }

    pub(super) fn to_json(&self) -> serde_json::Value {
        serde_json::json!({"cpu": self.cpu, "exits": self.exits})
    }
}
