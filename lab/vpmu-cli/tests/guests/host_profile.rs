//! The profile that the monitor takes of its guest, while the guest takes one of its own.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;

use crate::payload::program;
use crate::support::{NO_SYMBOLS, text, turn, vpmu};

/// The workload's weights, in percent.
const WEIGHTS: [(&str, f64); 4] = [("main", 5.0), ("foo", 50.0), ("bar", 30.0), ("qux", 15.0)];

/// The guest records samples of its own, with a period that has no divisor in common with the workload's unit. It takes some
/// 998.5 periods: with one of which it takes about 998, a few instructions of the monitor's decide whether there is one more.
const RECORD: &str =
    "perf record --no-bpf-event -q -e cycles -c 1002851 -o perf.data -- workload --scale 10000";

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
        .args(["--", &[NO_SYMBOLS, RECORD].concat()])
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
        assert!(
            ratio <= 1.02,
            "guest time with a profile: {ratio}\n{profiled}\n{alone}"
        );
        // The kernel's functions have names.
        let named = |stack: &&str| {
            stack.split(';').nth(1) == Some("[kernel]") && stack.split(';').count() == 3
        };
        assert!(stacks.keys().any(named), "{folded}");
    } else {
        println!("this QEMU does not keep host counters apart: see docs/how/partitioned-pmu.md");
    }
}

/// Runs `guest` with a profile of 1,000 samples a second and `more` options. Returns its output and the monitor's records.
fn kept(design: &str, more: &[&str], guest: &[&str]) -> (String, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let output = vpmu("aarch64")
        .unwrap()
        .args(["run", "--pmu", design, "--host-profile", "1000"])
        .args(more)
        .arg("--keep")
        .arg(folder.path())
        .args(guest)
        .output()
        .unwrap();
    let records = fs::read_to_string(folder.path().join(design).join("records.json")).unwrap();
    let said = text(&output).replace('\r', "");
    (said, serde_json::from_str(&records).unwrap())
}

/// How many samples of CPU `cpu` the host has.
fn samples(records: &[Value], cpu: u64) -> usize {
    records
        .iter()
        .filter_map(|record| record.get("host-profile"))
        .filter(|profile| profile["cpu"] == cpu)
        .filter_map(|profile| profile["samples"].as_array())
        .map(Vec::len)
        .sum()
}

/// Checks that the host samples guests that use no PMU: a bare-metal program that sets up neither PMU nor interrupt
/// controller, and Linux without a driver of the PMU.
#[test]
fn a_guest_without_a_pmu_is_sampled() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    let bare: &[&str] = &[
        "--memory",
        "512M",
        "--append",
        "test=switch.unused",
        "--kernel",
        payload.to_str().unwrap(),
    ];
    let linux: &[&str] = &[
        "--append",
        "initcall_blacklist=armv8_pmu_driver_init",
        "--",
        "perf stat -e cycles workload 2>&1",
    ];
    for design in ["partitioned", "emulated"] {
        for (guest, says, least) in [
            (bare, "ok switch.unused", 200),
            (linux, "<not supported>", 90),
        ] {
            let (said, records) = kept(design, &["--host-counters", "1"], guest);
            assert!(said.contains(says), "{design}: {said}");
            let mut monitors = records
                .iter()
                .filter_map(|record| record.get("vpmu-monitor"));
            if monitors.next().unwrap()["isolation"]["partition"] != true {
                println!(
                    "this QEMU does not keep host counters apart: see docs/how/partitioned-pmu.md"
                );
                continue;
            }
            let samples = samples(&records, 0);
            assert!(samples >= least, "{design}: {samples} samples: {said}");
        }
    }
}

/// Checks that the host may take a counter that the guest uses, and that the guest finds everything else as it was: on the
/// CPU that rings the doorbell, on another one, and on one that starts meanwhile. Each CPU samples while it lends.
#[test]
fn a_borrowed_counter_stands_still_and_comes_back() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    for (design, (test, done, lost)) in ["partitioned", "emulated"].into_iter().flat_map(|design| {
        [
            ("switch.borrow", "ok switch.borrow", 1),
            (
                "switch.borrow_elsewhere",
                "ok cpu1.switch.borrow_elsewhere",
                1,
            ),
            ("switch.borrow_before", "ok cpu1.switch.borrow_before", 0),
        ]
        .map(|test| (design, test))
    }) {
        let words = format!("test={test}");
        let guest = ["--vcpus", "2", "--memory", "512M", "--append", &words];
        let guest = [&guest[..], &["--kernel", payload.to_str().unwrap()]].concat();
        let (said, records) = kept(design, &["--borrow"], &guest);
        assert!(said.contains(&format!("{done}\n")), "{design}: {said}");
        assert!(said.contains(" 0 failed, 0 skipped"), "{design}: {said}");
        let mut monitors = records
            .iter()
            .filter_map(|record| record.get("vpmu-monitor"));
        assert_eq!(monitors.next().unwrap()["counters_lost"], lost, "{said}");
        let cpu = u64::from(done.contains("cpu1"));
        let samples = samples(&records, cpu);
        assert!(
            samples > 3,
            "{design}, {test}: {samples} samples of CPU {cpu}"
        );
    }
}
