//! A stock guest's precise samples: records that the VMM writes into the guest's buffer.

use std::path::Path;
use std::process::Command;

use crate::save_x86_64::SAVE;
use crate::support::{Compared, NO_SYMBOLS, RESTORING, compared, nested_vpmu, number, turn};
use crate::two_vcpus;
use serde_json::Value;

/// Adds the options of a guest with `--pebs WAY`.
fn guest(vpmu: &mut Command, way: &str, options: &[&str]) {
    vpmu.args(["--pmu", "emulated", "--model", "intel"])
        .args(["--pebs", way])
        .args(options);
}

/// Runs `script` in such a guest, and returns its output and the figures of the run.
fn run(way: &str, options: &[&str], script: &str) -> Option<(String, Value)> {
    let mut vpmu = nested_vpmu(", in real time")?;
    let script = [NO_SYMBOLS, script].concat();
    let compared = compared(&mut vpmu, |vpmu| guest(vpmu, way, options), &script);
    Some((compared.console, compared.run))
}

/// Samples with a fixed period. `sampled` of a hundred records are to be the kernel's samples, and `most` exits serve
/// the PMU.
fn records_without_interrupts(way: &str, sampled: u64, most: u64) {
    // The period is no multiple of the workload's unit, nor near one.
    const SCRIPT: &str = "echo baseline $(dmesg | grep -c 'PEBS fmt4+-baseline'); \
        perf record --no-bpf-event -q -e cycles:pp -c 61803 -o perf.data workload --scale 2500; \
        perf report -i perf.data --stdio --stdio-color never -F overhead,symbol 2> /dev/null";
    let _turn = turn(1);
    let Some((console, run)) = run(way, &[], SCRIPT) else {
        return;
    };
    assert_eq!(number::<u64>(&console, "baseline"), 1, "{console}");
    let pebs = &run["vmm"]["measured"]["pebs"];
    let samples = run["samples"].as_u64().unwrap();
    assert!(samples > 4000, "{run}");
    assert_eq!(pebs["records"], samples, "{run}");
    assert_eq!([&pebs["lost"], &pebs["skipped"]], [0, 0], "{run}");
    assert_eq!(run["lost_samples"], 0, "{run}");
    let by_kernel = pebs["sampled"].as_u64().unwrap();
    assert!(by_kernel * 100 >= samples * sampled, "{run}");
    // The buffer holds 2,040 records.
    assert!(run["pmis"].as_u64().unwrap() * 1000 <= samples, "{run}");
    let exits = run["exits"].as_object().unwrap();
    let served = |kind: &str| kind == "kick" || kind == "rdpmc" || kind.starts_with("msr:");
    let of_the_pmu = exits.iter().filter(|(kind, _)| served(kind));
    let count: u64 = of_the_pmu.filter_map(|(_, count)| count.as_u64()).sum();
    assert!(count * 100 <= samples * most, "{count} exits: {run}");
    // The workload's known weights.
    for (function, share) in [("foo", 50.0), ("bar", 30.0), ("qux", 15.0), ("main", 5.0)] {
        let line = console
            .lines()
            .find(|line| line.ends_with(&format!("[.] {function}")));
        let found = line.and_then(|line| line.trim().split('%').next()?.parse::<f64>().ok());
        assert!(
            found.is_some_and(|found| (found - share).abs() <= 1.5),
            "{function}: {found:?}: {console}"
        );
    }
}

/// An exit makes each record, and nothing interrupts the guest until its buffer is nearly full.
#[test]
#[ignore = "long: script/test --long"]
fn precise_samples_are_records_without_interrupts() {
    records_without_interrupts("exit", 0, 110);
}

/// The host's kernel samples the guest: no exit for a record.
#[test]
fn precise_samples_of_a_ring_take_no_exits() {
    records_without_interrupts("ring", 99, 5);
}

/// Without kvmclock, a guest's perf gives each record the time of its sample. Then its events can also be sampled as the
/// host's are: the promises that a host makes, hardware samples included, hold for the events of this PMU.
#[test]
#[ignore = "long: script/test --long"]
fn records_have_their_own_times_without_kvmclock() {
    const SCRIPT: &str = "
perf record --no-bpf-event -q -e cycles:pp -c 100000 -o perf.data workload --scale 1000
perf script -i perf.data --ns -F time | awk '
    { time = $1 + 0; apart = time - last; last = time; all++ }
    apart > 0.00009 && apart < 0.00011 { near++ }
    END { print \"samples\", all; print \"near\", near + 0 }'
chmod +x vpmu-reprogram && ./vpmu-reprogram --check --backing hardware";
    let program = Path::new(env!("CARGO_BIN_EXE_vpmu")).with_file_name("vpmu-reprogram");
    let options = [
        "--append",
        "no-kvmclock",
        "--add",
        program.to_str().unwrap(),
    ];
    let _turn = turn(1);
    let Some((console, run)) = run("ring", &options, SCRIPT) else {
        return;
    };
    let samples = number::<u64>(&console, "samples");
    assert_eq!(run["vmm"]["measured"]["pebs"]["records"], samples, "{run}");
    assert!(samples > 1000, "{console}");
    // A few are further apart: the counter stands still while the handler empties the buffer.
    assert!(
        number::<u64>(&console, "near") * 100 > samples * 95,
        "{console}"
    );
    let sampled = "ok       the kernel's samples are a period apart";
    assert!(console.contains(sampled), "{console}");
}

/// Whatever perf asks for, each record is a sample of it, and none is lost.
#[test]
#[ignore = "long: script/test --long"]
fn each_kind_of_precise_sample_works_with_a_ring() {
    // Two events at once, the whole system, and three that the kernel cannot sample: registers, an interrupt for each
    // sample, and a frequency.
    const SCRIPT: &str = "
record() {
    name=$1; shift
    perf record --no-bpf-event -q -o perf.data \"$@\" -- workload --scale 1000 || exit
    perf report --stats -i perf.data 2> /dev/null |
        awk -v name=$name '$1 == \"SAMPLE\" { print name, $3; exit } $1 == \"LOST\" { print \"lost\", $3 }'
}
record several -e cycles/period=200000/pp -e cycles/period=700000/pp
perf script -i perf.data -F event | sort | uniq -c
record all -a -e cycles:pp -c 200000
record registers -e cycles:p -c 1000000 --intr-regs=ax,ip
echo with $(perf script -i perf.data -F iregs | grep -c ' AX:.* IP:')
record graph -e cycles:pp -c 1000000 -g
record plain -F 1000
true";
    let _turn = turn(1);
    let Some((console, run)) = run("ring", &[], SCRIPT) else {
        return;
    };
    let counts =
        ["several", "all", "registers", "graph", "plain"].map(|name| number::<u64>(&console, name));
    assert!(counts.iter().all(|&count| count > 50), "{counts:?}");
    assert_eq!(number::<u64>(&console, "with"), counts[2], "registers");
    let pebs = &run["vmm"]["measured"]["pebs"];
    assert_eq!([&pebs["lost"], &pebs["skipped"]], [0, 0], "{run}");
    assert_eq!(pebs["records"], counts.iter().sum::<u64>(), "{run}");
    let by_kernel = pebs["sampled"].as_u64().unwrap();
    assert!(by_kernel * 10 >= (counts[0] + counts[1]) * 9, "{run}");
    assert!(by_kernel <= counts[0] + counts[1], "{run}");
}

/// Two processors of a guest, each with its own ring.
#[test]
#[ignore = "long: script/test --long"]
fn two_processors_have_a_ring_each() {
    const SCRIPT: &str = "
echo 'taskset 1 workload --scale 2000 & taskset 2 workload --scale 2000; wait' > both
perf record --no-bpf-event -q -a -e cycles:pp -c 2000000 -o perf.data -- sh both || exit
perf report --stdio -n --sort cpu 2> /dev/null | awk '$3 ~ /^00/ { print \"sampled\" $3 + 0, $2 }'
true";
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(", in real time") else {
        return;
    };
    let options = |vpmu: &mut Command| guest(vpmu, "ring", &["--realtime"]);
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let (console, run) = two_vcpus::compare(&mut vpmu, options, &script);
    for processor in ["sampled0", "sampled1"] {
        assert!(
            number::<u64>(&console, processor) > 20,
            "{processor} {console}"
        );
    }
    // Of the vCPU that does not end the measurement, its last runs are not in what was measured: they are in the
    // total, where nothing else has sampled.
    let pebs = &run["vmm"]["total"]["pebs"];
    assert_eq!(pebs["lost"], 0, "{run}");
    assert_eq!(pebs["records"], run["samples"], "{run}");
    assert!(pebs["sampled"].as_u64() > Some(0), "{run}");
}

/// A save makes records of all samples first, and the next process of the VMM samples again.
#[test]
#[ignore = "long: script/test --long"]
fn a_guest_that_is_saved_loses_no_record() {
    const SCRIPT: &str = "
perf record --no-bpf-event -q -e cycles:pp -c 1000000 -o perf.data -- workload --scale 8000 &
while ! pidof workload > /dev/null; do sleep 0.05; done
meter --save sleep 0.3 > /dev/null
wait $!
true";
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(RESTORING) else {
        return;
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let Compared { run, records, .. } =
        compared(&mut vpmu, |vpmu| guest(vpmu, "ring", &[SAVE]), &script);
    let vmms = records.iter().filter_map(|record| record.get("vpmu-vmm"));
    let pebs: Vec<&Value> = vmms.map(|vmm| &vmm["total"]["pebs"]).collect();
    assert_eq!(pebs.len(), 2, "{pebs:?}");
    let sum = |word: &str| -> u64 { pebs.iter().filter_map(|pebs| pebs[word].as_u64()).sum() };
    for pebs in &pebs {
        assert!(pebs["sampled"].as_u64() > Some(50), "{pebs}");
    }
    assert_eq!((sum("lost"), sum("skipped")), (0, 0), "{pebs:?}");
    assert_eq!(run["samples"], sum("records"), "{run}");
}
