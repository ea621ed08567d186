//! A stock guest's last branch records, on a host that has none.

use crate::support::{Compared, NO_SYMBOLS, compared, nested_vpmu, number, turn};

/// Prints a line for each answer that a test reads, which begins with a word of its own.
const SCRIPT: &str = r#"
echo 25 > /proc/sys/kernel/perf_cpu_time_max_percent
echo 100000 > /proc/sys/kernel/perf_event_max_sample_rate
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent
perf record --no-bpf-event -q -b -e USER -c 1000000 -o b workload --scale 1000 2> refused
echo "refused $(grep -c -i 'branch stack\|not supported' refused)"
echo "samples $(perf script -i b -F brstack 2> /dev/null | awk 'NF > 0' | wc -l)"
echo "full $(perf script -i b -F brstack 2> /dev/null | awk 'NF == DEPTH' | wc -l)"
for b in -b ''; do
    perf record --no-bpf-event -q $b -e ALL -c 131071 -o p workload --scale 600
    echo "due$b $(perf script -i p --comm workload -F ip | wc -l)"
done
perf record -q --call-graph lbr -e cycles:u -o g true 2> callgraph
echo "callgraph $(grep -c -i 'branch stack\|not supported' callgraph)"
echo "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
true"#;

/// A guest: its model, the records of its stacks, and whether samples are PEBS records.
struct Guest {
    model: &'static str,
    depth: u32,
    lbr: &'static str,
    pebs: bool,
}

const INTEL: Guest = Guest {
    model: "intel",
    depth: 32,
    lbr: "on",
    pebs: false,
};

/// Runs the script in such a guest.
fn run(guest: &Guest) -> Option<impl Fn(&str) -> u64> {
    let mut vpmu = nested_vpmu(", in real time")?;
    let (pebs, user, all) = match guest.pebs {
        true => ("exit", "cycles:ppu", "cycles:pp"),
        false => ("off", "cycles:u", "cycles"),
    };
    let script = (SCRIPT.replace("DEPTH", &guest.depth.to_string()))
        .replace("USER", user)
        .replace("ALL", all);
    let script = [NO_SYMBOLS, &script].concat();
    let own = |vpmu: &mut std::process::Command| {
        vpmu.args(["--pmu", "emulated", "--model", guest.model]);
        vpmu.args(["--lbr", guest.lbr, "--pebs", pebs]);
    };
    let Compared { console, .. } = compared(&mut vpmu, own, &script);
    Some(move |word: &str| number(&console, word))
}

fn has_full_stacks(guest: &Guest) {
    let _turn = turn(1);
    let Some(number) = run(guest) else {
        return;
    };
    let (samples, full) = (number("samples"), number("full"));
    assert!(samples >= 40, "{samples}");
    assert!(full * 100 >= samples * 95, "{full} of {samples}");
    // What is done for the guest until it has its branches is no part of its periods.
    let (with, without) = (number("due-b"), number("due"));
    assert!(without >= 457, "{without}");
    assert!(
        with * 100 <= without * 115,
        "{with}, and {without} without branches"
    );
    assert!(
        with * 100 >= without * 85,
        "{with}, and {without} without branches"
    );
    // AMD's records have no mode for call stacks: perf refuses them.
    assert_eq!(number("callgraph") == 0, guest.model == "intel");
    assert_eq!(number("complaints"), 0);
}

#[test]
fn a_guest_with_intels_pmu_has_full_stacks() {
    has_full_stacks(&INTEL);
}

#[test]
#[ignore = "as each by itself: script/test --long"]
fn a_guest_with_pebs_has_full_stacks_in_its_records() {
    has_full_stacks(&Guest {
        pebs: true,
        ..INTEL
    });
}

#[test]
fn a_guest_with_amds_pmu_has_full_stacks() {
    has_full_stacks(&Guest {
        model: "amd-v2",
        depth: 16,
        ..INTEL
    });
}

#[test]
#[ignore = "what is off by default is also seen by other tests: script/test --long"]
fn without_the_option_perf_says_so() {
    let _turn = turn(1);
    let off = Guest {
        lbr: "off",
        ..INTEL
    };
    let Some(number) = run(&off) else {
        return;
    };
    assert!(number("refused") > 0);
    assert_eq!(number("samples"), 0);
}
