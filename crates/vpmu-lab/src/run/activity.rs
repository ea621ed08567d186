//! Tells whether a machine still runs.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

/// Notices when QEMU stops using processor time although it could run.
pub(super) struct Activity {
    pid: u32,
    used: u64,
    since: Instant,
}

impl Activity {
    /// Watches `child` from now on.
    pub(super) fn new(child: &Child) -> Self {
        Self {
            pid: child.id(),
            used: 0,
            since: Instant::now(),
        }
    }

    /// Forgets what was seen.
    pub(super) fn reset(&mut self) {
        self.since = Instant::now();
    }

    /// Returns for how long the machine has neither used nor wanted processor time.
    pub(super) fn quiet_for(&mut self) -> Duration {
        match processor_time(self.pid) {
            // On a busy machine a runnable QEMU may have to wait.
            Some((used, runnable)) if used == self.used && !runnable => {}
            Some((used, _)) => {
                self.used = used;
                self.reset();
            }
            None => self.reset(),
        }
        self.since.elapsed()
    }
}

/// Returns the ticks that a process has used, and whether a thread of it wants more.
fn processor_time(pid: u32) -> Option<(u64, bool)> {
    let mut used = 0;
    let mut runnable = false;
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        let Ok(stat) = fs::read_to_string(task.path().join("stat")) else {
            continue; // a thread that has just ended
        };
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        runnable |= !matches!(*fields.first()?, "S" | "I");
        used += fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    }
    Some((used, runnable))
}
