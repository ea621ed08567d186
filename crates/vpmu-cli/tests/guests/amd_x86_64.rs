//! A stock guest with AMD's PMU, on the emulated machine, whose processor is AMD's: one boot, many cases.

use crate::support::{turn, vpmu};
use vpmu_lab::spec::arch::Arch;

/// Cycles between two samples.
const PERIOD: u64 = 500_000;

/// Each line that is looked at begins with a word of its own.
const SCRIPT: &str = r#"
field() { grep -m1 "^$1" /proc/cpuinfo | sed 's/.*: //'; }
echo "vendor $(field vendor_id)"
echo "driver $(dmesg | grep -c 'AMD PMU driver')"
echo "counters $(dmesg | sed -n 's/.*generic registers: *//p;s/.*generic counters: *//p')"
samples() { perf report -i $1 --stdio -n 2> /dev/null | awk '/^ *[0-9]/ { n += $2 } END { print n + 0 }'; }
count() { awk -F, '!/^#/ && $1 ~ /^[0-9]/ { print $1; exit }' stat; }
perf stat -x, -o stat -e cycles workload --scale 1000; echo "plain $(count)"
perf record --no-bpf-event -q -e cycles -c PERIOD -o a -- workload --scale 1000; echo "fixed $(samples a)"
perf record --no-bpf-event -q -e cycles -F 2000 -g -o b -- workload --scale 1000; echo "frequency $(samples b)"
perf record --no-bpf-event -q -a -e cycles -c PERIOD -o c -- workload --scale 1000; echo "everywhere $(samples c)"
perf stat -x, -o stat -e cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles workload --scale 1000
awk -F, '/cycles/ { print "multiplexed", $1 }' stat
perf stat -x, -o stat -e cycles sh -c 'for i in 1 2 3 4 5 6 7 8 9 10; do workload --scale 100; done'; echo "forks $(count)"
echo "complaints $(dmesg | grep -c -i -E 'unknown NMI|unchecked MSR|call trace|WARNING|lockup|stall')"
true"#;

#[test]
fn a_stock_guest_has_an_amd_pmu() {
    let _turn = turn(1);
    if Arch::X86_64.has_hardware_kvm() {
        eprintln!(
            "skipped: this machine's own KVM runs the guests, and its processor may be Intel's"
        );
        return;
    }
    let Some(mut vpmu) = vpmu("x86_64") else {
        return;
    };
    let output = vpmu
        .args(["run", "--arch", "x86_64", "--pmu", "emulated", "--"])
        .arg(SCRIPT.replace("PERIOD", &PERIOD.to_string()))
        .output()
        .unwrap();
    let console = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{console}{errors}");
    assert!(output.status.success());
    let said = |word: &str| -> Vec<&str> {
        let lines = console.lines().map(str::trim_end);
        lines
            .filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '))
            .collect()
    };
    let number = |word: &str| -> u64 {
        let number = said(word).first().and_then(|text| text.parse().ok());
        number.unwrap_or_else(|| panic!("no {word}"))
    };
    assert_eq!(said("vendor"), ["AuthenticAMD"]);
    assert_eq!((number("driver"), number("counters")), (1, 6));
    // A hundred million instructions, each a cycle here, and what perf itself takes.
    let plain = number("plain");
    assert!(plain > 100_000_000, "{plain}");
    let close = |what: &str, counted: u64, least: u64, most: u64| {
        let (least, most) = (plain / 100 * least, plain / 100 * most);
        assert!(
            (least..=most).contains(&counted),
            "{what}: {counted} of {plain}"
        );
    };
    // Handlers are counted too, where nothing stops the counters.
    close("fixed", number("fixed") * PERIOD, 95, 200);
    close("everywhere", number("everywhere") * PERIOD, 95, 300);
    assert!(number("frequency") > 10);
    let multiplexed = said("multiplexed");
    assert_eq!(multiplexed.len(), 8);
    for count in multiplexed {
        close("multiplexed", count.parse().unwrap(), 60, 250);
    }
    close("forks", number("forks"), 95, 1000);
    assert_eq!(number("complaints"), 0);
}
