//! Checks of the machine itself, whatever it is.

use std::fs;
use std::process::Command;

use serde_json::Value;
use vpmu_lab::host::qemu::Qemu;
use vpmu_lab::spec::arch::Arch;

use crate::payload::program;
use crate::support::{skipped, turn, vpmu};
use crate::their_vmm::beside;

#[test]
fn the_selftest_says_what_holds_and_what_it_cannot_check() {
    let _turn = turn(1);
    let Some(mut command) = vpmu("x86_64") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let output = command.arg("selftest").arg("--json").arg(&file).output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("perf_event_paranoid") {
        eprintln!("skipped: {errors}");
        return;
    }
    let found: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(found["schema"], 1);
    assert!(found["machine"]["backing"].is_string(), "{found}");
    let checks = found["checks"].as_array().unwrap();
    let of = |result| checks.iter().filter(move |check| check["result"] == result);
    let names = |result| -> Vec<&str> { of(result).filter_map(|it| it["name"].as_str()).collect() };
    assert_eq!(names("fails"), [""; 0], "{said}{errors}");
    assert!(output.status.success(), "{said}{errors}");
    assert_eq!(
        of("holds").chain(of("cannot")).count(),
        checks.len(),
        "{found}"
    );
    // A clock is on every machine.
    assert!(
        names("holds").contains(&"clock: a storm is bounded"),
        "{said}"
    );
    assert!(checks.iter().all(|check| check["why"] != ""), "{found}");
    assert!(said.contains(" hold, 0 fail, "), "{said}");
}

/// The lab's machine as the host: the one with hardware counters and KVM that every machine can have. Then its NMI watchdog has
/// one of six counters: PerfMonV2 says five, and where CPUID says no number, the VMM's log warns.
#[test]
#[ignore = "long: script/test --long"]
fn the_selftest_holds_on_hardware_counters() {
    const SCRIPT: &str = "mkdir x86_64; mv payload.elf x86_64; export VPMU_GUEST_DIR=/root; \
        timeout 600 ./vpmu selftest; echo status $?; \
        echo 1 > /proc/sys/kernel/watchdog; echo 1 > /proc/sys/kernel/nmi_watchdog; \
        for model in amd amd-v2; do echo model $model; \
        ./vpmu-vmm --memory 64M --kernel x86_64/payload.elf --model $model 2>&1 | grep -v '^ok '; done";
    let _turn = turn(1);
    let version = Qemu::chosen(None).version(&Arch::X86_64.qemu()).unwrap();
    if !version.is_mended() {
        return skipped(&format!("QEMU {version} has no x86 PMU"));
    }
    let mut vpmu = Command::new(env!("CARGO_BIN_EXE_vpmu"));
    vpmu.args([
        "run", "--arch", "x86_64", "--pmu", "native", "--memory", "1G",
    ]);
    vpmu.args([
        "--vcpus",
        "2",
        "--module",
        "kvm_amd",
        "--package",
        "util-linux",
    ]);
    let files = ["vpmu", "vpmu-reprogram", "vpmu-vmm"].map(beside);
    for file in files.into_iter().chain([program("x86_64/payload.elf")]) {
        let Some(file) = file else { return };
        vpmu.arg("--add").arg(file);
    }
    let output = vpmu
        .args(["--timeout", "1200", "--", "sh", "-c", SCRIPT])
        .output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let said = format!("{said}{}", String::from_utf8_lossy(&output.stderr));
    for line in [
        "holds    hardware: a guest's event counts guests, and guests alone",
        "holds    amd guest: amd",
        "holds    amd-v2 guest: amd",
        "holds    intel guest: pmi",
        " hold, 0 fail, ",
        "status 0\n",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let (core, v2) = said.split_once("model amd-v2\n").expect(&said);
    let core = core.split_once("model amd\n").expect(&said).1;
    let warns = |text: &str| text.contains("others have counters of this host's");
    assert!(warns(core) && !warns(v2), "{said}");
    assert!(!core.contains("FAIL") && !v2.contains("FAIL"), "{said}");
}
