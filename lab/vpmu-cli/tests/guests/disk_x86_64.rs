//! Guests that boot from a disk: GRUB on a BIOS and on UEFI, a Debian kernel with KASLR, the boots after the first, and
//! guests that sleep.

use std::collections::BTreeSet;
use std::process::Command;

use crate::payload::program;
use crate::support::{Compared, compared, nested_vpmu, turn};

/// Boots `LAST` times: by the firmware, by a reset, by kexec. Each boot counts and samples. Each line that a test reads
/// begins with a word of its own, and stays on the disk until the last boot.
const SCRIPT: &str = r#"
boot=$(cat boots 2> /dev/null || echo 0); boot=$((boot + 1)); echo $boot > boots
say() { echo "$@" >> said; }
say "text $(awk '$3 == "_text" { print $1; exit }' /proc/kallsyms)"
perf stat -x, -o stat -e cycles workload --scale 100
say "counted $(awk -F, '$3 == "cycles" { print $1 }' stat)"
perf record --no-bpf-event -q -e cycles -c 500000 -o perf.data workload --scale 300
say "sampled $(perf report -i perf.data --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }')"
say "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
sync
if [ $boot = LAST ]; then
    cat said
elif [ $boot = 1 ]; then
    reboot -f
else
    chmod +x kexec
    ./kexec /boot/vmlinuz /boot/initrd.img "$(cat /proc/cmdline)"
fi"#;

/// Sleeps in memory with a processor that is off (S3), and on the disk (hibernation), from where another kernel wakes it.
/// A `perf stat` runs while the guest sleeps on the disk.
const SLEEP: &str = r#"
chmod +x self-monitor
counted() { perf stat -x, -o stat -e cycles workload --scale 100; echo "counted $(awk -F, '$3 == "cycles" { print $1 }' stat)"; }
check() {
    counted
    perf record --no-bpf-event -q -e cycles -c 500000 -o perf.data workload --scale 300
    echo "sampled $(perf report -i perf.data --stats 2> /dev/null | awk '/SAMPLE events/ { print $3; exit }')"
    ./self-monitor
}
asleep() { sleep 0.1; echo $1 > /sys/power/state; echo "woken $1 $?"; }
check
echo +2 > /sys/class/rtc/rtc0/wakealarm; asleep mem; check
mkswap /dev/vda3 > /dev/null; swapon /dev/vda3; echo reboot > /sys/power/disk
perf stat -x, -o across -e cycles workload --scale 2000 & asleep disk; wait
echo "across $(awk -F, '$3 == "cycles" { print $1 }' across)"
check
echo "restored $(dmesg | grep -c 'PM: hibernation: hibernation exit')"
echo "complaints $(dmesg | grep -c -E '[Uu]nknown NMI|unchecked MSR|BUG:|Oops:|general protection')"
true"#;

fn check(disk: &str, vcpus: u32, boots: usize) {
    let (Some(mut vpmu), Some(kexec)) = (
        nested_vpmu(", and vpmu exec's are in the lab's KVM host"),
        program("x86_64/kexec"),
    ) else {
        return;
    };
    let _turn = turn(1);
    let script = SCRIPT.replace("LAST", &boots.to_string());
    let own = |vpmu: &mut Command| {
        vpmu.args([
            "--pmu",
            "exec",
            "--disk",
            disk,
            "--vcpus",
            &vcpus.to_string(),
        ]);
        vpmu.args(["--timeout", "1800", "--boot-timeout", "900", "--add"]);
        vpmu.arg(&kexec);
    };
    let Compared { console, .. } = compared(&mut vpmu, own, &script);
    check_counts(&console, boots);
    assert_eq!(
        numbers(&console, "complaints "),
        vec![0; boots],
        "{console}"
    );
    let addresses = console
        .lines()
        .filter_map(|line| line.strip_prefix("text "));
    let addresses: BTreeSet<&str> = addresses.collect();
    assert!(addresses.len() > 1, "KASLR: {addresses:?}");
}

fn numbers(console: &str, word: &str) -> Vec<u64> {
    let lines = console.lines().filter_map(|line| line.strip_prefix(word));
    lines
        .filter_map(|number| number.trim().parse().ok())
        .collect()
}

/// Checks that the guest has counted and sampled so many times.
fn check_counts(console: &str, times: usize) {
    let (counted, sampled) = (numbers(console, "counted "), numbers(console, "sampled "));
    // 10 million of the workload's, and what its kernel takes.
    let is_right = |counted: &u64| (10_000_000..12_000_000).contains(counted);
    assert!(counted.iter().all(is_right), "{console}");
    let is_right = |sampled: &u64| (60..200).contains(sampled);
    assert!(sampled.iter().all(is_right), "{console}");
    assert_eq!((counted.len(), sampled.len()), (times, times), "{console}");
}

#[test]
#[ignore = "a guest's own boot loader takes a minute: script/test --long"]
fn a_guest_of_a_bios_boots_again() {
    check("bios", 1, 2);
}

#[test]
#[ignore = "as the one above, another way: script/test --long"]
fn a_guest_of_uefi_with_an_older_kernel_starts_another_by_kexec() {
    check("uefi:bookworm", 2, 3);
}

#[test]
#[ignore = "long: script/test --long"]
fn a_guest_counts_after_it_has_slept() {
    let (Some(mut vpmu), Some(monitor)) = (
        nested_vpmu(", and vpmu exec's are in the lab's KVM host"),
        program("x86_64/self-monitor"),
    ) else {
        return;
    };
    let _turn = turn(1);
    let own = |vpmu: &mut Command| {
        vpmu.args(["--pmu", "exec", "--disk", "bios", "--add"]);
        vpmu.arg(&monitor);
        vpmu.args(["--timeout", "1800", "--boot-timeout", "900"]);
    };
    let Compared { console, .. } = compared(&mut vpmu, own, SLEEP);
    check_counts(&console, 3);
    for state in ["mem", "disk"] {
        assert!(console.contains(&format!("woken {state} 0")), "{console}");
    }
    let monitored = "self-monitor: rdpmc 2000 backwards 0 outside 0 fallbacks 0";
    assert_eq!(console.matches(monitored).count(), 3, "{console}");
    assert_eq!(numbers(&console, "restored "), [1], "{console}");
    assert_eq!(numbers(&console, "complaints "), [0], "{console}");
}
