//! The host kernel's statistics, at the two ends of a measurement: the exits that KVM handled by itself, and the use of
//! the host's time.

use std::collections::BTreeMap;
use std::fs;

use crate::Snapshot;

/// Reads the statistics. The exits' statistics are in debugfs, and are missing where it is not mounted.
pub(crate) fn snapshot() -> Snapshot {
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
    Snapshot {
        cpu: stat.lines().next().unwrap_or_default().to_owned(),
        exits,
        pmu: BTreeMap::new(),
    }
}
