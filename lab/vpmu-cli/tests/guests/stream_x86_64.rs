//! The patched QEMU's migration stream, as anybody may have written it: refused with the reason, and nothing worse.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::exec_x86_64::patched_qemu;

/// The subsection's name in the stream. Behind it are its version and the state's length, of 32 bits each, and the state.
const NAME: &[u8] = b"cpu/vpmu";

/// A QEMU without firmware's help, and its QMP monitor.
struct Qemu {
    process: Child,
    commands: Option<ChildStdin>,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Qemu {
    fn start(program: &Path, vpmu: &str, more: &[&str]) -> Self {
        // A software KVM may have no such MSR for a guest, though it offers the feature.
        let cpu = format!("max,-arch-capabilities,vpmu={vpmu}");
        let mut process = Command::new(program)
            .args(["-accel", "kvm", "-M", "pc", "-m", "16", "-S", "-nodefaults"])
            .args(["-display", "none", "-qmp", "stdio", "-cpu", &cpu])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut it = Self {
            commands: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()).lines(),
            process,
        };
        it.answers.next();
        it.ask("qmp_capabilities", "{}");
        it
    }

    /// Returns the answer to a command, or nothing from a QEMU that has ended.
    fn ask(&mut self, command: &str, arguments: &str) -> String {
        let line = format!("{{\"execute\":\"{command}\",\"arguments\":{arguments}}}\n");
        // A QEMU that has ended takes no command, and gives no answer.
        let _ = self.commands.as_mut().unwrap().write_all(line.as_bytes());
        let mut answers = self.answers.by_ref().map_while(Result::ok);
        answers
            .find(|line| line.contains("\"return\"") || line.contains("\"error\""))
            .unwrap_or_default()
    }

    /// Asks until the answer has none of `words` any more.
    fn wait_while(&mut self, command: &str, words: &[&str]) -> String {
        loop {
            let answer = self.ask(command, "{}");
            if !words.iter().any(|word| answer.contains(word)) {
                return answer;
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Returns the exit status, and the words on standard error.
    fn end(mut self) -> (Option<i32>, String) {
        self.ask("quit", "{}");
        drop(self.commands.take());
        let output = self.process.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), said)
    }
}

/// Returns the stream of a guest with Intel's PMU.
fn stream(program: &Path, file: &Path) -> Option<Vec<u8>> {
    let mut qemu = Qemu::start(program, "intel", &[]);
    let target = format!("{{\"uri\":\"exec:cat>{}\"}}", file.display());
    qemu.ask("migrate", &target);
    let answer = qemu.wait_while("query-migrate", &["\"setup\"", "\"active\"", "\"device\""]);
    let (status, said) = qemu.end();
    if !answer.contains("\"completed\"") {
        assert_eq!(status, Some(1), "{answer} {said}");
        eprintln!("skipped: {said}");
        return None;
    }
    fs::read(file).ok()
}

#[test]
#[ignore = "needs the patched QEMU: script/test --long"]
fn a_stream_of_anybody_s_is_refused_with_the_reason() {
    let Some(program): Option<PathBuf> = patched_qemu() else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("stream");
    let Some(whole) = stream(&program, &file) else {
        return;
    };
    let name = whole.windows(NAME.len()).position(|found| found == NAME);
    let version = name.expect("the PMU's subsection") + NAME.len();
    let (length, state) = (version + 4, version + 8);
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let load = |stream: &[u8], vpmu: &str| {
        fs::write(&file, stream).unwrap();
        let source = format!("exec:cat {}", file.display());
        let mut qemu = Qemu::start(&program, vpmu, &["-incoming", &source]);
        qemu.wait_while("query-status", &["inmigrate"]);
        qemu.end()
    };
    let (status, said) = load(&whole, "intel");
    assert_eq!(status, Some(0), "{said}");
    let damaged = "no saved PMU of this version";
    // Another processor than AMD's has one model, and the stream is not read.
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap();
    let other = match processors.contains("AuthenticAMD") {
        true => "other vendor",
        false => "not AMD's",
    };
    for (what, stream, vpmu, says) in [
        (
            "a length beyond any memory",
            with(length, &[0xff; 4]),
            "intel",
            damaged,
        ),
        (
            "a length of nothing",
            with(length, &[0; 4]),
            "intel",
            damaged,
        ),
        (
            "a longer state",
            with(length + 2, &[0x0f]),
            "intel",
            damaged,
        ),
        ("another first byte", with(state, &[0xee]), "intel", damaged),
        ("only ones", with(state, &[0xff; 64]), "intel", damaged),
        (
            "a later version",
            with(version, &[0, 0, 0, 9]),
            "intel",
            "too new",
        ),
        (
            "a cut state",
            whole[..state + 16].to_vec(),
            "intel",
            "cpu/vpmu",
        ),
        ("no PMU here", whole.clone(), "off", "give -cpu vpmu="),
        ("another model", whole.clone(), "amd", other),
    ] {
        let (status, said) = load(&stream, vpmu);
        assert_eq!(status, Some(1), "{what}: {said}");
        assert!(said.contains(says), "{what}: {said}");
    }
}
