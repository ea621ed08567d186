//! A stock guest is saved while perf runs, and goes on in another process of the VMM. perf's
//! results must be those of a guest that is not saved.
//!
//! Needs the nested KVM host of the lab, which starts the second process.

use std::process::Command;
use std::thread;

use crate::support::{Compared, NO_SYMBOLS, RESTORING, compared, nested_vpmu, turn};

/// Cycles between two samples: some 200 of them in [`SCRIPT`].
const PERIOD: u64 = 4_000_000;

/// The first command samples the whole system, so that counters run at whatever moment. The second
/// counts one program, whose counter the scheduler switches. METER rings in the middle of each.
const SCRIPT: &str = "
middle() { while ! pidof workload > /dev/null; do sleep 0.05; done; METER sleep 0.3 > /dev/null; }
perf record --no-bpf-event -q -a -e cycles -c PERIOD -o perf.data -- workload --scale 8000 &
middle; wait $! || exit
perf stat -x, -o stat -e cycles -- workload --scale 8000 &
middle; wait $! || exit
grep cycles stat
dmesg | grep -c -i -E 'unstable|skew|stall|lockup|hung task|unknown NMI|call trace'
true";

/// The results of a run of [`SCRIPT`].
pub(crate) struct Run {
    /// Samples in perf.data.
    samples: u64,
    /// Cycles that `perf stat` saw.
    cycles: u64,
    /// Lines of the kernel's log that complain.
    complaints: u64,
    /// PMIs that each process of the VMM delivered.
    pmis: Vec<u64>,
    /// The version of the PMU that each process of the VMM had.
    pub(crate) versions: Vec<u64>,
}

/// Runs [`SCRIPT`] with `meter` and `options`.
pub(crate) fn run(meter: &str, options: &[&str]) -> Option<Run> {
    let script = [NO_SYMBOLS, SCRIPT]
        .concat()
        .replace("METER", meter)
        .replace("PERIOD", &PERIOD.to_string());
    let own = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated"]).args(options);
    };
    let Compared {
        console,
        run,
        records,
    } = compared(&mut nested_vpmu(RESTORING)?, own, &script);
    let stat = console.lines().find(|line| line.contains(",cycles"));
    let mut numbers = console.lines().filter_map(|line| line.trim().parse().ok());
    let vmms = || records.iter().filter_map(|record| record.get("vpmu-vmm"));
    Some(Run {
        samples: run["samples"].as_u64().unwrap(),
        cycles: stat.unwrap().split(',').next().unwrap().parse().unwrap(),
        complaints: numbers.next().unwrap(),
        pmis: vmms()
            .filter_map(|vmm| vmm["total"]["pmis"].as_u64())
            .collect(),
        versions: vmms()
            .filter_map(|vmm| vmm["pmu_version"].as_u64())
            .collect(),
    })
}

pub(crate) const SAVE: &str = "--vmm-arg=--save=/guest/saved";

/// Checks three processes: PMIs in the first two, which sampled; the third finished counting.
pub(crate) fn check_saved(saved: &Run) {
    assert_eq!(saved.pmis.len(), 3, "{:?}", saved.pmis);
    assert!(saved.pmis[0] > 20 && saved.pmis[1] > 20, "{:?}", saved.pmis);
    assert_eq!(saved.complaints, 0);
    // No sample is lost or made up: each PMI of either process is a sample.
    assert_eq!(saved.pmis.iter().sum::<u64>(), saved.samples);
}

#[test]
#[ignore = "long: script/test --long"]
fn a_guest_that_is_saved_twice_counts_and_samples_as_one_that_is_not() {
    let _turn = turn(2);
    // Both run at once: load does not change counted instructions.
    let (whole, saved) = thread::scope(|scope| {
        let saved = scope.spawn(|| run("meter --save", &["--model", "intel", SAVE]));
        let whole = run("meter", &["--model", "intel"]);
        (whole, saved.join().unwrap())
    });
    let Some((whole, saved)) = whole.zip(saved) else {
        return;
    };
    assert_eq!((whole.pmis.len(), whole.complaints), (1, 0));
    assert!(whole.samples > 150, "{}", whole.samples);
    check_saved(&saved);
    // The new process maps its memory anew as the guest touches it, and the clock that counts here
    // counts that work for the guest. Nothing else is counted twice or in addition.
    let close =
        |saved: u64, whole: u64| saved >= whole - whole / 100 && saved <= whole + whole / 20;
    assert!(
        close(saved.samples, whole.samples),
        "{} of {}",
        saved.samples,
        whole.samples
    );
    assert!(
        close(saved.cycles, whole.cycles),
        "{} of {}",
        saved.cycles,
        whole.cycles
    );
}
