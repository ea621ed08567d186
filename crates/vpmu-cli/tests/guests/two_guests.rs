//! Two guests on one CPU: each finds the machine that it finds alone, whatever the other one does.

use std::fs;

use serde_json::Value;

use crate::payload::{passed, program};
use crate::support::{text, turn, vpmu};

/// A switch for each tenth of a millisecond, so that they fall into every test.
const SLICE: &[&str] = &["--slice", "100"];
const CONSOLES: &str = "vpmu: the second guest's console:";

/// The consoles of two payloads with these command lines, and the monitor's statistics.
fn two(more: &[&str], first: &str, second: &str) -> Option<([String; 2], Value)> {
    let payload = program("aarch64/payload.bin")?;
    let folder = tempfile::tempdir().unwrap();
    let output = vpmu("aarch64")?
        .args(["run", "--memory", "512M", "--append", first])
        .args(["--second-append", second])
        .args(more)
        .arg("--keep")
        .arg(folder.path())
        .arg("--kernel")
        .arg(&payload)
        .arg("--second")
        .arg(&payload)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let design = fs::read_dir(folder.path()).unwrap().next().unwrap();
    let design = design.unwrap().path();
    let read = |name| String::from_utf8_lossy(&fs::read(design.join(name)).unwrap()).into_owned();
    let consoles = ["console.log", "second.log"].map(|name| read(name).replace('\r', ""));
    let records: Value = serde_json::from_str(&read("records.json")).unwrap();
    let monitor = records[0]["vpmu-monitor"].clone();
    assert!(text(&output).contains(CONSOLES));
    Some((consoles, monitor))
}

#[test]
fn both_pass_every_test_at_once() {
    let _turn = turn(1);
    for design in ["partitioned", "emulated"] {
        let options = [&["--pmu", design], SLICE].concat();
        let Some((consoles, monitor)) = two(&options, "", "") else {
            return;
        };
        for console in &consoles {
            assert!(console.contains(" 0 failed,"), "{design}:\n{console}");
            assert!(passed(console).len() >= 130, "{design}:\n{console}");
        }
        let switches = monitor["total"]["switches"]["count"].as_u64().unwrap();
        assert!(switches > 500, "{design}: {switches} switches");
    }
}

/// Memory of the first and of the second guest, on QEMU's `virt` machine with 512 MiB.
const FIRST: &str = "test=storm addr=0x40000000";
const SECOND: &str = "test=storm addr=0x58000000";

#[test]
fn neither_reaches_the_other() {
    let _turn = turn(1);
    for design in ["partitioned", "emulated"] {
        let options = [&["--pmu", design], SLICE].concat();
        for (first, second, attacker) in [(SECOND, "", 0), ("", FIRST, 1)] {
            let Some((consoles, _)) = two(&options, first, second) else {
                return;
            };
            let [attacks, tests] = [&consoles[attacker], &consoles[1 - attacker]];
            assert!(attacks.contains("ok storm"), "{design}:\n{attacks}");
            assert!(tests.contains(" 0 failed,"), "{design}:\n{tests}");
            assert!(passed(tests).len() >= 130, "{design}:\n{tests}");
        }
    }
}

/// Checks that the first guest's other CPU cannot take the shared CPU's private interrupts from the second guest.
#[test]
fn another_cpu_does_not_reach_the_second_guest_s_interrupts() {
    let _turn = turn(1);
    let options = [&["--pmu", "partitioned", "--vcpus", "2"], SLICE].concat();
    for tests in ["test=gic.", "test=interrupt."] {
        let Some((consoles, _)) = two(&options, SECOND, tests) else {
            return;
        };
        assert!(consoles[1].contains(" 0 failed,"), "{}", consoles[1]);
    }
}

#[test]
fn a_pmu_that_nobody_uses_costs_a_switch_nothing() {
    let _turn = turn(1);
    let test = "test=switch.unused";
    let Some((consoles, monitor)) = two(&["--pmu", "partitioned"], test, test) else {
        return;
    };
    for console in &consoles {
        assert!(console.contains("ok switch.unused"), "{console}");
    }
    let measured = &monitor["measured"];
    let switches = &measured["switches"];
    assert!(switches["count"].as_u64().unwrap() > 100, "{switches}");
    assert_eq!(switches["pmu_registers"], 0, "{switches}");
    assert_eq!(switches["second_pmu_traps"], 0, "{switches}");
    let exits = measured["exits"].as_object().unwrap();
    assert!(
        exits.keys().all(|kind| !kind.starts_with("sysreg:PM")),
        "{exits:?}"
    );
    let states = switches["ended"].as_object().unwrap();
    assert_eq!(states.keys().collect::<Vec<_>>(), ["free-free"]);
}

/// Checks that each guest's counters count that guest alone, to the instruction.
#[test]
fn linux_counts_what_it_counts_alone() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    const COUNT: &str = "perf stat -x, -e instructions:u,cycles:u workload 2>&1";
    for design in ["partitioned", "emulated"] {
        let count = |beside: bool| {
            let mut vpmu = vpmu("aarch64")?;
            vpmu.args(["run", "--pmu", design]);
            if beside {
                vpmu.arg("--second").arg(&payload);
                vpmu.args(["--second-append", "test=switch.all ms=4000"]);
            }
            let output = vpmu.args(["--", COUNT]).output().unwrap();
            assert!(output.status.success(), "{}", text(&output));
            Some(text(&output))
        };
        let Some((alone, beside)) = count(false).zip(count(true)) else {
            return;
        };
        let counts = |text: &str| -> Vec<u64> {
            let lines = text.lines().filter(|line| line.contains(":u,"));
            lines
                .filter_map(|line| line.split(',').next()?.parse().ok())
                .collect()
        };
        assert_eq!(counts(&alone).len(), 2, "{alone}");
        for (alone, beside) in counts(&alone).iter().zip(counts(&beside)) {
            let ratio = beside as f64 / *alone as f64;
            assert!(
                (0.999..=1.001).contains(&ratio),
                "{design}: {beside} of {alone}"
            );
        }
        // The payload compares its own count with the rounds it has run.
        assert!(beside.contains("ok switch.all"), "{beside}");
    }
}
