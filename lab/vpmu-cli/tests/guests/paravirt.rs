//! The module `guest/vpmu_pmu` in a real guest under vpmu-vmm on KVM: stock perf on Debian 12's Linux 6.1 and 6.12, and
//! on 6.12, with two processors, what may befall a driver: processors that go and come, a guest that sleeps, a host that
//! takes the device away.
//!
//! Needs gcc 12 and make, too. Where only a clock counts, cycles are the vCPU's time: counts are compared with each
//! other, not with a constant.

use std::process::Command;

use crate::support::{NO_SYMBOLS, RESTORING, compared, modules, nested_vpmu, turn};
use crate::two_vcpus;
use vpmu_lab::image::module::{Kernel, Modules};

/// The part that all scripts share. Each line that a script prints begins with a word for its case.
const COMMON: &str = r#"exec 2>&1
# counts EVENT: of all lines of the last perf stat
counts() { sed -n "s/^\([0-9]*\),[^,]*,$1,.*/\1/p" stat | tr '\n' ' '; }
samples() { perf report --stats -i perf.data 2>/dev/null | awk -v name=$1 '$1 == "SAMPLE" { print name, $3; exit }'; }
stat() { perf stat -x, -o stat "$@"; }
record() { perf record --no-bpf-event -q "$@"; }
p=/sys/module/vpmu_pmu/parameters
# at_work N: waits for so many workloads.
at_work() { for i in $(seq 500); do [ $(pidof workload | wc -w) -lt $1 ] || break; sleep 0.005; done; }
rung() { echo $(($(cat $p/doorbells) - ${1:-0})); }
cpu=/sys/bus/event_source/devices/cpu
insmod /root/vpmu_pmu.ko || exit
"#;

const COUNT: &str = r#"
stat -e cycles,instructions workload --scale 1000; echo "counted $(counts cycles) $(counts instructions)"
"#;

const PERF: &str = r#"
echo "sysfs $(cat $cpu/type) $(cat $cpu/rdpmc) $(ls $cpu/events | wc -l)"
echo 1 > $cpu/rdpmc || echo "no rdpmc"
before=$(rung); workload; echo "unused $(rung $before)"
stat -e cycles:u,cycles:G,cache-misses,cpu/event=0x11/ true; echo "refused $(grep -c 'not supported' stat)"
stat -e '{cycles,instructions}' workload --scale 500; echo "group $(counts cycles) $(counts instructions)"
e=cycles; for i in 1 2 3 4 5 6 7 8 9 10 11; do e=$e,cycles; done
stat -e $e workload --scale 1000; echo "multiplexed $(counts cycles)"
stat -a -e cycles workload --scale 500; echo "system $(counts cycles)"
stat -e cycles sh -c 'workload --scale 1000; workload --scale 1000'; echo "inherited $(counts cycles)"
record -c 1000000 -e cycles -- workload --scale 1000; samples fixed
record -F 1000 -e cycles -- workload --scale 500; samples frequency
# Relatives take turns on one processor. What one executes is not another's.
record -c 100003 -e cycles -- sh -c 'workload --scale 1000 & gzip -c random.bin > /dev/null; wait'
perf script -F comm,ip,sym 2> /dev/null | awk '$1 == "workload" && length($2) < 13 { all++; own += /main|foo|bar|qux/ }
    END { print "relatives", own + 0, all + 0 }'
record -F 1000 -a -g -e '{cycles,instructions}:S' -- workload --scale 300; samples leader
record -c 50 -e cycles -- workload --scale 50; samples storm
before=$(rung); stat --no-inherit -e cycles,cycles,cycles,cycles perf bench sched pipe -l 300 > /dev/null
echo "switched $(rung $before)"
record -c 1000000 -e cycles -- workload --scale 1000 & at_work 1; rmmod vpmu_pmu || echo "busy"; wait
if rmmod vpmu_pmu; then [ -e $cpu ] || echo "unloaded"; insmod /root/vpmu_pmu.ko; else echo "kept"; fi
stat -e cycles workload --scale 1000; echo "again $(counts cycles)"
"#;

/// With two processors, on a host that takes the device away when it restores the saved guest.
const FATE: &str = r#"
online=/sys/devices/system/cpu/cpu1/online
echo 1 > $online || exit
cat > load <<END
perf stat -x, -o stat -e cycles -- workload --scale 1000 &
while ! pidof workload > /dev/null; do sleep 0.005; done
for i in 1 2 3; do
    echo 0 > $online; sleep 0.02; echo 1 > $online; sleep 0.02
done
wait
END
record -a -c 1000000 -e cycles -- sh load; samples hotplug
echo "unplugged $(counts cycles)"
stat -e cycles taskset 2 workload --scale 1000; echo "plugged $(counts cycles)"
stat -e cycles workload --scale 2000 & at_work 1; sleep 0.05
echo disk > /sys/power/state || echo "no swap to hibernate into"; wait; echo "slept $(counts cycles)"
perf stat -x, -o lost1 -a -e cycles workload --scale 2000 &
perf stat -x, -o lost2 -e '{cycles,instructions}' workload --scale 2000 &
record -F 1000 -e cycles workload --scale 2000 &
at_work 3; sleep 0.05; meter --save true > /dev/null; wait
echo "gone $(dmesg | grep -c "the host's PMU has gone")"
echo "lost $(grep -c 'not counted' lost1) $(grep -c 'not counted' lost2)"
samples before
perf stat -x, -o after -e cycles true
grep -q '^[0-9][0-9]*,[^,]*,cycles' after || echo "refused after"
rmmod vpmu_pmu && echo "unloaded after"
insmod /root/vpmu_pmu.ko || echo "no device after"
"#;

const END: &str = r#"
dmesg | grep -v 'ommand line' | grep -iE 'warning:|bug:|stall|lockup|oops|unknown reason|call trace' | sed 's/^/complaint /'
echo "end"
"#;

/// The output of a guest.
struct Said(String);

impl Said {
    /// Returns the numbers behind `word`.
    fn numbers(&self, word: &str) -> Vec<u64> {
        let mut lines = self.0.lines();
        let line = lines.find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
        let line = line.unwrap_or_else(|| panic!("no {word} in:\n{}", self.0));
        line.split_whitespace()
            .map(|number| number.parse().unwrap())
            .collect()
    }

    fn one(&self, word: &str) -> u64 {
        match self.numbers(word)[..] {
            [number] => number,
            ref other => panic!("{word} {other:?}:\n{}", self.0),
        }
    }

    /// Panics unless the numbers behind `word` differ from `count` by at most `percent` percent.
    fn near(&self, word: &str, count: u64, percent: u64) {
        for number in self.numbers(word) {
            let difference = number.abs_diff(count) * 100;
            let said = &self.0;
            assert!(
                difference <= count * percent,
                "{word} is not {count}:\n{said}"
            );
        }
    }

    fn lines(&self, lines: &[&str]) {
        for line in lines {
            let said = self.0.lines().any(|said| said == *line);
            assert!(said, "no {line:?} in:\n{}", self.0);
        }
        assert!(!self.0.contains("complaint"), "{}", self.0);
    }

    fn check_perf(&self, kernel: Kernel) {
        assert_eq!(self.numbers("sysfs"), [4, 0, 4], "{}", self.0);
        assert_eq!(self.one("unused"), 0, "a driver that nobody uses rings");
        let cycles = self.numbers("counted")[0];
        assert!(cycles > 0, "{}", self.0);
        self.near("counted", cycles, 2);
        self.near("group", self.numbers("group")[0], 2);
        assert_eq!(self.one("refused"), 4, "{}", self.0);
        assert_eq!(self.numbers("multiplexed").len(), 12);
        self.near("multiplexed", cycles, 25);
        assert!(self.one("system") > cycles / 3, "{}", self.0);
        self.near("inherited", cycles * 2, 10);
        self.near("again", cycles, 10);
        // The period is a million, so there are as many samples as millions.
        self.near("fixed", cycles / 1_000_000, 15);
        for case in ["frequency", "leader", "storm"] {
            assert!(self.one(case) > 10, "{case}: {}", self.0);
        }
        // Each of 300 operations switches twice, and perf itself switches, too.
        let switched = self.one("switched");
        assert!((600..800).contains(&switched), "{}", self.0);
        let [own, all] = self.numbers("relatives")[..] else {
            panic!("{}", self.0);
        };
        assert!(all > 500 && own >= all - all / 20, "{}", self.0);
        let after = match kernel {
            // A task that has had an event has a pointer to the module.
            Kernel::Bookworm => "kept",
            _ => "unloaded",
        };
        self.lines(&["no rdpmc", "busy", after, "end"]);
    }

    fn check_fate(&self) {
        let cycles = self.numbers("counted")[0];
        self.near("unplugged", cycles, 15);
        self.near("plugged", cycles, 10);
        self.near("slept", cycles * 2, 10);
        assert!(
            self.one("hotplug") >= self.one("unplugged") / 1_000_000 / 2,
            "{}",
            self.0
        );
        assert_eq!(self.one("gone"), 1, "{}", self.0);
        assert_eq!(self.numbers("lost"), [1, 2], "{}", self.0);
        assert!(self.one("before") > 10, "{}", self.0);
        self.lines(&["refused after", "unloaded after", "no device after", "end"]);
    }
}

fn options(vpmu: &mut Command, modules: &Modules) {
    vpmu.args(["--pmu", "emulated", "--memory", "512M"])
        .args([
            "--vmm-arg=--paravirt",
            "--vmm-arg=--approximate-instructions",
        ])
        .arg("--kernel")
        .arg(modules.kernel())
        .arg("--add")
        .arg(modules.pmu());
}

#[test]
fn stock_perf_works_on_linux_6_1() {
    stock_perf_works(Kernel::Bookworm);
}

#[test]
#[ignore = "long: script/test --long"]
fn stock_perf_works_on_linux_6_12() {
    stock_perf_works(Kernel::Backports);
}

fn stock_perf_works(kernel: Kernel) {
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(", maybe with a PMU of the host's, and in real time") else {
        return;
    };
    let Some(modules) = modules(kernel) else {
        return;
    };
    let script = [NO_SYMBOLS, COMMON, COUNT, PERF, END].concat();
    let compared = compared(&mut vpmu, |vpmu| options(vpmu, &modules), &script);
    Said(compared.console.replace('\r', "")).check_perf(kernel);
    let run = compared.run;
    let records = &run["vmm"]["measured"]["pebs"];
    // Those of `fixed` and `frequency`, of which most are no interrupts.
    assert!(records["sampled"].as_u64() > Some(100), "{run}");
    assert_eq!([&records["lost"], &records["skipped"]], [0, 0], "{run}");
}

#[test]
#[ignore = "long: script/test --long"]
fn what_may_befall_the_driver_on_linux_6_12() {
    let _turn = turn(1);
    let Some(mut vpmu) = nested_vpmu(RESTORING) else {
        return;
    };
    let Some(modules) = modules(Kernel::Backports) else {
        return;
    };
    let options = |vpmu: &mut Command| {
        options(vpmu, &modules);
        vpmu.args(["--append", "maxcpus=1"])
            .args(["--vmm-arg=--save=/guest/saved", "--vmm-arg=--drop-paravirt"]);
    };
    let script = [NO_SYMBOLS, COMMON, COUNT, FATE, END].concat();
    let (text, _) = two_vcpus::compare(&mut vpmu, options, &script);
    let said = Said(text.replace('\r', ""));
    said.check_fate();
}
