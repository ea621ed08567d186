//! The module `guest/lazy_deadline` in a real guest with two processors: stock kernels of
//! Debian 12 and its backports under this project's VMM and under stock QEMU, both on KVM.
//!
//! Needs gcc 12 and make, too. Instructions are counted, so that transactions are shorter than the
//! guest's ticks on any machine: longer ones leave little to avoid.

use std::process::Command;

use crate::support::{self, modules, nested_vpmu, number, turn, vpmu};
use crate::two_vcpus;
use serde_json::Value;
use vpmu_lab::image::module::{Kernel, Modules};

const TRANSACTIONS: u64 = 200;

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

/// The script for a slot that pays for messages, and not for sleeps, by what writes cost in this guest.
const FALLING_BACK: &str = r#"insmod /root/lazy_deadline.ko mode=paravirtual || exit
choice() { awk -v kind="$1" 'NR == 3 { print "choice", kind, $2, $3, $4, $5, $6, $7, $8, $9 }' $lazy/break_even; }
awake() { awk -v kind="$1" '$1 == 1 { print "awake", kind, $5 - $8 }' $lazy/counters; }
sleeps() { echo > $lazy/reset; /root/sleepers SLEEPS 1000 1 && awake "$1" && choice "$1"; }
work 700 && choice messages
sleeps sleeps
meter --save sleep 0.1 > saved && sleeps restored
echo > $lazy/reset
work 700 && choice again
echo > $lazy/reset
work 9000 && choice long
echo 0 > /sys/module/lazy_deadline/parameters/break_even
echo off > $lazy/mode && echo paravirtual > $lazy/mode
sleeps always
rmmod lazy_deadline && taskset 2 sleep 0.1 && echo "unloaded"
dmesg | grep -v 'ommand line' | grep -iE 'warning:|bug:|stall|lockup|oops|left alone' | sed 's/^/complaint /'
true
"#;
const SLEEPS: u64 = 800;

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
    let script = format!("{COMMON}{script}")
        .replace("TRANSACTIONS", &TRANSACTIONS.to_string())
        .replace("SLEEPS", &SLEEPS.to_string());
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
#[ignore = "as on 6.1, by another kernel: script/test --long"]
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

/// The second CPU's choice between its slot and IA32_TSC_DEADLINE.
#[derive(Debug)]
struct Choice {
    slot_ns: u64,
    msr_ns: u64,
    least_percent: u64,
    is_plain: bool,
    /// Deadlines that went to IA32_TSC_DEADLINE, and changes there and back.
    plain: u64,
    fell_back: u64,
    came_back: u64,
    /// How often the costs were measured.
    weighed: u64,
}

impl Choice {
    fn of(text: &str, kind: &str) -> Self {
        let line = support::said(text, &format!("choice {kind}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse().unwrap();
        Self {
            slot_ns: number(0),
            msr_ns: number(1),
            least_percent: number(2),
            is_plain: words[3] == "plain",
            plain: number(4),
            fell_back: number(5),
            came_back: number(6),
            weighed: number(7),
        }
    }

    fn changes(&self) -> (u64, u64) {
        (self.fell_back, self.came_back)
    }
}

#[test]
#[ignore = "as the model of the choice, in a guest: script/test --long"]
fn a_slot_that_does_not_pay_is_left_until_it_does() {
    let _turn = turn(1);
    let options = ["--no-pmu", "--lazy-deadline", "--save=/guest/saved"]
        .map(|option| format!("--vmm-arg={option}"));
    let Some(vpmu) = nested_vpmu(IN_REAL_TIME) else {
        return;
    };
    let Some((text, _)) = run(vpmu, Kernel::Bookworm, "emulated", &options, FALLING_BACK) else {
        return;
    };
    let messages = Choice::of(&text, "messages");
    // An exit to the VMM, with its calls, takes longer than one that KVM completes.
    assert!(messages.slot_ns > messages.msr_ns && messages.msr_ns > 0);
    let percent = 100 - 100 * messages.msr_ns / messages.slot_ns;
    assert!(
        messages.least_percent.abs_diff(percent) <= 1,
        "{messages:?}"
    );
    assert_eq!(
        (messages.is_plain, messages.plain),
        (false, 0),
        "{messages:?}"
    );
    assert_eq!(
        (messages.changes(), messages.weighed),
        ((0, 0), 1),
        "{messages:?}"
    );

    let sleeps = Choice::of(&text, "sleeps");
    assert!(sleeps.is_plain && sleeps.plain > 0, "{sleeps:?}");
    assert_eq!(sleeps.changes(), (1, 0), "{sleeps:?}");
    // The guest goes on as it was, wherever it is restored.
    let restored = Choice::of(&text, "restored");
    assert!(restored.is_plain && restored.plain > SLEEPS, "{restored:?}");
    assert_eq!(restored.changes(), (0, 0), "{restored:?}");

    let again = Choice::of(&text, "again");
    assert_eq!(
        (again.is_plain, again.changes()),
        (false, (0, 1)),
        "{again:?}"
    );

    // Measured once more, in the midst of messages.
    let long = Choice::of(&text, "long");
    assert_eq!((long.is_plain, long.changes()), (false, (0, 0)), "{long:?}");
    assert_eq!(long.weighed, 1, "{long:?}");

    let always = Choice::of(&text, "always");
    assert_eq!((always.least_percent, always.plain), (0, 0), "{always:?}");
    assert_eq!(
        (always.is_plain, always.changes()),
        (false, (0, 0)),
        "{always:?}"
    );
    // Each sleep is ended by an interrupt of its own.
    for kind in ["sleeps", "restored", "always"] {
        let awake: u64 = number(&text, &format!("awake {kind}"));
        assert!(awake >= SLEEPS, "{kind}: {awake}");
    }
    assert_eq!(said(&text, "unloaded"), 1);
    assert!(!text.contains("complaint "));
}
