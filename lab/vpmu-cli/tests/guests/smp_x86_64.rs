//! A stock guest with two processors, each with a PMU of its own.

use crate::support::{NO_SYMBOLS, turn, vpmu};
use crate::two_vcpus;
use std::process::Command;

/// Cycles between two samples: some hundred of them.
const PERIOD: u64 = 20_000_000;

/// The first run is on the first processor alone, the second on both. The second does twice the
/// work, is sampled, and is counted from before the first sample to after the last.
const SCRIPT: &str = "
echo processors $(nproc)
echo topology $(sed -nE 's/^(apicid|initial apicid|physical id|siblings).*: //p' /proc/cpuinfo)
echo extended $(grep -c '^flags.* xtopology' /proc/cpuinfo)
echo mismatches $(dmesg | grep -c -i -E 'APIC ID mismatch|Firmware Bug')
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent
perf stat -x, -a -A -e cycles -o stat -- taskset 1 workload --scale 2000
sed -n 's/^CPU/alone CPU/p' stat
echo 'taskset 1 workload --scale 2000 & taskset 2 workload --scale 4000; wait' > both
perf stat -x, -a -A -e cycles -o stat -- \
    perf record --no-bpf-event -q -a -e cycles -c PERIOD -o perf.data -- sh both
sed -n 's/^CPU/counted CPU/p' stat
perf report --stdio -n --sort cpu 2> /dev/null |
    awk '$3 ~ /^00/ { print \"sampled CPU\" $3 + 0 \",\" $2 }'
true";

#[test]
fn each_processor_counts_and_samples_its_own() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("x86_64") else {
        return;
    };
    // In real time: two processors take so many interrupts that QEMU, when it counts instructions,
    // delivers one of them twice in some of the runs.
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", "intel", "--realtime"]);
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let script = script.replace("PERIOD", &PERIOD.to_string());
    let (console, _) = two_vcpus::compare(&mut vpmu, options, &script);
    assert!(console.contains("processors 2"));
    // The kernel has found its topology in leaf 0BH: each processor is a package of its own, whose x2APIC ID is the
    // local APIC's.
    assert!(console.contains("extended 2"));
    assert!(console.contains("topology 0 1 0 0 1 1 1 1"));
    assert!(console.contains("mismatches 0"));

    let number = |what: &str, processor: u64| -> u64 {
        let begin = format!("{what} CPU{processor},");
        let line = console.lines().find_map(|line| line.strip_prefix(&begin));
        let number = line.and_then(|line| line.split(',').next()?.parse().ok());
        number.unwrap_or_else(|| panic!("{begin}"))
    };
    // The second processor idles meanwhile, and counts no cycles while it idles.
    assert!(number("alone", 0) > 2 * number("alone", 1));
    assert!(2 * number("counted", 1) > 3 * number("alone", 0));
    for processor in [0, 1] {
        // Each sample is a period that was counted, but not each period is a sample. In real time
        // on a slow machine, interrupts come late, and events that are counted meanwhile are in no
        // sample.
        let (counted, samples) = (number("counted", processor), number("sampled", processor));
        let possible = 10..=counted / 20 * 21 / PERIOD;
        assert!(
            possible.contains(&samples),
            "{processor}: {samples} samples of {counted}"
        );
    }
}
