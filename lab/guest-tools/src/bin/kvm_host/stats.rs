//! The host kernel's statistics of its own work.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use vpmu_guest_tools::files;
use vpmu_measure::Snapshot;

const KVM: &str = "/sys/kernel/debug/kvm";

/// The places of the kernel's statistics.
pub(crate) struct HostStats {
    /// KVM's counters of exits: names and files.
    exits: Vec<(String, String)>,
}

impl HostStats {
    /// Finds KVM's counters, without those of single guests, which come later.
    pub(crate) fn find() -> Self {
        let exits = files::names(KVM)
            .into_iter()
            .filter(|name| name.contains("exit"))
            .map(|name| {
                let path = [KVM, &name].join("/");
                (name, path)
            })
            .collect();
        Self { exits }
    }

    /// Returns whether KVM counts exits for the host's own interrupts separately.
    pub(crate) fn tell_interrupts(&self) -> bool {
        self.exits.iter().any(|(name, _)| name == "irq_exits")
    }

    /// Returns the present statistics.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let stat = files::read("/proc/stat").unwrap_or_default();
        let exits = self.exits.iter().filter_map(|(name, path)| {
            let count = files::read(path).ok()?.trim().parse().ok()?;
            Some((name.clone(), count))
        });
        Snapshot {
            cpu: stat.lines().next().unwrap_or_default().to_string(),
            exits: exits.collect(),
            pmu: BTreeMap::new(),
        }
    }
}
