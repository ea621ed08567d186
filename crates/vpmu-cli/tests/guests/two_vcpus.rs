//! x86-64 guests with two processors.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Options for a host with one processor: QEMU executes no two at once anyway, and two take so many interrupts that it
/// delivers one of them twice. The guest starts its second processor when all is quiet (`maxcpus=1`).
pub(crate) const ONE_PROCESSOR: [&str; 2] = ["--qemu-arg=-smp", "--qemu-arg=1"];

/// Runs `script` in such a guest of one design, and returns its output and its figures. `compare`
/// runs it, because it tries again where QEMU has ended the guest.
pub(crate) fn compare(
    vpmu: &mut Command,
    options: impl FnOnce(&mut Command),
    script: &str,
) -> (String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (json, kept) = (folder.join("results.json"), folder.join("kept"));
    vpmu.args(["compare", "--arch", "x86_64", "--vcpus", "2"])
        .arg("--json")
        .arg(&json)
        .arg("--keep")
        .arg(&kept);
    options(vpmu);
    let output = vpmu.args(["--", script]).output().unwrap();
    let console = console(&kept);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{console}{errors}");
    assert!(output.status.success());
    let results: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let run = results["runs"][0].clone();
    assert_eq!(run["status"], 0);
    (console, run)
}

/// Returns all of the design's output.
pub(crate) fn console(kept: &Path) -> String {
    let log = fs::read_dir(kept)
        .ok()
        .and_then(|mut designs| designs.next()?.ok())
        .and_then(|design| fs::read(design.path().join("console.log")).ok());
    String::from_utf8_lossy(&log.unwrap_or_default()).into_owned()
}
