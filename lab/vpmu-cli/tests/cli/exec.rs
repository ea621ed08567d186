//! `vpmu exec`: the programs that it refuses, and what it leaves of itself in those that it runs.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::{assert_refused, vpmu};

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// Writes a program of this name, and returns its path.
fn program(folder: &Path, name: &str, contents: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, contents).unwrap();
    fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn programs_that_are_not_reached_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let own = fs::read("/proc/self/exe").unwrap();
    let refused = |path: &str, words: &str| assert_refused(&["exec", "--", path], 125, words);
    refused("/bin/sh", "--any");
    refused("/no/such", "is no program here");
    let closed = program(folder.path(), "qemu-system-closed", &own);
    fs::set_permissions(&closed, PermissionsExt::from_mode(0o644)).unwrap();
    refused(&closed, "chmod +x");
    let script = program(folder.path(), "qemu-system-x86_64", b"#!/bin/sh\n");
    refused(&script, "is a script");
    // The program's interpreter is named elsewhere.
    let name = b"ld-linux-x86-64.so.2";
    let at = own.windows(name.len()).position(|found| found == name);
    let mut other = own.clone();
    other[at.unwrap()] = b'm';
    let other = program(folder.path(), "qemu-system-other", &other);
    refused(&other, "for x86-64's GNU C library");
    let setuid = program(folder.path(), "lkvm", &own);
    fs::set_permissions(&setuid, PermissionsExt::from_mode(0o4755)).unwrap();
    refused(&setuid, "more rights");
    let qemu = program(folder.path(), "qemu-system-own", &own);
    for option in ["-incoming", "-loadvm"] {
        assert_refused(&["exec", "--", &qemu, option, "x"], 125, option);
    }
    let amd = ["exec", "--pmu", "amd", "--perfmon", "5", "--", &qemu];
    assert_refused(&amd, 2, "--pmu intel");
}

#[test]
fn children_of_the_program_have_nothing_of_it() {
    let home = tempfile::tempdir().unwrap();
    let shell = home.path().join("qemu-system-shell");
    symlink(fs::canonicalize("/bin/sh").unwrap(), &shell).unwrap();
    let script = "env | grep -c -e VPMU_EXEC -e preload; echo \"$LD_PRELOAD\"";
    let mut command: Command = vpmu(home.path());
    command
        .args(["exec", "--"])
        .arg(&shell)
        .args(["-c", script]);
    let output = command.env("LD_PRELOAD", "").output().unwrap();
    let said = text(&output);
    // Where the machine has no /dev/kvm, perf is forbidden or the library was not built, the program does not run, and the error says what to do.
    if output.status.code() == Some(125) {
        let ways = ["/dev/kvm", "perf", "build both"];
        assert!(ways.iter().any(|way| said.contains(way)), "{said}");
        eprintln!("skipped: {said}");
        return;
    }
    assert!(said.contains("0\n\n"), "{said}");
}

/// Whatever its words are: a program that ends, and one that becomes another.
#[test]
fn a_program_that_makes_no_vm_says_so() {
    let home = tempfile::tempdir().unwrap();
    for (program, words) in [("true", &["-name", "kvm1"][..]), ("env", &["true"])] {
        let qemu = home.path().join(format!("qemu-system-{program}"));
        symlink(Path::new("/usr/bin").join(program), &qemu).unwrap();
        let mut command: Command = vpmu(home.path());
        command.args(["exec", "--"]).arg(&qemu).args(words);
        let output = command.output().unwrap();
        let said = text(&output);
        if output.status.code() == Some(125) {
            eprintln!("skipped: {said}");
            return;
        }
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("made no virtual machine").count(), 1, "{said}");
    }
}

/// libvirt starts an emulator so to learn its abilities, without any capability.
#[test]
fn a_qemu_without_a_guest_is_started_as_it_is() {
    let home = tempfile::tempdir().unwrap();
    let shell = home.path().join("qemu-system-shell");
    symlink(fs::canonicalize("/bin/sh").unwrap(), &shell).unwrap();
    let mut command: Command = vpmu(home.path());
    command.args(["exec", "--"]).arg(&shell);
    command.args(["-c", "echo \"[$LD_PRELOAD$VPMU_EXEC]\"", "-S"]);
    command.args(["-machine", "none,accel=kvm:tcg"]);
    let output = command.env("LD_PRELOAD", "").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output), "[]\n");
}

/// QEMU asks its own list of reasons, so that its monitor names this one.
#[test]
fn qemu_neither_migrates_nor_saves_its_guest() {
    const COMMANDS: &[u8] = b"migrate \"exec:cat>/dev/null\"\nsavevm x\nquit\n";
    let home = tempfile::tempdir().unwrap();
    let mut command = vpmu(home.path());
    command.args(["exec", "--", "qemu-system-x86_64", "-accel", "kvm", "-S"]);
    command.args(["-M", "pc", "-m", "64", "-nodefaults", "-display", "none"]);
    command.args(["-monitor", "stdio"]).stdin(Stdio::piped());
    let mut qemu = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A QEMU that has ended takes no commands, and says why.
    let _ = qemu.stdin.take().unwrap().write_all(COMMANDS);
    let output = qemu.wait_with_output().unwrap();
    let said = text(&output);
    if !output.status.success() {
        eprintln!("skipped: {said}");
        return;
    }
    assert_eq!(said.matches("would be lost").count(), 2, "{said}");
}
