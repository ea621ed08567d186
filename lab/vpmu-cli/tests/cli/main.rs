//! Tests of the command line itself: which arguments vpmu refuses, and with which message. Nothing
//! here boots anything or needs the network.

mod exec;
mod rewrite_kernel;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

fn vpmu(home: &Path) -> Command {
    for (arch, files) in [
        (
            "aarch64",
            &["meter", "workload", "kvm-host", "monitor.bin"][..],
        ),
        ("x86_64", &["meter", "workload", "kvm-host"]),
    ] {
        let guest = home.join("guest").join(arch);
        std::fs::create_dir_all(&guest).unwrap();
        for file in files {
            std::fs::write(guest.join(file), "").unwrap();
        }
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_vpmu"));
    command
        .env_remove("VPMU_QEMU")
        .env("XDG_CACHE_HOME", home.join("cache"))
        .env("VPMU_GUEST_DIR", home.join("guest"));
    command
}

/// Runs vpmu with `arguments` and returns its exit status and standard error.
fn refuse(arguments: &[&str]) -> (i32, String) {
    let home = tempfile::tempdir().unwrap();
    let output = vpmu(home.path()).args(arguments).output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), errors)
}

#[track_caller]
fn assert_refused(arguments: &[&str], status: i32, words: &str) {
    let (found, errors) = refuse(arguments);
    assert_eq!(found, status, "{arguments:?}: {errors}");
    assert!(errors.contains(words), "{arguments:?}: {errors}");
}

/// A VMM of the user's needs neither --arch nor --pmu, and is looked at before anything is downloaded.
#[test]
fn a_vmm_that_cannot_run_is_refused() {
    let this = std::env::current_exe().unwrap();
    let this = this.to_str().unwrap();
    let run = |more: &[&str]| refuse(&[&["run"], more, &["--", "true"]].concat());
    let named = |more: &[&str], status, words: &str| {
        let (found, errors) = run(more);
        assert!(
            found == status && errors.contains(words),
            "{more:?}: {found} {errors}"
        );
    };
    named(&["--vmm", "/no/such"], 125, "/no/such");
    named(&["--vmm", "/etc/passwd"], 2, "{kernel}");
    let placeholders = [
        "--vmm-arg={kernel}",
        "--vmm-arg={initrd}",
        "--vmm-arg={cmdline}",
    ];
    named(
        &[&["--vmm", "/etc/passwd"], &placeholders[..]].concat(),
        125,
        "not executable",
    );
    named(&["--vmm", this, "--vmm-arg={kernel}"], 2, "{initrd}");
    named(
        &["--vmm", this, "--arch", "aarch64", "--pmu", "native"],
        2,
        "--vmm is about --arch x86_64",
    );
    named(&["--vmm", this, "--pmu", "kvm"], 2, "--pmu vmm and exec");
    named(&["--vmm", this, "--disk", "uefi"], 2, "--disk");
    named(&["--arch", "x86_64", "--pmu", "vmm"], 2, "give --vmm FILE");
    named(
        &["--arch", "x86_64", "--vmm-file", this],
        2,
        "--vmm-file is about --vmm",
    );
}

#[test]
fn help_has_examples_and_exit_statuses() {
    let home = tempfile::tempdir().unwrap();
    for arguments in [&["--help"][..], &["run", "--help"], &["compare", "--help"]] {
        let output = vpmu(home.path()).args(arguments).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success());
        assert!(
            text.contains("Examples:") && text.contains("Exit status:"),
            "{text}"
        );
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("new/pages");
    let write = || {
        vpmu(home.path())
            .arg("manual")
            .arg(&folder)
            .output()
            .unwrap()
    };
    assert!(write().status.success());
    for name in [
        "vpmu.1",
        "vpmu-compare.1",
        "vpmu.bash",
        "_vpmu",
        "vpmu.fish",
    ] {
        assert!(folder.join(name).exists(), "{name}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    let refused = write();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("new/pages"));
    assert_eq!(refused.status.code(), Some(125));
}

#[test]
fn wrong_words() {
    assert_refused(&[], 2, "Usage:");
    assert_refused(&["frobnicate"], 2, "frobnicate");
    assert_refused(&["run", "--no-such-flag"], 2, "--no-such-flag");
    assert_refused(
        &["run", "--pmu", "paravirt", "--", "true"],
        2,
        "partitioned",
    );
    assert_refused(
        &["run", "--pmu", "native,kvm", "--", "true"],
        2,
        "possible values",
    );
    assert_refused(&["run", "--memory", "1T", "--", "true"], 2, "512M");
    assert_refused(&["run", "--timeout", "0", "--", "true"], 2, "at least 1");
    assert_refused(&["run", "--arch", "mips", "--", "true"], 2, "aarch64");
    assert_refused(
        &["run", "--policy", "never", "--", "true"],
        2,
        "recreate, reuse, paused",
    );
}

#[test]
fn combinations_that_make_no_sense() {
    assert_refused(&["run"], 2, "give a command after --");
    assert_refused(&["compare"], 2, "give a command after --");
    for pmu in ["partitioned", "untrapped"] {
        let arguments = ["run", "--arch", "x86_64", "--pmu", pmu, "--", "true"];
        assert_refused(&arguments, 2, "native, kvm, mediated, emulated");
    }
    for option in [["--policy", "reuse"], ["--vmm-arg", "--no-pmu"]] {
        let own = [&["run", "--pmu", "emulated"][..], &option, &["--", "true"]].concat();
        assert_refused(&own, 2, "--arch x86_64 --pmu emulated");
        let other = [
            &["compare", "--arch", "x86_64", "--pmu", "kvm"][..],
            &option,
            &["--", "true"],
        ]
        .concat();
        assert_refused(&other, 2, "--arch x86_64 --pmu emulated");
    }
    assert_refused(
        &[
            "run",
            "--arch",
            "x86_64",
            "--pmu",
            "emulated",
            "--vmm-arg",
            "a b",
            "--",
            "true",
        ],
        2,
        "one word",
    );
    assert_refused(
        &[
            "run",
            "--arch",
            "x86_64",
            "--host-counters",
            "2",
            "--",
            "true",
        ],
        2,
        "--pmu partitioned",
    );
    assert_refused(&["run", "--vcpus", "0", "--", "true"], 2, "--vcpus");
    assert_refused(&["run", "--memory", "16M", "--", "true"], 2, "--memory");
    assert_refused(
        &["run", "--host-counters", "2", "--", "true"],
        2,
        "--pmu partitioned",
    );
    assert_refused(
        &["run", "--initrd", "/dev/null", "--", "true"],
        2,
        "--initrd or a command",
    );
    assert_refused(
        &["run", "--kernel", "/dev/null", "--json", "x.json"],
        2,
        "--json",
    );
    assert_refused(
        &["run", "--kernel", "/dev/null", "--pmu", "kvm"],
        2,
        "kvm and mediated need a command",
    );
}

#[test]
fn benches_are_listed() {
    let home = tempfile::tempdir().unwrap();
    let output = vpmu(home.path()).arg("bench").output().unwrap();
    assert!(output.status.success());
    let list = String::from_utf8(output.stdout).unwrap();
    for name in [
        "partition",
        "reprogram",
        "paused",
        "sampling",
        "exits",
        "deadline",
    ] {
        assert!(list.contains(name), "{name} in {list}");
    }
    assert_refused(&["bench", "nothing"], 2, "vpmu bench");
}

#[test]
fn saved_results_become_a_page() {
    let home = tempfile::tempdir().unwrap();
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    let page = home.path().join("page.html");
    let output = vpmu(home.path())
        .arg("report")
        .arg(&results)
        .arg("--output")
        .arg(&page)
        .output()
        .unwrap();
    assert!(output.status.success());
    let html = std::fs::read_to_string(&page).unwrap();
    // A bench's story is found by its name.
    assert!(html.contains("Arm: counters that are the guest&#39;s own"));
    assert_refused(&["report", "/no/such/folder"], 125, "/no/such/folder");
}

#[test]
fn files_that_are_not_there() {
    for arguments in [
        ["run", "--kernel", "/no/such/file", "--", "true"],
        ["run", "--add", "/no/such/file", "--", "true"],
        ["run", "--json", "/no/such/file", "--", "true"],
        ["compare", "--json", "/no/such/file", "--", "true"],
        ["compare", "--html", "/no/such/file", "--", "true"],
    ] {
        assert_refused(&arguments, 125, "/no/such");
    }
}

#[test]
fn guest_programs_that_were_not_built() {
    let home = tempfile::tempdir().unwrap();
    for (pmu, file) in [("native", "meter"), ("partitioned", "monitor.bin")] {
        let mut command = vpmu(home.path());
        command.args(["run", "--pmu", pmu, "--", "true"]);
        std::fs::remove_file(home.path().join("guest/aarch64").join(file)).unwrap();
        let output = command.output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(125));
        assert!(
            errors.contains(file) && errors.contains("script/setup"),
            "{errors}"
        );
    }
}

#[test]
fn programs_that_are_not_installed() {
    let home = tempfile::tempdir().unwrap();
    let empty = home.path().join("bin");
    std::fs::create_dir(&empty).unwrap();
    let run = |arguments: &[&str]| {
        let output = vpmu(home.path())
            .env("PATH", &empty)
            .args(arguments)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let (status, errors) = run(&["run", "--", "true"]);
    assert_eq!(status, Some(125));
    assert!(
        errors.contains("apt-get install qemu-system-arm"),
        "{errors}"
    );
    let (status, report) = run(&["doctor"]);
    assert_eq!(status, Some(1));
    assert!(report.contains("missing  qemu-system-aarch64"), "{report}");
    let (status, errors) = run(&["run", "--arch", "x86_64", "--", "true"]);
    assert_eq!(status, Some(125));
    assert!(
        errors.contains("apt-get install qemu-system-x86"),
        "{errors}"
    );
    let (status, report) = run(&["doctor", "--arch", "x86_64"]);
    assert_eq!(status, Some(1));
    assert!(report.contains("missing  qemu-system-x86_64"), "{report}");
}

#[test]
fn a_model_of_processor_that_qemu_does_not_have() {
    let home = tempfile::tempdir().unwrap();
    let qemu = home.path().join("qemu-system-aarch64");
    let script = "#!/bin/sh\nprintf 'Available CPUs:\\n  cortex-a72\\n  max\\n'\n";
    std::fs::write(&qemu, script).unwrap();
    std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    let output = vpmu(home.path())
        .env("PATH", format!("{}:{path}", home.path().display()))
        .args(["run", "--cpu", "cortex-a73", "--", "true"])
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("--cpu cortex-a73"), "{errors}");
    assert!(errors.contains("qemu-system-aarch64 -cpu help"), "{errors}");
}

#[test]
fn a_command_without_its_dashes_is_told_of_them() {
    let home = tempfile::tempdir().unwrap();
    let output = vpmu(home.path()).args(["run", "uname", "-a"]).output();
    let output = output.unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("stands behind --"), "{errors}");
}

#[test]
fn another_qemu_than_the_one_on_the_path() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join("mended");
    let path = folder.to_str().unwrap();
    let report = |command: &mut Command| {
        let output = command.output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let missing = report(vpmu(home.path()).args(["run", "--qemu", path, "--", "true"]));
    assert!(
        missing.contains("mended/qemu-system-aarch64") && missing.contains("script/qemu"),
        "{missing}"
    );
    std::fs::create_dir(&folder).unwrap();
    let qemu = folder.join("qemu-system-aarch64");
    let script = "#!/bin/sh\necho 'QEMU emulator version 10.9 (vpmu patches 0123)'\n";
    std::fs::write(&qemu, script).unwrap();
    std::fs::set_permissions(&qemu, std::fs::Permissions::from_mode(0o755)).unwrap();
    let found = "version 10.9 (vpmu patches 0123)";
    let named = report(vpmu(home.path()).args(["doctor", "--qemu", path]));
    assert!(named.contains(found), "{named}");
    let set = report(vpmu(home.path()).env("VPMU_QEMU", path).arg("doctor"));
    assert!(set.contains(found), "{set}");
}

#[test]
fn a_cache_that_cannot_be_written() {
    let home = tempfile::tempdir().unwrap();
    let output = vpmu(home.path())
        .env("XDG_CACHE_HOME", "/proc/vpmu")
        .args(["run", "--", "true"])
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(125), "{errors}");
    // The message names the cache, or a program that is not installed.
    let named = ["/proc/vpmu", "qemu-system", "script/setup"];
    assert!(named.iter().any(|name| errors.contains(name)), "{errors}");
}

#[test]
fn no_network() {
    if !Path::new("/usr/bin/apt-get").exists() {
        eprintln!("skipped: apt-get is not installed");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let output = vpmu(home.path())
        .env("VPMU_DEBIAN_MIRROR", "http://127.0.0.1:9/debian")
        .args(["run", "--", "true"])
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(125), "{errors}");
    // Where QEMU is missing, vpmu says that first.
    assert!(
        errors.contains("VPMU_DEBIAN_MIRROR") || errors.contains("qemu-system-arm"),
        "{errors}"
    );
}

/// nohup's command survives its terminal.
#[test]
fn a_hangup_that_was_ignored_stays_so() {
    let home = tempfile::tempdir().unwrap();
    let vpmu = vpmu(home.path());
    let mut shell = Command::new("sh");
    // SIGTERM is signal 15, and SIGHUP 1.
    let script = "trap '' HUP; \"$0\" metrics --listen 127.0.0.1:0 & \
        for _ in $(seq 100); do grep -q '^SigCgt:.*[4-7c-f]...$' /proc/$!/status && break; sleep 0.1; done; \
        grep '^SigCgt:.*[02468ace]$' /proc/$!/status; kill -TERM $!; wait $!";
    let output = shell.args(["-c", script]).arg(vpmu.get_program());
    let output = output.output().unwrap();
    let [said, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert_eq!(output.status.code(), Some(130), "{errors}");
    assert!(said.contains("SigCgt"), "SIGHUP is caught: {said}");
}
