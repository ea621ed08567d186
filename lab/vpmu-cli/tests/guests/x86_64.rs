//! Stock x86-64 guests: without a PMU, under stock KVM, and under this project's VMM.

use std::fs;
use std::thread;

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

/// Compares two designs, and beside them two policies: the design and policy that are in both give the same figures twice.
#[test]
fn designs_side_by_side() {
    let _turn = turn(4);
    let folder = tempfile::tempdir().unwrap();
    let record = format!("{NO_SYMBOLS}{RECORD}");
    let runs = |pmus: &str, policies: &str| -> Option<Vec<Value>> {
        let json = folder.path().join(format!("{pmus}.json"));
        let options = ["--pmu", pmus, "--policy", policies, "--model", "intel"];
        let text = compare("x86_64", &options, &record, &json)?;
        let results: Value = serde_json::from_str(&text).unwrap();
        results["runs"].as_array().cloned()
    };
    let (designs, policies) = thread::scope(|scope| {
        let designs = scope.spawn(|| runs("native,emulated", "paused"));
        let policies = runs("emulated", "reuse,paused");
        (designs.join().unwrap(), policies)
    });
    let (Some(designs), Some(policies)) = (designs, policies) else {
        return;
    };
    assert_eq!([designs.len(), policies.len()], [2, 2]);
    for run in designs.iter().chain(&policies) {
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
    let of = |policy: &str, runs: &[Value]| -> Value {
        let mut runs = runs.iter();
        runs.find(|run| run["policy"] == policy).cloned().unwrap()
    };
    let (first, second) = (of("paused", &designs), of("paused", &policies));
    let operations = |run: &Value| run["host_operations_per_pmi"].as_f64().unwrap();
    let (reuse, paused) = (operations(&of("reuse", &policies)), operations(&first));
    assert!(paused < reuse, "{paused} paused, {reuse} reused");
    if first["deterministic"] == true {
        assert_eq!(second, first);
    } else {
        eprintln!("this machine's own KVM ran the guests: two runs differ");
    }
}
