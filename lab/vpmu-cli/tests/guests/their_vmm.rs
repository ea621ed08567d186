//! `--vmm FILE`: anybody's VMM in the KVM host. The tests take programs of this project's, which the lab does not know
//! when they come as files.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Compared, NO_SYMBOLS, compared, on_a_clock, skipped, text, turn, vpmu};

/// Returns a program that stands beside vpmu.
pub(crate) fn beside(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_BIN_EXE_vpmu")).with_file_name(name);
    if !path.is_file() {
        skipped(&format!("{name} was not built: script/build builds it"));
        return None;
    }
    Some(path)
}

fn arguments(words: &[&str]) -> Vec<String> {
    words
        .iter()
        .map(|word| format!("--vmm-arg={word}"))
        .collect()
}

/// Runs `script` in a guest of the VMM `file`, which is started with these words.
fn run(file: &Path, words: &[&str], options: &[&str], script: &str) -> Option<Compared> {
    let mut vpmu = vpmu("x86_64")?;
    let own = |vpmu: &mut Command| {
        vpmu.arg("--vmm").arg(file);
        vpmu.args(arguments(words)).args(options);
    };
    Some(compared(&mut vpmu, own, &[NO_SYMBOLS, script].concat()))
}

/// A whole VMM of 200 lines, which boots a bare kernel and whose output is the guest's.
#[test]
fn a_kernel_runs_on_the_example_vmm() {
    let _turn = turn(1);
    let (Some(example), Some(mut vpmu)) = (beside("vpmu-example-vmm"), vpmu("x86_64")) else {
        return;
    };
    let payload = example.with_file_name("../guest");
    vpmu.args(["run", "--vmm"]).arg(&example);
    on_a_clock(&mut vpmu);
    let output = vpmu
        .args(["--vmm-arg", "{kernel}", "--kernel"])
        .arg(payload.join("x86_64/payload.elf"))
        .output()
        .unwrap();
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains(" 0 failed"), "{text}");
    // The VMM's own last word, from its standard error.
    assert!(text.contains(" PMIs"), "{text}");
}

/// A command's guest, which needs each placeholder, and the figures that a KVM host knows of any VMM.
#[test]
fn a_command_runs_on_a_vmm_that_the_lab_does_not_know() {
    let _turn = turn(1);
    let Some(vmm) = beside("vpmu-vmm") else {
        return;
    };
    let words = [
        "--kernel={vmlinux}",
        "--initrd={initrd}",
        "--append={cmdline}",
        "--memory={memory}M",
        "--vcpus={vcpus}",
    ];
    let record = "perf record --no-bpf-event -q -e cycles -c 5000000 -o perf.data -- workload";
    let Some(Compared { run, .. }) = run(&vmm, &words, &["--pmu", "vmm"], record) else {
        return;
    };
    assert_eq!(run["pmu"], "vmm");
    assert_eq!(run["status"], 0, "{run}");
    let samples = run["samples"].as_u64().unwrap();
    assert!(samples > 10 && run["pmis"] == samples, "{run}");
    // Each sample takes some writes of MSRs, which leave KVM, and KVM counts those.
    let exits = run["exits"].as_object().unwrap();
    let all: u64 = exits.values().filter_map(serde_json::Value::as_u64).sum();
    assert!(all > 4 * samples, "{run}");
    assert!(
        run["host_operations"].is_null() && run["pmu_exits_per_pmi"].is_null(),
        "{run}"
    );
}

/// kvmtool, by itself and under `vpmu exec`. `VPMU_LKVM` names its program: no Debian package has it.
#[test]
#[ignore = "long: script/test --long"]
fn kvmtool_runs_a_command_and_has_a_pmu_under_exec() {
    let _turn = turn(1);
    let Some(lkvm) = std::env::var_os("VPMU_LKVM") else {
        eprintln!("skipped: VPMU_LKVM names no program (docs/embed/vmm.md names kvmtool's commit)");
        return;
    };
    let words = [
        "run",
        "--kernel",
        "{kernel}",
        "--initrd",
        "{initrd}",
        "--params",
        "{cmdline}",
        "--console",
        "serial",
        "--cpus",
        "{vcpus}",
        "--mem",
        "{memory}",
        "--network",
        "mode=none",
    ];
    let record = "perf record --no-bpf-event -q -e cycles -c 5000000 -o perf.data -- workload";
    let samples = |pmu| {
        let found = run(Path::new(&lkvm), &words, &["--pmu", pmu], record)?;
        assert_eq!(found.run["status"], 0, "{}", found.run);
        assert!(found.run["exits"].is_object(), "{}", found.run);
        Some((found.run["samples"].clone(), found.run["pmis"].clone()))
    };
    let Some((_, pmis)) = samples("vmm") else {
        return;
    };
    assert!(
        pmis.is_null(),
        "kvmtool has no PMU, and a software event sends no PMI: {pmis}"
    );
    let (samples, pmis) = samples("exec").unwrap();
    assert!(
        samples.as_u64() > Some(10) && samples == pmis,
        "{samples} {pmis}"
    );
}

/// Firecracker with `packaging/firecracker/pmu.rs`. `VPMU_FIRECRACKER` names its program: no Debian package has it.
#[test]
#[ignore = "long: script/test --long"]
fn firecracker_gives_its_guests_a_pmu() {
    const MACHINE: &str = r#"{"boot-source": {"kernel_image_path": "{vmlinux}", "initrd_path": "{initrd}",
        "boot_args": "{cmdline} reboot=k"}, "drives": [],
        "machine-config": {"vcpu_count": {vcpus}, "mem_size_mib": {memory}, "pmu": true}}"#;
    let _turn = turn(1);
    let Some(firecracker) = std::env::var_os("VPMU_FIRECRACKER") else {
        eprintln!(
            "skipped: VPMU_FIRECRACKER names no program (docs/embed/vmm.md: Firecracker with a PMU)"
        );
        return;
    };
    let room = tempfile::tempdir().unwrap();
    let machine = room.path().join("vm.json");
    std::fs::write(&machine, MACHINE).unwrap();
    let words = [
        "--no-api",
        "--level",
        "Error",
        "--config-file",
        "{dir}/vm.json",
    ];
    let file = ["--pmu", "vmm", "--vmm-file", machine.to_str().unwrap()];
    let record = "perf record --no-bpf-event -q -e cycles -c 5000000 -o perf.data -- workload";
    let Some(Compared { run, .. }) = run(Path::new(&firecracker), &words, &file, record) else {
        return;
    };
    assert_eq!(run["status"], 0, "{run}");
    let samples = run["samples"].as_u64();
    assert!(samples > Some(10) && run["pmis"] == run["samples"], "{run}");
}
