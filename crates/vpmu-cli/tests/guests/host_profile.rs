//! The profile that the monitor takes of its guest, while the guest takes one of its own.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::payload::program;
use crate::support::{text, turn, vpmu};

/// The workload's weights, in percent.
const WEIGHTS: [(&str, f64); 4] = [("main", 5.0), ("foo", 50.0), ("bar", 30.0), ("qux", 15.0)];

/// The guest records samples of its own, with a period that has no divisor in common with the workload's unit.
const RECORD: &str =
    "perf record --no-bpf-event -q -e cycles -c 1003331 -o perf.data -- workload --scale 10000";

/// Runs [`RECORD`] with `more` options, and returns the run's figures and the file of folded stacks, where there is one.
fn run(more: &[&str]) -> Option<(Value, Option<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let output = vpmu("aarch64")?
        .args(["run", "--pmu", "partitioned", "--host-counters", "2"])
        .args(more)
        .arg("--keep")
        .arg(folder.path())
        .arg("--json")
        .arg(&json)
        .args(["--", RECORD])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let results: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    let folded = fs::read_to_string(folder.path().join("partitioned/host-profile.folded"));
    Some((results["runs"][0].clone(), folded.ok()))
}

#[test]
fn host_and_guest_profile_the_same_program_at_once() {
    let _turn = turn(1);
    let Some((alone, none)) = run(&[]) else {
        return;
    };
    assert_eq!(none, None);
    assert!(alone["host_profile"].is_null());
    let (profiled, folded) = run(&["--host-profile", "1000"]).unwrap();
    let folded = folded.unwrap();
    let stacks: BTreeMap<&str, f64> = folded
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(stack, samples)| (stack, samples.parse().unwrap()))
        .collect();
    let in_json = profiled["host_profile"]["folded"].as_object().unwrap();
    assert_eq!(in_json.len(), stacks.len());
    let of = |function: &str| -> f64 {
        let name = |stack: &str| stack.rsplit(';').next() == Some(function);
        let found = stacks.iter().filter(|(stack, _)| name(stack));
        found.map(|(_, samples)| samples).sum()
    };
    let all: f64 = WEIGHTS.iter().map(|(function, _)| of(function)).sum();
    assert!(all > 900.0, "{folded}");
    for (function, weight) in WEIGHTS {
        let share = 100.0 * of(function) / all;
        assert!(
            (share - weight).abs() <= 2.0,
            "{function}: {share} % of {all}\n{folded}"
        );
    }
    // The guest's own samples are those that it has without.
    assert_eq!(profiled["samples"], alone["samples"]);
    // Where host counters are not apart from the guest's, they interrupt only while the guest counts (here, in user mode),
    // and each access to a register traps.
    if profiled["monitor"]["isolation"]["partition"] == true {
        let seconds = |run: &Value| run["real_s"].as_f64().unwrap();
        let ratio = seconds(&profiled) / seconds(&alone);
        assert!(ratio <= 1.02, "guest time with a profile: {ratio}");
        // The kernel's functions have names.
        let named = |stack: &&str| {
            stack.split(';').nth(1) == Some("[kernel]") && stack.split(';').count() == 3
        };
        assert!(stacks.keys().any(named), "{folded}");
    } else {
        println!("this QEMU does not keep host counters apart: see docs/partition-probe.md");
    }
}

/// Checks that the host may take a counter that the guest uses, and that the guest finds everything else as it was.
#[test]
fn a_borrowed_counter_stands_still_and_comes_back() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    for design in ["partitioned", "emulated"] {
        let folder = tempfile::tempdir().unwrap();
        let output = vpmu("aarch64")
            .unwrap()
            .args(["run", "--pmu", design, "--memory", "512M"])
            .args(["--host-profile", "1000", "--borrow"])
            .args(["--append", "test=switch.borrow", "--keep"])
            .arg(folder.path())
            .arg("--kernel")
            .arg(&payload)
            .output()
            .unwrap();
        let said = text(&output);
        assert!(said.contains("ok switch.borrow"), "{design}: {said}");
        let records = folder.path().join(design).join("records.json");
        let records = fs::read_to_string(records).unwrap();
        assert!(records.contains("\"counters_lost\": 1"), "{records}");
    }
}
