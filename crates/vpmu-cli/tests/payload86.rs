//! Runs the bare-metal x86-64 test program on vpmu-vmm, under every policy: what it finds must be
//! the same everywhere.
//!
//! The program (`guest/payload86`) checks every PMU register, counting, overflows, PMIs, RDPMC, a
//! storm and hostile writes, on two CPUs, and that each has a PMU of its own. On a machine whose own
//! KVM cannot run guests it runs in a stock KVM host under QEMU.

mod common;
mod guests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::skipped;
use guests::vpmu;

/// Where `script/setup` puts the bare-metal programs, beside `target/release`.
fn payload() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_vpmu")).ancestors().nth(2)?;
    let path = target.join("guest/x86_64/payload.elf");
    if path.exists() {
        return Some(path);
    }
    skipped(&format!("no {}; run script/setup", path.display()));
    None
}

/// The console of the payload with these options of vpmu, started with `words`.
fn run(options: &[&str], words: &str) -> Option<String> {
    let output = vpmu("x86_64")?
        .args(["run", "--arch", "x86_64", "--pmu", "emulated"])
        .args(["--append", words])
        .args(options)
        .arg("--kernel")
        .arg(payload()?)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    let console = format!("{text}{errors}");
    assert!(output.status.success(), "{options:?}:\n{console}");
    assert!(console.contains(" 0 failed,"), "{options:?}:\n{console}");
    Some(console)
}

/// The names of the tests that passed, those with a listed deviation included.
fn passed(console: &str) -> BTreeSet<&str> {
    console
        .lines()
        .filter_map(|line| line.strip_prefix("ok ")?.split(" (").next())
        .collect()
}

#[test]
fn every_policy_gives_the_same_pmu() {
    let mut expected = String::new();
    for policy in ["recreate", "reuse", "paused"] {
        let Some(console) = run(&["--policy", policy, "--vcpus", "2"], "") else {
            return;
        };
        let tests = passed(&console);
        assert!(tests.len() > 150, "{policy}:\n{console}");
        assert!(tests.contains("isolation.counts"), "{policy}:\n{console}");
        assert!(!console.contains("no work is done"), "{policy}:\n{console}");
        if expected.is_empty() {
            expected = console;
        } else {
            assert_eq!(tests, passed(&expected), "{policy}");
        }
    }
}

/// Fixed counter 0 and more events of the general ones.
#[test]
fn instructions_by_approximation_are_a_counter_as_any_other() {
    run(&["--vmm-arg=--approximate-instructions"], "");
}
