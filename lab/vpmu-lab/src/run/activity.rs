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

    /// Reads the machine's processor time.
    pub(super) fn read(&mut self) {
        match processor_time(self.pid) {
            // On a busy machine a runnable QEMU may have to wait.
            Some((used, runnable)) if used == self.used && !runnable => {}
            Some((used, _)) => {
                self.used = used;
                self.reset();
            }
            None => self.reset(),
        }
    }

    /// Returns for how long the machine has neither used nor wanted processor time.
    pub(super) fn quiet_for(&self) -> Duration {
        self.since.elapsed()
    }

    /// Returns the processor time that QEMU had used at the last read.
    pub(super) fn used(&self) -> Duration {
        /// Of the units of time in proc(5), on every machine that Linux runs on.
        const TICKS_PER_S: u64 = 100;
        Duration::from_millis(self.used * 1000 / TICKS_PER_S)
    }

    /// Returns the time for which QEMU's busiest thread could run and had to wait for a processor. The time is zero
    /// where the kernel keeps no such account.
    pub(super) fn waited(&self) -> Duration {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid));
        let waits = tasks.into_iter().flatten().flatten().filter_map(|task| {
            // Time on a processor, time spent waiting for one, and slices.
            let account = fs::read_to_string(task.path().join("schedstat")).ok()?;
            account.split_whitespace().nth(1)?.parse().ok()
        });
        Duration::from_nanos(waits.max().unwrap_or(0))
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;
    use std::thread::sleep;

    use super::*;

    /// Returns the first processor that this process may use.
    fn processor() -> String {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let mut lines = status.lines();
        let allowed = lines.find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let first = allowed.unwrap().trim().split([',', '-']).next();
        first.unwrap().to_owned()
    }

    /// Starts a busy loop that may use this processor only.
    fn spin(processor: &str) -> Child {
        let mut command = Command::new("taskset");
        command.args(["-c", processor, "sh", "-c", "while :; do :; done"]);
        command.spawn().unwrap()
    }

    #[test]
    fn waiting_for_a_processor_is_told_from_running() {
        if !Path::new("/proc/self/schedstat").exists() {
            eprintln!("skipped: this kernel keeps no account of waiting (CONFIG_SCHED_INFO)");
            return;
        }
        let (begin, processor) = (Instant::now(), processor());
        let mut spinners = [spin(&processor), spin(&processor)];
        let activities = spinners.each_ref().map(Activity::new);
        let waited = || activities.each_ref().map(Activity::waited);
        // Two processes share a processor: each waits while the other runs.
        while waited().contains(&Duration::ZERO) {
            sleep(Duration::from_millis(10));
        }
        for waited in waited() {
            assert!(waited <= begin.elapsed());
        }
        for spinner in &mut spinners {
            spinner.kill().unwrap();
            spinner.wait().unwrap();
        }
    }
}
