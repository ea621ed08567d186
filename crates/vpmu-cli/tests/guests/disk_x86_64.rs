//! Guests that boot from a disk: GRUB on a BIOS and on UEFI, a Debian kernel with KASLR, and the boots after the first.

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
    let numbers = |word: &str| -> Vec<u64> {
        let lines = console.lines().filter_map(|line| line.strip_prefix(word));
        lines
            .filter_map(|number| number.trim().parse().ok())
            .collect()
    };
    for counted in numbers("counted ") {
        // 10 million of the workload's, and what its kernel takes.
        assert!((10_000_000..12_000_000).contains(&counted), "{console}");
    }
    for sampled in numbers("sampled ") {
        assert!((60..200).contains(&sampled), "{console}");
    }
    assert_eq!(numbers("counted ").len(), boots, "{console}");
    assert_eq!(numbers("sampled ").len(), boots, "{console}");
    assert_eq!(numbers("complaints "), vec![0; boots], "{console}");
    let addresses = console
        .lines()
        .filter_map(|line| line.strip_prefix("text "));
    let addresses: BTreeSet<&str> = addresses.collect();
    assert!(addresses.len() > 1, "KASLR: {addresses:?}");
}

#[test]
fn a_guest_of_a_bios_boots_again() {
    check("bios", 1, 2);
}

#[test]
#[ignore = "as the one above, another way: script/test --long"]
fn a_guest_of_uefi_with_an_older_kernel_starts_another_by_kexec() {
    check("uefi:bookworm", 2, 3);
}
