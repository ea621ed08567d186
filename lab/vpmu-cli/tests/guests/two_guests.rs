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
    // What keeps them apart is the same under both designs.
    for (design, first, second, attacker) in
        [("partitioned", SECOND, "", 0), ("emulated", "", FIRST, 1)]
    {
        let options = [&["--pmu", design], SLICE].concat();
        let Some((consoles, _)) = two(&options, first, second) else {
            return;
        };
        let [attacks, tests] = [&consoles[attacker], &consoles[1 - attacker]];
        assert!(attacks.contains("ok storm"), "{design}:\n{attacks}");
        assert!(tests.contains(" 0 failed,"), "{design}:\n{tests}");
        assert!(passed(tests).len() >= 130, "{design}:\n{tests}");
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

/// Checks that no CPU waits at EL2 for a shared CPU that sleeps: a ring of the doorbell asks for both guests' figures.
#[test]
fn a_ring_does_not_wait_for_a_shared_cpu_that_sleeps() {
    let _turn = turn(1);
    let options = ["--pmu", "partitioned", "--vcpus", "2"];
    let sleeper = "test=switch.sleep ms=400";
    let Some((consoles, _)) = two(&options, "test=switch.ring_asleep", sleeper) else {
        return;
    };
    let ring = "ok cpu1.switch.ring_asleep";
    assert!(consoles[0].contains(ring), "{}", consoles[0]);
    assert!(consoles[1].contains("ok switch.sleep"), "{}", consoles[1]);
}

/// Checks that no register carries a value from one guest into the other: each writes every register that it may write, and
/// finds its own value after the other's turns.
#[test]
fn each_guest_keeps_its_registers() {
    let _turn = turn(1);
    for design in ["partitioned", "emulated"] {
        let options = [&["--pmu", design], SLICE].concat();
        let test = "test=switch.registers";
        let Some((consoles, monitor)) = two(&options, test, test) else {
            return;
        };
        for console in &consoles {
            assert!(console.contains("ok switch.registers"), "{console}");
        }
        let switches = monitor["total"]["switches"]["count"].as_u64().unwrap();
        assert!(switches > 100, "{design}: {switches} switches");
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

/// Checks that the host borrows its counter from whichever guest is in the CPU, and that neither notices more than that.
#[test]
fn a_counter_is_borrowed_from_both() {
    let _turn = turn(1);
    for design in ["partitioned", "emulated"] {
        let profile = ["--host-profile", "1000", "--borrow"];
        let options = [&["--pmu", design][..], SLICE, &profile].concat();
        let (first, second) = ("test=switch.borrow", "test=switch.all ms=100");
        let Some((consoles, monitor)) = two(&options, first, second) else {
            return;
        };
        assert!(consoles[0].contains("ok switch.borrow"), "{}", consoles[0]);
        assert!(consoles[1].contains("ok switch.all"), "{}", consoles[1]);
        // Each had it counting.
        assert_eq!(monitor["counters_lost"], 2, "{design}: {monitor}");
    }
}

/// Checks that each guest's counters count that guest alone, as the machine's own count it without a virtual machine.
#[test]
#[ignore = "as the test program beside itself, by stock Linux: script/test --long"]
fn linux_counts_what_it_counts_alone() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    const COUNT: &str = "perf stat -x, -e instructions:u,cycles:u workload 2>&1";
    let beside_payload: &[&str] = &[
        "--second",
        payload.to_str().unwrap(),
        "--second-append",
        "test=switch.all ms=4000",
    ];
    // The same command in both.
    let beside_linux: &[&str] = &["--second", "linux"];
    let count = |design, beside: &[&str]| {
        let mut vpmu = vpmu("aarch64")?;
        vpmu.args(["run", "--pmu", design]).args(beside);
        let output = vpmu.args(["--", COUNT]).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        Some(text(&output))
    };
    let counts = |text: &str| -> Vec<u64> {
        let lines = text.lines().filter(|line| line.contains(":u,"));
        lines
            .filter_map(|line| line.split(',').next()?.parse().ok())
            .collect()
    };
    let Some(native) = count("native", &[]) else {
        return;
    };
    let alone = counts(&native);
    assert_eq!(alone.len(), 2, "{native}");
    for design in ["partitioned", "emulated"] {
        let [payload, linux] = [beside_payload, beside_linux].map(|it| count(design, it).unwrap());
        // The payload compares its own count with the rounds it has run.
        assert!(payload.contains("ok switch.all"), "{payload}");
        for (beside, guests) in [(&payload, 1), (&linux, 2)] {
            let counts = counts(beside);
            assert_eq!(counts.len(), 2 * guests, "{beside}");
            for (count, alone) in counts.iter().zip(alone.iter().cycle()) {
                let ratio = *count as f64 / *alone as f64;
                assert!(
                    (0.999..=1.001).contains(&ratio),
                    "{design}: {count} of {alone}"
                );
            }
        }
    }
}

/// Checks that the command of a second Linux is reported like the first one's: output, figures and status.
#[test]
fn a_second_linux_runs_a_command_of_its_own() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("run.json");
    let record = "perf record -c 1000000 -e cycles:u workload; cat /proc/cmdline; exit 7";
    let output = vpmu
        .args(["run", "--pmu", "partitioned", "--memory", "896M", "--json"])
        .arg(&json)
        .args(["--second", "linux", "--second-memory", "512M"])
        .args(["--second-append", "marked", "--second-command", record])
        .args(["--", "perf stat -e cycles:u true 2>&1; echo first"])
        .output()
        .unwrap();
    let text = text(&output);
    assert_eq!(output.status.code(), Some(7), "{text}");
    let (_, second) = text.split_once("first\n").expect(&text);
    assert!(second.contains(" marked\n"), "{text}");
    let run: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let run = &run["runs"][0];
    assert_eq!(run["status"], 0, "{run}");
    let figures = &run["second"];
    assert_eq!(figures["status"], 7, "{run}");
    assert_eq!(figures["guest_counters"], run["guest_counters"], "{run}");
    // 100,000,102 cycles in user space.
    assert_eq!(figures["samples"], 100, "{run}");
    assert_eq!(figures["lost_samples"], 0, "{run}");
    assert_eq!(figures["pmis"], 100, "{run}");
}
