//! Runs the bare-metal test program under every design: what it finds must be the same everywhere.
//!
//! The program checks every PMU register, the exception levels' rules, overflows and their interrupts,
//! the GIC and PSCI, on two CPUs (`guest/payload/aarch64`).

mod common;
mod payload;

use std::process::Command;

use payload::{passed, program};

/// The console of the payload under `design`, started with `words`.
fn run(design: &str, more: &[&str], words: &str) -> Option<String> {
    let output = Command::new(env!("CARGO_BIN_EXE_vpmu"))
        .args([
            "run", "--pmu", design, "--memory", "512M", "--append", words,
        ])
        .args(more)
        .arg("--kernel")
        .arg(program("aarch64/payload.bin")?)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    Some(format!("{text}{errors}"))
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
