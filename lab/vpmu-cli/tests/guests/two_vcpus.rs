//! x86-64 guests with two processors. With `maxcpus=1` the guest starts its second when all is quiet.

use std::process::Command;

use crate::support::compared;
use serde_json::Value;

/// Runs `script` in such a guest of one design, and returns its output and its figures.
pub(crate) fn compare(
    vpmu: &mut Command,
    options: impl FnOnce(&mut Command),
    script: &str,
) -> (String, Value) {
    let compared = compared(
        vpmu,
        |vpmu| {
            vpmu.args(["--vcpus", "2"]);
            options(vpmu);
        },
        script,
    );
    (compared.console, compared.run)
}
