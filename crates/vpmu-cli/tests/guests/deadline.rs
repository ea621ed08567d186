//! The module `guest/lazy_deadline` in a real guest with two processors: stock kernels of
//! Debian 12 and its backports under this project's VMM and under stock QEMU, both on KVM.
//!
//! Needs gcc 12 and make, too. Instructions are counted, so that transactions are shorter than the
//! guest's ticks on any machine: longer ones leave little to avoid.

use std::process::Command;

use crate::support::{modules, nested_vpmu, turn, vpmu};
use crate::two_vcpus;
use serde_json::Value;
use vpmu_lab::image::module::{Kernel, Modules};

const TRANSACTIONS: u64 = 400;

/// The part that all scripts share. Each line that it prints begins with a word for its kind.
const COMMON: &str = r#"exec 2>&1
mount -t debugfs debugfs /sys/kernel/debug && ip link set lo up || exit
echo 1 > /sys/devices/system/cpu/cpu1/online || exit
lazy=/sys/kernel/debug/lazy_deadline
account() { awk -v kind="$1" '$1 != "cpu" { for (i = 2; i <= NF; i++) sum[i] += $i }
    END { printf "counters %s", kind; for (i = 2; i <= NF; i++) printf " %d", sum[i]; print "" }' $lazy/counters; }
work() { /root/ping_pong "$1" 0 1 1000 > result && sed "s/^/result /" result; }
"#;

const IN_OURS: &str = r#"insmod /root/lazy_deadline.ko mode=off || exit
for mode in plain guest-only paravirtual guest-only paravirtual plain; do
    echo $mode > $lazy/mode && echo "mode $(cat $lazy/mode)"
    echo > $lazy/reset
    work TRANSACTIONS || exit
    account $mode
    awk -v kind=$mode 'NR == 2 { print "latencies", kind, $1, $2, $3, $4, $5 }' $lazy/latency
done
echo nonsense > $lazy/mode || echo "refused nonsense"
for mode in guest-only paravirtual; do
    echo $mode > $lazy/mode
    echo 0 > /sys/devices/system/cpu/cpu1/online
    sleep 0.1
    echo 1 > /sys/devices/system/cpu/cpu1/online
    echo > $lazy/reset
    taskset 2 sleep 0.1 && work 50 && awk '$1 == 1 && $2 > 0 { print "hotplug", mode }' mode=$mode $lazy/counters
done
meter --save sleep 0.3 > saved
work 50 && taskset 2 sleep 0.1 && echo "saved and restored"
for mode in guest-only paravirtual; do
    echo $mode > $lazy/mode
    echo disk > /sys/power/state || echo "no swap to hibernate into"
    echo > $lazy/reset
    taskset 2 sleep 0.1 && work 50 && awk '$1 == 1 && $2 > 0 { print "slept", mode }' mode=$(cat $lazy/mode) $lazy/counters
done
echo off > $lazy/mode && before=$(cat $lazy/counters) && work 50 && [ "$before" = "$(cat $lazy/counters)" ] && echo "off works"
echo paravirtual > $lazy/mode
rmmod lazy_deadline && [ ! -e $lazy ] && work 50 && taskset 2 sleep 0.1 && echo "unloaded"
for i in 1 2 3; do
    insmod /root/lazy_deadline.ko mode=guest-only && sleep 0.05 && rmmod lazy_deadline && echo "again $i"
done
dmesg | grep -v 'ommand line' | grep -iE 'warning:|bug:|stall|lockup|oops|left alone' | sed 's/^/complaint /'
insmod /root/lazy_deadline.ko mode=paravirtual && echo "left to the power off"
true
"#;

const IN_QEMU: &str = r#"insmod /root/lazy_deadline.ko mode=paravirtual || echo "refused paravirtual"
insmod /root/lazy_deadline.ko mode=guest-only || exit
work TRANSACTIONS || exit
account guest-only
echo paravirtual > $lazy/mode || echo "mode $(cat $lazy/mode)"
rmmod lazy_deadline && work 50 && echo "unloaded"
true
"#;

/// The script for the newest kernel that Debian builds with a compiler that is installed here.
const ON_LINUX_6_12: &str = r#"uname -r | grep -q '^6\.12\.' && echo "on Linux 6.12"
insmod /root/lazy_deadline.ko mode=off || exit
for mode in plain guest-only paravirtual; do
    echo $mode > $lazy/mode
    echo > $lazy/reset
    work TRANSACTIONS || exit
    account $mode
done
rmmod lazy_deadline && work 50 && taskset 2 sleep 0.1 && echo "unloaded"
dmesg | grep -v 'ommand line' | grep -iE 'warning:|bug:|stall|lockup|oops|left alone' | sed 's/^/complaint /'
true
"#;

/// Why a test needs the lab's KVM host.
const IN_REAL_TIME: &str = ", in real time and without another process";

/// Runs `script` in a guest that has the module, by `vpmu`.
fn run(
    mut vpmu: Command,
    kernel: Kernel,
    pmu: &str,
    options: &[String],
    script: &str,
) -> Option<(String, Value)> {
    let module = modules(kernel)?;
    let options = |vpmu: &mut Command| {
        vpmu.args(["--memory", "512M"])
            .args(["--append", Modules::DEADLINE_COMMAND_LINE, "--pmu", pmu])
            .args(options)
            .arg("--kernel")
            .arg(module.kernel());
        for file in module.files() {
            vpmu.arg("--add").arg(file);
        }
    };
    let script = format!("{COMMON}{script}").replace("TRANSACTIONS", &TRANSACTIONS.to_string());
    Some(two_vcpus::compare(&mut vpmu, options, &script))
}

/// The module's counters, summed over all CPUs: asked, avoided, written, interrupts, early,
/// rearmed, stray. The last two count the due interrupts, and the other ones, that found an idle
/// CPU.
struct Counters(Vec<u64>);

impl Counters {
    fn all(text: &str, mode: &str) -> Vec<Self> {
        text.lines()
            .filter_map(|line| {
                line.trim_end()
                    .strip_prefix("counters ")?
                    .strip_prefix(mode)
            })
            .map(|rest| {
                Self(
                    rest.split_whitespace()
                        .map(|word| word.parse().unwrap())
                        .collect(),
                )
            })
            .collect()
    }

    /// Checks the counters of `mode`, in which Linux asked more than `least` times.
    fn check(&self, mode: &str, least: u64) {
        let &[
            asked,
            avoided,
            written,
            interrupts,
            early,
            rearmed,
            stray,
            idle_due,
            idle_extra,
        ] = self.0.as_slice()
        else {
            panic!("{mode}: {:?}", self.0);
        };
        assert_eq!(asked, avoided + written, "{mode}: {:?}", self.0);
        assert!(early + stray <= interrupts, "{mode}: {:?}", self.0);
        assert!(idle_due <= interrupts - early - stray);
        assert!(idle_extra <= early + stray);
        assert!(asked > least, "{mode}: {:?}", self.0);
        match mode {
            "plain" => assert_eq!((avoided, rearmed), (0, 0), "{:?}", self.0),
            "guest-only" => {
                assert_eq!(rearmed, early, "{:?}", self.0);
                assert!(written < asked / 2, "{:?}", self.0);
            }
            _ => {
                assert_eq!(rearmed, 0, "{:?}", self.0);
                assert!(written < asked / 2, "{:?}", self.0);
            }
        }
    }
}

fn said(text: &str, line: &str) -> usize {
    text.lines().filter(|said| said.trim_end() == line).count()
}

#[test]
fn every_mode_in_one_guest() {
    let _turn = turn(1);
    let options = ["--no-pmu", "--lazy-deadline", "--save=/guest/saved"]
        .map(|option| format!("--vmm-arg={option}"));
    let Some(vpmu) = nested_vpmu(IN_REAL_TIME) else {
        return;
    };
    let Some((text, run)) = run(vpmu, Kernel::Bookworm, "emulated", &options, IN_OURS) else {
        return;
    };
    for mode in ["plain", "guest-only", "paravirtual"] {
        assert_eq!(said(&text, &format!("mode {mode}")), 2);
        let counters = Counters::all(&text, mode);
        assert_eq!(counters.len(), 2);
        for counters in counters {
            // The tick stops and starts at each end of an idle moment.
            counters.check(mode, TRANSACTIONS);
        }
    }
    let latencies: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim_end().strip_prefix("latencies "))
        .collect();
    assert_eq!(latencies.len(), 6);
    for line in latencies {
        let numbers: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .map(|word| word.parse().unwrap())
            .collect();
        assert!(numbers[0] > 0 && numbers[1..].is_sorted(), "{line}");
    }
    let lines = [
        "refused nonsense",
        "hotplug guest-only",
        "hotplug paravirtual",
        "saved and restored",
        "slept guest-only",
        "slept paravirtual",
        "off works",
        "unloaded",
        "again 3",
        "left to the power off",
    ];
    for line in lines {
        assert_eq!(said(&text, line), 1, "{line}");
    }
    assert!(!text.contains("complaint "));
    let result = format!("\"transactions\":{TRANSACTIONS},");
    assert_eq!(text.matches(&result).count(), 6);
    // The host keeps the other half of the account.
    let deadline = &run["vmm"]["total"]["deadline"];
    for event in ["writes", "injected"] {
        assert!(deadline[event].as_u64() > Some(0), "{deadline}");
    }
    let [expiries, injected, moved] =
        ["expiries", "injected", "moved"].map(|event| deadline[event].as_u64().unwrap());
    assert!(moved <= expiries, "{deadline}");
    assert!(
        injected <= expiries + deadline["writes"].as_u64().unwrap(),
        "{deadline}"
    );
}

#[test]
#[ignore = "long: script/test --long"]
fn guest_only_needs_no_help_of_the_host() {
    let _turn = turn(1);
    let Some(vpmu) = vpmu("x86_64") else {
        return;
    };
    let Some((text, _)) = run(vpmu, Kernel::Bookworm, "kvm", &[], IN_QEMU) else {
        return;
    };
    assert_eq!(said(&text, "refused paravirtual"), 1);
    let counters = Counters::all(&text, "guest-only");
    counters
        .first()
        .expect("counters")
        .check("guest-only", TRANSACTIONS);
    assert_eq!(said(&text, "unloaded"), 1);
}

#[test]
fn every_mode_works_on_linux_6_12() {
    let _turn = turn(1);
    let options = ["--no-pmu", "--lazy-deadline"].map(|option| format!("--vmm-arg={option}"));
    let Some(vpmu) = nested_vpmu(IN_REAL_TIME) else {
        return;
    };
    let Some((text, _)) = run(vpmu, Kernel::Backports, "emulated", &options, ON_LINUX_6_12) else {
        return;
    };
    assert_eq!(said(&text, "on Linux 6.12"), 1);
    for mode in ["plain", "guest-only", "paravirtual"] {
        let counters = Counters::all(&text, mode);
        // This kernel keeps the tick through some idle moments.
        let first = counters.first().expect("counters");
        first.check(mode, TRANSACTIONS / 2);
    }
    assert_eq!(said(&text, "unloaded"), 1);
    assert!(!text.contains("complaint "));
}
