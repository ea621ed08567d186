//! Tests a matrix of processors. The monitor boots stock Linux on each, the guest's PMU counts like the machine's, and
//! the monitor says which accesses must trap there, and why.
//!
//! QEMU models the ID registers of each core, so the plan is the one that the core would get. It models neither how
//! long anything takes nor how well a core keeps host counters apart. A program's counts are the same on each core, so
//! one core is the reference for all.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::payload::program;
use crate::support::{skipped, text, turn, vpmu};
use serde_json::Value;

/// Cores before PMUv3p5, which cannot keep a counter from counting at EL2 by themselves.
const OLDER: [(&str, u32); 2] = [("cortex-a53", 1), ("neoverse-v1", 2)];

/// Others of the same versions.
const KIN: [(&str, u32); 3] = [("cortex-a55", 2), ("cortex-a72", 1), ("neoverse-n1", 1)];

/// Cores that can keep a counter from counting at EL2. A710 has 20 counters.
const NEWER: [(&str, u32); 3] = [("cortex-a710", 2), ("neoverse-n2", 1), ("max", 12)];

const COUNT: &str = "perf stat -x, -o stat -e cycles:u,instructions:u -- workload; cat stat; nproc";

/// Other machines around one core: more options of QEMU's `virt`, and memory.
const BOARDS: [(&str, &str); 5] = [
    ("virt,highmem=off", "1G"),
    ("virt,its=off", "1G"),
    ("virt,gic-version=4", "1G"),
    ("virt,secure=on", "1G"),
    ("virt", "8G"),
];

/// Runs a guest and returns the two counts, the number of CPUs, and the results.
fn run(pmu: &str, core: (&str, u32), more: &[&str]) -> Option<(Vec<f64>, Value)> {
    run_command(pmu, core, more, COUNT)
}

/// Runs a command in a guest and returns the numbers that it prints, and the results.
fn run_command(
    pmu: &str,
    (cpu, vcpus): (&str, u32),
    more: &[&str],
    command: &str,
) -> Option<(Vec<f64>, Value)> {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.json");
    let output = vpmu("aarch64")?
        .args(["run", "--pmu", pmu, "--cpu", cpu])
        .args(["--vcpus", &vcpus.to_string()])
        .args(more)
        .arg("--json")
        .arg(&json)
        .args(["--", command])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{cpu} {pmu}: {text}{errors}");
    let numbers = text
        .lines()
        .filter_map(|line| line.split(',').next()?.trim().parse().ok())
        .collect();
    let results: Value = serde_json::from_str(&fs::read_to_string(json).unwrap()).unwrap();
    Some((numbers, results["runs"][0].clone()))
}

#[test]
fn older_cores_boot_count_right_and_trap_nothing() {
    check(&OLDER);
}

#[test]
#[ignore = "as other cores of their versions: script/test --long"]
fn the_other_older_cores_do_so_too() {
    check(&KIN);
}

#[test]
fn newer_cores_boot_count_right_and_trap_nothing() {
    check(&NEWER);
}

/// Checks boards with and without an ITS, with GICv4's redistributors of four frames, with all devices below 4 GiB, and
/// with much memory.
#[test]
#[ignore = "long: script/test --long"]
fn other_boards_make_no_difference() {
    let core = ("cortex-a76", 2);
    let Some(native) = native(core) else {
        return;
    };
    for (board, memory) in BOARDS {
        let _turn = turn(1);
        println!("{board}, {memory}");
        let more = [
            "--memory",
            memory,
            "--qemu-arg=-M",
            &format!("--qemu-arg={board}"),
        ];
        let (guest, results) = run("partitioned", core, &more).unwrap();
        check_guest(core, &native, &guest, &results);
    }
}

/// Checks a board of another kind: AMD's (Xilinx's) Versal, with two cores for Linux among its four, EL3, and names in its
/// device tree that are longer than the specification allows. QEMU's tree names no PMU, so Linux finds none.
#[test]
fn a_board_of_another_kind_boots_stock_linux() {
    let _turn = turn(1);
    let Some(mut vpmu) = vpmu("aarch64") else {
        return;
    };
    let output = vpmu
        // script/qemu's QEMU has the board `virt` only.
        .env_remove("VPMU_QEMU")
        .args(["run", "--pmu", "partitioned", "--cpu", "cortex-a72"])
        .args(["--vcpus", "4", "--qemu-arg=-M"])
        .args(["--qemu-arg=xlnx-versal-virt", "--"])
        .arg("nproc; tr '\\0' '\\n' < /proc/device-tree/compatible; workload && echo done")
        .output()
        .unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("2\nxlnx-versal-virt\ndone\n"), "{text}");
}

/// Checks a machine of 130 CPUs, whose redistributors are in two regions: it boots, and where it has too little memory for
/// so many it says so in one line.
#[test]
fn a_machine_of_130_cpus_boots() {
    let _turn = turn(1);
    let Some(payload) = program("aarch64/payload.bin") else {
        return;
    };
    for (memory, says) in [
        ("512M", "ok psci.cpu_on_errors"),
        ("16M", "no 11 MiB of RAM are free for the monitor"),
    ] {
        let output = vpmu("aarch64")
            .unwrap()
            .args(["run", "--pmu", "partitioned", "--memory", memory])
            .args(["--qemu-arg=-smp", "--qemu-arg=130"])
            .args(["--append", "test=psci.cpu_on_errors", "--kernel"])
            .arg(&payload)
            .output()
            .unwrap();
        let said = text(&output);
        assert!(said.contains(says), "{memory}: {said}");
    }
}

/// Checks that a monitor that cannot work says so in one line and ends the machine.
#[test]
fn machines_without_what_it_needs_end_with_one_line() {
    let _turn = turn(1);
    for (option, board, says) in [
        (
            "-M",
            "virt,gic-version=2",
            "the device tree has no usable GICv3 node",
        ),
        (
            "-M",
            "virt,virtualization=off",
            "the monitor was entered at EL1 and needs EL2",
        ),
        (
            "-cpu",
            "max,pmu=off",
            "cannot sample the guest: the CPU has no PMU",
        ),
    ] {
        let Some(mut vpmu) = vpmu("aarch64") else {
            return;
        };
        let output = vpmu
            .args([
                "run",
                "--pmu",
                "partitioned",
                "--host-profile",
                "1000",
                "--borrow",
            ])
            .args([
                format!("--qemu-arg={option}"),
                format!("--qemu-arg={board}"),
            ])
            .args(["--", "true"])
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{board}: {errors}");
        let line = errors.lines().next().unwrap();
        assert!(
            line.starts_with("vpmu: vpmu-monitor: error: "),
            "{board}: {errors}"
        );
        assert!(line.contains(says), "{board}: {errors}");
    }
}

/// UEFI for arm64 (Debian's `qemu-efi-aarch64`).
const UEFI: &str = "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd";

/// Checks that UEFI starts the boot file, which hands stock Linux what the firmware says of the machine: ACPI's tables, or
/// a device tree. Linux then has the firmware's runtime services, too.
#[test]
fn uefi_starts_the_monitor_with_acpi_and_with_a_device_tree() {
    if !Path::new(UEFI).exists() {
        return skipped(&format!("no {UEFI}: apt-get install qemu-efi-aarch64"));
    }
    let core = ("cortex-a76", 2);
    let Some(native) = native(core) else {
        return;
    };
    let there = ["efi", "acpi"].map(|it| format!("; ls -d /sys/firmware/{it} 2>/dev/null | wc -l"));
    let command = format!("{COUNT}{}", there.concat());
    for (board, acpi) in [("virt", 1.0), ("virt,acpi=off", 0.0)] {
        let _turn = turn(1);
        let board = format!("--qemu-arg={board}");
        let firmware = format!("--qemu-arg={UEFI}");
        let more = ["--qemu-arg=-M", &board, "--qemu-arg=-bios", &firmware];
        let (mut guest, results) = run_command("partitioned", core, &more, &command).unwrap();
        assert_eq!(guest.split_off(3), [1.0, acpi], "{board}");
        check_guest(core, &native, &guest, &results);
    }
}

/// Checks that UEFI gets a line that says what is missing, and its machine back.
#[test]
fn uefi_is_told_what_is_missing() {
    let _turn = turn(1);
    let Some(monitor) = program("aarch64/monitor.bin") else {
        return;
    };
    if !Path::new(UEFI).exists() {
        return skipped(&format!("no {UEFI}: apt-get install qemu-efi-aarch64"));
    }
    let mut qemu = Command::new("qemu-system-aarch64")
        .args(["-M", "virt,virtualization=off,gic-version=3"])
        .args(["-cpu", "cortex-a76", "-m", "512M", "-nographic"])
        .args(["-nic", "none", "-bios", UEFI])
        .arg("-kernel")
        .arg(&monitor)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The firmware's next choice is its shell, which ends no machine.
    let lines = BufReader::new(qemu.stdout.take().unwrap()).split(b'\n');
    let mut said = String::new();
    for line in lines {
        let line = String::from_utf8_lossy(&line.unwrap()).into_owned();
        said += &line;
        if line.contains("BdsDxe: starting") {
            break;
        }
    }
    qemu.kill().unwrap();
    qemu.wait().unwrap();
    let line = "vpmu-monitor: error: UEFI runs at EL1, and the monitor needs EL2";
    assert!(said.contains(line), "{said}");
}

/// Checks the counts and traps of guests on these cores.
fn check(cores: &[(&'static str, u32)]) {
    let Some(native) = native(cores[0]) else {
        return;
    };
    for &core in cores {
        let _turn = turn(1);
        let (guest, results) = run("partitioned", core, &[]).unwrap();
        check_guest(core, &native, &guest, &results);
    }
}

/// Returns the counts of a run on the core itself, without a monitor.
fn native(core: (&str, u32)) -> Option<Vec<f64>> {
    let _turn = turn(1);
    run("native", core, &[]).map(|(native, _)| native)
}

fn check_guest((cpu, vcpus): (&str, u32), native: &[f64], guest: &[f64], results: &Value) {
    assert_eq!(native.len(), 3, "{cpu}: {native:?}");
    assert_eq!(guest.len(), 3, "{cpu}: {guest:?}");
    assert_eq!(guest[2], f64::from(vcpus), "{cpu}");
    for (guest, native) in guest.iter().zip(&native[..2]) {
        let ratio = guest / native;
        assert!(
            (0.999..=1.001).contains(&ratio),
            "{cpu}: {ratio} of native's"
        );
    }
    let exits = results["exits"].as_object().unwrap();
    let trapped: Vec<&String> = exits
        .keys()
        .filter(|kind| kind.starts_with("sysreg:PM"))
        .collect();
    // A guest's first access traps because its PMU is not loaded yet.
    let times: u64 = trapped
        .iter()
        .filter_map(|&kind| exits[kind].as_u64())
        .sum();
    println!("{cpu}, {vcpus} CPUs: {trapped:?} trapped {times} times");
    assert!(
        times <= u64::from(vcpus),
        "{cpu} trapped {trapped:?} {times} times"
    );
}
