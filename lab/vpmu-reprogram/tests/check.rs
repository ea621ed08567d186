//! The checks, with the clock that every machine has.
#![cfg(target_os = "linux")]

use std::process::Command;

#[test]
fn a_clock_keeps_every_promise() {
    let check = |backing| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_vpmu-reprogram"));
        let output = program.args(["--check", "--backing", backing]).output();
        let output = output.expect("cargo has built the program");
        (
            output.status,
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    let (status, said) = check("clock");
    // Nothing is checked where no event can be opened.
    if said.is_empty() {
        eprintln!("skipped: no perf events");
        return;
    }
    assert!(status.success(), "{said}");
    assert!(said.starts_with("clock events\nok "), "{said}");
}
