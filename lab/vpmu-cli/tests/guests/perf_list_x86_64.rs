//! Every event that `perf list` names in a stock guest: counted, or said not to be.

use std::process::Command;

use crate::support::{Compared, NO_SYMBOLS, compared, nested_vpmu, number, turn};

/// Each event by itself: in a group, one that is not there would take the others with it.
const SCRIPT: &str = r#"
echo driver $(dmesg | grep -c 'Intel PMU driver')
echo rdpmc $(cat /sys/devices/cpu/rdpmc)
perf list --raw-dump hw cache pmu 2> /dev/null | tr ' ' '\n' | grep -v '^$' | sort -u > events
while read -r event; do
    perf stat -x, -o stat -e "$event" workload --scale 5 2> /dev/null
    echo "event $event $(awk -F, '/^[0-9<]/ { print $1; exit }' stat)"
done < events
perf stat -d -x, -o stat workload --scale 5
awk -F, '/^[0-9<]/ { print "event -d:" $3, $1 }' stat
perf stat --topdown -a sleep 0.01 > topdown 2>&1 || echo refused topdown
perf mem record -o mem workload > mem.out 2>&1 || echo refused mem
dmesg | grep -c -i -E 'unknown NMI|call trace|stall|unchecked MSR' > complaints; echo complaints $(cat complaints)
true"#;

/// What software counts, or the guest's kernel by itself, without a PMU.
const NOT_OF_THE_PMU: [&str; 5] = [
    "msr/",
    "-d:task-clock",
    "-d:context-switches",
    "-d:cpu-migrations",
    "-d:page-faults",
];

struct Listed {
    /// Events with their count; `None`: perf says that the event is not supported.
    events: Vec<(String, Option<u64>)>,
    lost: u64,
    console: String,
}

fn listed(model: &str) -> Option<Listed> {
    let _turn = turn(1);
    let mut vpmu = nested_vpmu(", maybe with a PMU of the host's, and in real time")?;
    let options = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "emulated", "--model", model]);
    };
    let script = [NO_SYMBOLS, SCRIPT].concat();
    let Compared { console, run, .. } = compared(&mut vpmu, options, &script);
    assert_eq!(number::<u64>(&console, "complaints"), 0);
    for refused in ["refused topdown", "refused mem"] {
        assert!(console.contains(refused), "{refused}");
    }
    let events = console.lines().filter_map(|line| {
        let (event, count) = line.trim().strip_prefix("event ")?.rsplit_once(' ')?;
        let count = count.parse().ok();
        let event = event.trim_end_matches(" <not").to_owned();
        let is_other = NOT_OF_THE_PMU.iter().any(|pmu| event.starts_with(pmu));
        (!is_other).then_some((event, count))
    });
    let events: Vec<_> = events.collect();
    assert!(events.len() >= 6, "{events:?}");
    assert!(
        events.iter().any(|(_, count)| count.is_some()),
        "{events:?}"
    );
    let lost = run["vmm"]["measured"]["lost"].as_u64().unwrap();
    Some(Listed {
        events,
        lost,
        console,
    })
}

#[test]
fn no_event_of_intels_is_zero() {
    let Some(listed) = listed("intel") else {
        return;
    };
    let zero = |(_, count): &&(String, Option<u64>)| *count == Some(0);
    let zeros: Vec<_> = listed.events.iter().filter(zero).collect();
    assert!(zeros.is_empty(), "{zeros:?}");
    assert_eq!(listed.lost, 0);
    let number = |word| number::<u64>(&listed.console, word);
    assert_eq!((number("driver"), number("rdpmc")), (1, 1));
}

/// Nothing that CPUID says takes an event away from Linux's driver (docs/how/amd.md). Each event that reads zero is a loss that
/// the statistics count.
#[test]
#[ignore = "long: script/test --long"]
fn each_zero_of_amds_is_counted_as_lost() {
    let Some(listed) = listed("amd") else {
        return;
    };
    let zeros = listed.events.iter().filter(|(_, count)| *count == Some(0));
    let zeros = zeros.count() as u64;
    assert!(listed.lost >= zeros, "{} of {zeros}", listed.lost);
}
