//! x86-64 guests with two processors.

use std::process::Command;

use crate::support::compared;
use serde_json::Value;

/// Options for a host with one processor: QEMU executes no two at once anyway, and two take so many interrupts that it
/// delivers one of them twice. The guest starts its second processor when all is quiet (`maxcpus=1`).
pub(crate) const ONE_PROCESSOR: [&str; 2] = ["--qemu-arg=-smp", "--qemu-arg=1"];

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
