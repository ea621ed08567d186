//! Stock x86-64 guests: without a PMU, under stock KVM, and under this project's VMM.

use std::fs;

use serde_json::Value;

use crate::support::{NO_SYMBOLS, compare, text, turn, vpmu};

/// The script is short, for all of it runs under emulated virtualization, but long enough for some
/// hundred samples. `--no-bpf-event` spares perf a thread that wakes once a second.
const RECORD: &str =
    "perf record --no-bpf-event -q -e cycles -F 1000 -o perf.data -- workload --scale 2500";

/// Checks perf events of this machine, and of a guest, whose hardware events are the virtual PMU's.
/// The bench checks these events before it measures.
#[test]
#[ignore = "a bench: script/test --long"]
fn overflows_with_real_events_here_and_in_a_guest() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("bench.json");
    let Some(mut vpmu) = vpmu("x86_64") else {
        return;
    };
    let output = vpmu
        .args(["bench", "reprogram", "--json"])
        .arg(&json)
        .output()
        .unwrap();
    let said = text(&output);
    if !output.status.success() && said.contains("perf_event_paranoid") {
        eprintln!("skipped: {said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    let report: Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let figure = |figure: &str, mode: &str| {
        let row = rows
            .iter()
            .find(|row| row["figure"] == figure && row["mode"] == mode);
        row.and_then(|row| row["measured"].as_f64())
            .unwrap_or_else(|| panic!("no {figure} of {mode}: {report}"))
    };
    for place in ["", "guest-"] {
        let [recreate, reuse, paused] = ["recreate", "reuse", "paused"].map(|mode| {
            let mode = format!("{place}{mode}");
            (
                figure("handle_overflow_ns", &mode),
                figure("host_ops_per_pmi", &mode),
            )
        });
        // This machine may be busy, so its own figures are not compared.
        assert!(
            place.is_empty() || recreate.0 > reuse.0,
            "{recreate:?} {reuse:?}"
        );
        assert!(recreate.1 > reuse.1 && reuse.1 > paused.1, "{report}");
        assert!(paused.1 <= 3.1, "{report}");
    }
}

#[test]
#[ignore = "long: script/test --long"]
fn stock_kvm_has_no_pmu_and_says_so() {
    let _turn = turn(1);
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let Some(text) = compare("x86_64", &["--pmu", "kvm"], "workload", &json) else {
        return;
    };
    let results: Value = serde_json::from_str(&text).unwrap();
    let run = &results["runs"][0];
    assert_eq!(run["status"], 0, "{run}");
    for figure in ["guest_counters", "pmis", "samples", "exits_per_pmi"] {
        assert!(run[figure].is_null(), "{figure}: {run}");
    }
    assert!(run["exits"]["other"].as_u64() > Some(0), "{run}");
    // The share is reported only where it is fair.
    assert_eq!(
        run["host_share"].is_null(),
        run["deterministic"] == true,
        "{run}"
    );
}

const DESIGNS: [&str; 6] = [
    "--pmu",
    "native,emulated",
    "--policy",
    "reuse,paused",
    "--model",
    "intel",
];

/// Returns the figures of a guest of each design and policy.
fn designs() -> Option<Vec<Value>> {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let record = format!("{NO_SYMBOLS}{RECORD}");
    let text = compare("x86_64", &DESIGNS, &record, &json)?;
    let results: Value = serde_json::from_str(&text).unwrap();
    results["runs"].as_array().cloned()
}

#[test]
fn designs_and_policies_side_by_side() {
    let _turn = turn(3);
    let Some(runs) = designs() else {
        return;
    };
    assert_eq!(runs.len(), 3);
    for run in &runs {
        assert_eq!(run["status"], 0, "{run}");
        assert_eq!(run["arch"], "x86_64");
        assert_eq!(run["exits"].is_null(), run["pmu"] == "native", "{run}");
        if run["pmu"] == "emulated" {
            assert!(run["guest_counters"].as_u64() >= Some(1), "{run}");
            assert!(run["samples"].as_u64() > Some(100), "{run}");
            assert!(run["pmis"].as_u64() > Some(100), "{run}");
            assert!(run["exits"]["msr:write:0x38f"].as_u64() > Some(0), "{run}");
            assert!(run["host_operations"].is_object(), "{run}");
        } else {
            // There is no PMU, so perf samples by a software clock.
            assert!(run["guest_counters"].is_null(), "{run}");
            assert!(run["pmis"].is_null(), "{run}");
        }
    }
    let operations = |policy| {
        let run = runs.iter().find(|run| run["policy"] == policy).unwrap();
        run["host_operations_per_pmi"].as_f64().unwrap()
    };
    let (reuse, paused) = (operations("reuse"), operations("paused"));
    assert!(paused < reuse, "{paused} paused, {reuse} reused");
}

#[test]
#[ignore = "long: script/test --long"]
fn two_runs_are_one() {
    let _turn = turn(3);
    let Some(first) = designs() else {
        return;
    };
    if first.iter().all(|run| run["deterministic"] == true) {
        assert_eq!(first, designs().unwrap());
    } else {
        eprintln!("skipped: this machine's own KVM ran the guests, and two runs differ");
    }
}
