//! The command, where it can run guests.

use std::process::Command;

use crate::common::skipped;

/// vpmu, unless something it needs for guests of this architecture is missing here.
pub(crate) fn vpmu(arch: &str) -> Option<Command> {
    let vpmu = || Command::new(env!("CARGO_BIN_EXE_vpmu"));
    let doctor = vpmu().args(["doctor", "--arch", arch]).output().unwrap();
    if !doctor.status.success() {
        let report = String::from_utf8_lossy(&doctor.stdout);
        let missing = report.lines().filter(|line| line.starts_with("missing"));
        skipped(&missing.collect::<Vec<_>>().join("; "));
        return None;
    }
    Some(vpmu())
}
