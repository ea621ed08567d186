//! Checks of the machine itself, whatever it is.

use std::fs;

use serde_json::Value;

use crate::support::{turn, vpmu};

#[test]
fn the_selftest_says_what_holds_and_what_it_cannot_check() {
    let _turn = turn(1);
    let Some(mut command) = vpmu("x86_64") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let output = command.arg("selftest").arg("--json").arg(&file).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("perf_event_paranoid") {
        eprintln!("skipped: {errors}");
        return;
    }
    let found: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(found["schema"], 1);
    assert!(found["machine"]["backing"].is_string(), "{found}");
    let checks = found["checks"].as_array().unwrap();
    let of = |result| checks.iter().filter(move |check| check["result"] == result);
    let names = |result| -> Vec<&str> { of(result).filter_map(|it| it["name"].as_str()).collect() };
    assert_eq!(names("fails"), [""; 0], "{said}{errors}");
    assert!(output.status.success(), "{said}{errors}");
    assert_eq!(
        of("holds").chain(of("cannot")).count(),
        checks.len(),
        "{found}"
    );
    // A clock is on every machine.
    assert!(
        names("holds").contains(&"clock: a storm is bounded"),
        "{said}"
    );
    assert!(checks.iter().all(|check| check["why"] != ""), "{found}");
    assert!(said.contains(" hold, 0 fail, "), "{said}");
}
