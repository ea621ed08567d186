//! Stock guests with AMD's PMU, on the emulated machine, whose processor is AMD's: a boot for each interface, many cases.

use std::process::Command;

use crate::support::{NO_SYMBOLS, compared, modules, nested_vpmu, number, skipped, turn};
use crate::two_vcpus;
use serde_json::Value;
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::image::module::Kernel;
use vpmu_lab::spec::arch::Arch;

/// Cycles between two samples.
const PERIOD: u64 = 500_000;

/// The beginning of both scripts. Each line that a test reads begins with a word of its own.
const BEGIN: &str = r#"
field() { grep -m1 "^$1" /proc/cpuinfo | sed 's/.*: //'; }
echo "vendor $(field vendor_id)"
echo "family $(field 'cpu family')"
echo "driver $(dmesg | grep -c 'AMD PMU driver')"
echo "counters $(dmesg | sed -n 's/.*generic registers: *//p;s/.*generic counters: *//p')"
echo "version $(dmesg | sed -n 's/.*\.\.\. version: *//p')"
samples() { perf report -i $1 --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }'; }
count() { awk -F, '!/^#/ && $1 ~ /^[0-9]/ { print $1; exit }' stat; }
perf stat -x, -o stat -e cycles workload --scale 300; echo "plain $(count)"
perf record --no-bpf-event -q -e cycles -F 2000 -g -o b -- workload --scale 300; echo "frequency $(samples b)"
perf stat -x, -o stat -e cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles workload --scale 300
awk -F, '/cycles/ { print "multiplexed", $1 }' stat
perf stat -x, -o stat -e cycles sh -c 'for i in 1 2 3 4 5 6 7 8 9 10; do workload --scale 30; done'; echo "forks $(count)"
"#;

const END: &str = r#"
dmesg | grep -i -E 'unknown NMI|unchecked MSR|call trace|WARNING|lockup|stall|unstable' |
    grep -v 'kernel.org/doc.*hw-vuln' | sed 's/^/complaint /'
true"#;

const CORE: &str = r#"
perf record --no-bpf-event -q -e cycles -c PERIOD -o a -- workload --scale 300; echo "fixed $(samples a)"
perf record --no-bpf-event -q -a -e cycles -c PERIOD -o c -- workload --scale 300; echo "everywhere $(samples c)"
"#;

/// Saves the machine while all counters count and sample. Another process then goes on with the machine.
const V2: &str = r#"
perf record --no-bpf-event -q -a -e cycles -c PERIOD -o c -- workload --scale 2000 &
while ! pidof workload > /dev/null; do sleep 0.02; done
meter --save sleep 0.05 > /dev/null
wait; echo "everywhere $(samples c)"
"#;

/// The NMI watchdog takes one of the counters; the lab's guests have it switched off.
const WATCHDOG: &str = r#"
echo 1 > /proc/sys/kernel/watchdog; echo 1 > /proc/sys/kernel/nmi_watchdog
echo "watchdog $(cat /proc/sys/kernel/nmi_watchdog) $(dmesg | grep -c 'Permanently consumes one hw-PMU counter')"
echo "release $(uname -r)"
"#;

/// Why a test needs the lab's KVM host, whose processor is AMD's.
pub(crate) const INTELS: &str = ", maybe on a processor of Intel's";

/// Returns the script of these parts, whose perf needs no kernel symbols.
fn whole(parts: &[&str]) -> String {
    let script = parts.concat().replace("PERIOD", &PERIOD.to_string());
    format!("{NO_SYMBOLS}{script}")
}

/// A guest's end: what it printed, and the PMIs that each process of the VMM delivered.
struct Run {
    console: String,
    pmis: Vec<u64>,
}

impl Run {
    /// Runs the guest by `compare`, which tries again where QEMU has ended the guest; `None` means that the test is
    /// skipped.
    fn of(options: &[&str], script: &str) -> Option<Self> {
        let _turn = turn(1);
        let own = |vpmu: &mut Command| {
            vpmu.args(["--pmu", "emulated"]).args(options);
        };
        let script = whole(&[BEGIN, script, END]);
        let compared = compared(&mut nested_vpmu(INTELS)?, own, &script);
        Some(Self {
            console: compared.console,
            pmis: pmis(&compared.records),
        })
    }

    /// The same with two processors, by `compare`, which tries again where QEMU has ended the guest.
    fn of_two(options: &[&str], script: &str) -> Option<Self> {
        let _turn = turn(1);
        let online = "echo 1 > /sys/devices/system/cpu/cpu1/online; ";
        // Two emulated processors that take turns have TSCs that Linux finds apart.
        let end = END.replace("|unstable", "");
        let script = whole(&[online, BEGIN, script, &end]);
        let options = |vpmu: &mut Command| {
            vpmu.args(["--append", "maxcpus=1", "--pmu", "emulated"])
                .args(options);
        };
        let (console, run) = two_vcpus::compare(&mut nested_vpmu(INTELS)?, options, &script);
        Some(Self {
            console,
            pmis: run["pmis"].as_u64().into_iter().collect(),
        })
    }

    /// The rest of each line that begins with `word`.
    fn said(&self, word: &str) -> Vec<&str> {
        let lines = self.console.lines().map(str::trim_end);
        lines
            .filter_map(|line| line.strip_prefix(word)?.strip_prefix(' '))
            .collect()
    }

    fn number(&self, word: &str) -> u64 {
        let number = self.said(word).first().and_then(|text| text.parse().ok());
        number.unwrap_or_else(|| panic!("no {word}"))
    }

    /// Checks that `counted` is between `least` and `most` percent of the count by `perf stat` of the same work.
    fn close(&self, what: &str, counted: u64, least: u64, most: u64) {
        let plain = self.number("plain");
        let (least, most) = (plain / 100 * least, plain / 100 * most);
        assert!(
            (least..=most).contains(&counted),
            "{what}: {counted} of {plain}"
        );
    }

    /// Checks the facts that hold under every AMD interface. `multiplexed` and `forked` are percentages.
    fn check(&self, multiplexed: u64, forked: u64) {
        assert_eq!(self.said("vendor"), ["AuthenticAMD"]);
        assert_eq!((self.number("driver"), self.number("counters")), (1, 6));
        // The work is thirty million instructions, a cycle each here. perf's own cycles are counted, too.
        let plain = self.number("plain");
        assert!(plain > 30_000_000, "{plain}");
        assert!(self.number("frequency") > 5);
        let counts = self.said("multiplexed");
        assert_eq!(counts.len(), 8);
        for count in counts {
            self.close("multiplexed", count.parse().unwrap(), 40, multiplexed);
        }
        self.close("forks", self.number("forks"), 95, forked);
        assert_eq!(self.said("complaint"), [""; 0]);
    }
}

fn pmis(records: &[Value]) -> Vec<u64> {
    let pmis = |record: &Value| record["vpmu-vmm"]["total"]["pmis"].as_u64();
    records.iter().filter_map(pmis).collect()
}

#[test]
fn a_stock_guest_has_an_amd_pmu() {
    let Some(run) = Run::of(&[], CORE) else {
        return;
    };
    // The counts include handlers, because nothing stops the counters.
    run.check(250, 1000);
    assert_eq!(run.number("version"), 0);
    run.close("fixed", run.number("fixed") * PERIOD, 95, 200);
    run.close("everywhere", run.number("everywhere") * PERIOD, 95, 300);
}

#[test]
#[ignore = "as an Intel guest is saved, by another model: script/test --long"]
fn a_guest_with_version_2_is_saved_while_it_samples() {
    // Zen 5: the events of the newest family.
    let options = [
        "--model",
        "amd-v2",
        "--cpu",
        "max,family=26",
        "--vmm-arg=--save=/guest/saved",
    ];
    let Some(run) = Run::of(&options, V2) else {
        return;
    };
    run.check(250, 1000);
    assert_eq!((run.number("family"), run.number("version")), (26, 2));
    let everywhere = run.number("everywhere");
    run.close("everywhere", everywhere * PERIOD / 20 * 3, 95, 300);
    // Both processes ran the guest.
    assert_eq!(run.pmis.len(), 2, "{:?}", run.pmis);
}

/// Zen 1's family with Debian 12's kernel, whose NMI watchdog has one of the counters.
#[test]
#[ignore = "long: script/test --long"]
fn linux_6_1_has_an_amd_pmu_beside_its_watchdog() {
    let Some(modules) = modules(Kernel::Bookworm) else {
        return;
    };
    let kernel = modules.kernel();
    let options = ["--cpu", "max,family=23", "--kernel"];
    let options = [&options[..], &[kernel.to_str().unwrap()]].concat();
    let Some(run) = Run::of(&options, &[WATCHDOG, CORE].concat()) else {
        return;
    };
    run.check(250, 1000);
    assert_eq!((run.number("family"), run.number("version")), (23, 0));
    assert_eq!(run.said("watchdog"), ["1 1"]);
    assert!(run.said("release")[0].starts_with("6.1."));
    run.close("fixed", run.number("fixed") * PERIOD, 95, 200);
    run.close("everywhere", run.number("everywhere") * PERIOD, 95, 300);
}

/// Zen 3's family, with either interface, two processors and another policy.
#[test]
#[ignore = "long: script/test --long"]
fn two_processors_have_an_amd_pmu_each() {
    for (model, policy, version) in [("amd", "reuse", 0), ("amd-v2", "recreate", 2)] {
        let options = ["--cpu", "max,family=25", "--model", model];
        let options = [&options[..], &["--policy", policy]].concat();
        let Some(run) = Run::of_two(&options, CORE) else {
            return;
        };
        run.check(250, 1000);
        assert_eq!((run.number("family"), run.number("version")), (25, version));
        run.close("fixed", run.number("fixed") * PERIOD, 95, 200);
        run.close("everywhere", run.number("everywhere") * PERIOD, 95, 400);
        assert!(run.pmis[0] > 100, "{:?}", run.pmis);
    }
}

/// Samples of the machine's own counters at a fixed period are as many as without a hypervisor, by either interface. In user
/// space: the kernel's ticks are more in a run that takes longer.
#[test]
#[ignore = "long: script/test --long"]
fn hardware_counters_take_a_native_guests_samples() {
    // Linux would lower its rate of samples for a handler that takes 50 us, and leave some out.
    const SCRIPT: &str = "sysctl -q -w kernel.perf_event_max_sample_rate=100000 kernel.perf_cpu_time_max_percent=0; \
        perf record --no-bpf-event -q -c 100003 -e cycles:u -o perf.data workload --scale 1000; \
        perf report -i perf.data --stdio -n --sort comm 2> /dev/null | awk '$3 == \"workload\" { print \"samples\", $2 }'";
    let _turn = turn(1);
    let version = Qemu::chosen(None).version(&Arch::X86_64.qemu()).unwrap();
    if !version.is_mended() || nested_vpmu("").is_none() {
        return skipped(&format!("QEMU {version} has no x86 PMU, or no KVM host"));
    }
    for (cpu, model) in [
        ("max,perfctr-core=on", "amd"),
        ("max,perfctr-core=on,perfmon-v2=on", "amd-v2"),
    ] {
        let samples = |options: &[&str]| {
            let mut vpmu = Command::new(env!("CARGO_BIN_EXE_vpmu"));
            let script = [NO_SYMBOLS, SCRIPT].concat();
            let options = |vpmu: &mut Command| {
                vpmu.args(["--cpu", cpu]).args(options);
            };
            let compared = compared(&mut vpmu, options, &script);
            number::<u64>(&compared.console, "samples")
        };
        let native = samples(&["--pmu", "native"]);
        let ours = samples(&["--pmu", "emulated", "--model", model]);
        assert!(native > 900, "{native}");
        let difference = ours.abs_diff(native);
        assert!(difference * 500 <= native, "{model}: {ours} of {native}");
    }
}
