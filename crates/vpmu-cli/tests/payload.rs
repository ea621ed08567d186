//! Runs the bare-metal test program under every design: what it finds must be the same everywhere.
//!
//! The program checks every PMU register, the exception levels' rules, overflows and their interrupts,
//! the GIC and PSCI, on two CPUs (`guest/payload`).

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::skipped;

/// Where `script/setup` puts the bare-metal programs, beside `target/release`.
fn payload() -> Option<PathBuf> {
    let target = Path::new(env!("CARGO_BIN_EXE_vpmu")).ancestors().nth(2)?;
    let path = target.join("guest/aarch64/payload.bin");
    if path.exists() {
        return Some(path);
    }
    skipped(&format!("no {}; run script/setup", path.display()));
    None
}

/// The console of the payload under `design`, started with `words`.
fn run(design: &str, more: &[&str], words: &str) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_vpmu"))
        .args([
            "run", "--pmu", design, "--memory", "512M", "--append", words,
        ])
        .args(more)
        .arg("--kernel")
        .arg(payload()?)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    Some(format!("{text}{errors}"))
}

/// The names of the tests that passed, those with a listed deviation included.
fn passed(console: &str) -> BTreeSet<&str> {
    console
        .lines()
        .filter_map(|line| line.strip_prefix("ok ")?.split(" (").next())
        .collect()
}

#[test]
fn every_design_agrees_with_the_machine() {
    const TWO_CPUS: &[&str] = &["--vcpus", "2"];
    let Some(native) = run("native", TWO_CPUS, "") else {
        return;
    };
    assert!(native.contains(" 0 failed,"), "native:\n{native}");
    let expected = passed(&native);
    assert!(expected.len() > 150, "native:\n{native}");
    for (design, more) in [
        ("emulated", &[][..]),
        ("partitioned", &[][..]),
        ("partitioned", &["--host-counters", "2"][..]),
        ("untrapped", &[][..]),
    ] {
        let console = run(design, &[TWO_CPUS, more].concat(), "").unwrap();
        assert!(
            console.contains(" 0 failed,"),
            "{design} {more:?}:\n{console}"
        );
        let missing: Vec<_> = expected.difference(&passed(&console)).copied().collect();
        assert!(missing.is_empty(), "{design} {more:?} has not: {missing:?}");
    }
}

#[test]
fn a_guest_that_touches_every_system_register_survives() {
    for design in ["emulated", "partitioned"] {
        let Some(console) = run(design, &[], "test=fuzzregs") else {
            return;
        };
        assert!(console.contains(" 0 failed,"), "{design}:\n{console}");
    }
}

#[test]
fn a_guest_that_reaches_into_the_monitor_is_stopped_with_a_message() {
    for design in ["emulated", "partitioned"] {
        let Some(console) = run(design, &[], "test=stray addr=0x40200000") else {
            return;
        };
        assert!(
            console.contains("guest stopped") && console.contains("the monitor's memory"),
            "{design}:\n{console}"
        );
    }
}
