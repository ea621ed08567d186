//! Stock guests with each version of Intel's architectural performance monitoring.

use std::process::Command;
use std::thread;

use crate::save_x86_64;
use crate::support::{Compared, NO_SYMBOLS, compared, nested_vpmu, said, turn};

/// Each line that the test reads begins with a word of its own.
const SCRIPT: &str = r#"
for n in first second; do
    perf stat -x, -o stat -e cycles,user_time,system_time true
    echo "$n $(awk -F, '/_time/ { sum += $1 } END { print sum }' stat)"
done
said() { dmesg | sed -n "s/.*\.\.\. $1: *//p"; }
echo "version $(said version)"
echo "general $(said 'generic registers')"
echo "fixed $(said 'fixed-purpose events')"
perf stat -x, -o stat -e cycles,ref-cycles,instructions,branches workload --scale 1000
awk -F, '/^[0-9<]/ { print $3, $1 }' stat
perf record --no-bpf-event -q -e cycles -c 500000 -o perf.data -- workload --scale 1000
echo "kernel $(dmesg | grep -c -i -E 'unknown NMI|unchecked MSR|call trace')"
"#;

/// Runs the script in a guest with `version`, and checks its findings.
fn check(version: u8) {
    let Some(mut vpmu) = nested_vpmu(", maybe without an event for reference cycles") else {
        return;
    };
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--perfmon", &version.to_string()]);
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let Compared {
        console: all, run, ..
    } = compared(&mut vpmu, options, &script);
    let said = |word| said(&all, word);
    assert_eq!(said("version"), version.to_string());
    assert_eq!(said("general"), if version == 5 { "8" } else { "4" });
    // Where a clock counts, fixed counter 0 has nothing to count. Only version 5 can leave it out.
    let clock = run["vmm"]["backing"] == "clock";
    let left_out = clock && version == 5;
    assert_eq!(said("fixed"), if left_out { "2" } else { "3" }, "{all}");
    for event in ["cycles", "ref-cycles"] {
        let count: u64 = said(event).parse().unwrap();
        // In real time, the clock decides how many cycles the work takes.
        assert!(count > 10_000_000, "{event}: {all}");
    }
    for event in ["instructions", "branches"] {
        assert!(!clock || said(event) == "<not supported>", "{event}: {all}");
    }
    assert!(run["samples"].as_u64() > Some(50), "{run}");
    assert_eq!(said("kernel"), "0", "{all}");
    if run["deterministic"] == true {
        assert_eq!(run["samples"], run["pmis"], "{run}");
        // The host's perf has been ready since the VMM attached the PMU.
        let [first, second] = ["first", "second"].map(|run| said(run).parse::<u64>().unwrap());
        assert!(2 * first < 3 * second, "{first} ns, then {second}: {all}");
    }
}

#[test]
fn a_stock_guest_uses_version_5_and_its_bitmap_of_fixed_counters() {
    let _turn = turn(1);
    check(5);
}

#[test]
#[ignore = "long: script/test --long"]
fn a_stock_guest_uses_versions_2_to_4() {
    let _turn = turn(2);
    thread::scope(|scope| {
        for version in 2..=4 {
            scope.spawn(move || check(version));
        }
    });
}

#[test]
#[ignore = "long: script/test --long"]
fn a_saved_guest_keeps_its_version() {
    let _turn = turn(1);
    let options = ["--perfmon", "5", save_x86_64::SAVE];
    let Some(saved) = save_x86_64::run("meter --save", &options) else {
        return;
    };
    save_x86_64::check_saved(&saved);
    assert_eq!(saved.versions, [5, 5, 5]);
}
