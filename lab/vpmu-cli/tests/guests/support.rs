//! Helpers for the tests of real guests: the command, whether it can run guests, and the turns of tests.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::str::FromStr;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use serde_json::Value;
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::host::progress::Progress;
use vpmu_lab::image::cache::Session;
use vpmu_lab::image::images::Images;
use vpmu_lab::image::module::{Kernel, Modules};
use vpmu_lab::spec::arch::Arch;

/// Says that a test did not run, and why. Panics where `VPMU_TEST_ALL` is set: `script/test` sets it after the set-up,
/// when nothing may be missing.
pub(crate) fn skipped(reason: &str) {
    assert!(
        std::env::var_os("VPMU_TEST_ALL").is_none(),
        "VPMU_TEST_ALL is set, and this test cannot run: {reason}"
    );
    eprintln!("skipped: {reason}");
}

/// Returns vpmu, unless something that it needs for guests of this architecture is missing here.
pub(crate) fn vpmu(arch: &str) -> Option<Command> {
    let vpmu = || Command::new(env!("CARGO_BIN_EXE_vpmu"));
    let doctor = vpmu().args(["doctor", "--arch", arch]).output().unwrap();
    if !doctor.status.success() {
        let report = String::from_utf8_lossy(&doctor.stdout);
        let missing = report.lines().filter(|line| line.starts_with("missing"));
        skipped(&missing.collect::<Vec<_>>().join("; "));
        return None;
    }
    Some(vpmu())
}

/// Why a test that restores a guest needs the lab's KVM host.
pub(crate) const RESTORING: &str = ": the lab restores in its KVM host only";

/// Returns vpmu for an x86-64 guest in the lab's KVM host, unless this machine's own KVM runs the guests; `because` says
/// why the test cannot use that.
pub(crate) fn nested_vpmu(because: &str) -> Option<Command> {
    if Arch::X86_64.has_hardware_kvm() {
        eprintln!("skipped: this machine's own KVM runs the guests{because}");
        return None;
    }
    vpmu("x86_64")
}

/// Returns what this makes in the user's cache.
pub(crate) fn prepared<T>(prepare: impl FnOnce(&Session<'_>) -> vpmu_lab::Result<T>) -> T {
    let cancel = Cancel::default();
    let session = Session::new(&cancel, Progress::terminal()).unwrap();
    prepare(&session).unwrap()
}

/// Returns the guest's modules for `kernel`, and that kernel, unless this machine cannot build them.
pub(crate) fn modules(kernel: Kernel) -> Option<Modules> {
    if let Err(error) = Modules::check() {
        skipped(&error.to_string());
        return None;
    }
    Some(prepared(|session| Modules::prepare(kernel, session)))
}

/// Returns the images of the lab's guests.
pub(crate) fn images(arch: Arch) -> Images {
    prepared(|session| Images::prepare(arch, session))
}

/// Returns all of a program's output.
pub(crate) fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The beginning of a script whose perf needs no kernel symbols. Otherwise perf reads them whenever it records or
/// reports, for a second of the guest's time, and once more at the end of a recording, where a sample hit the kernel: times
/// of two runs are not to be compared then. It counts and samples alike without them.
pub(crate) const NO_SYMBOLS: &str = "mount -o bind /dev/null /proc/kallsyms; ";

/// A processor without a PMU, so that a clock counts whatever QEMU can emulate: most tests are of that.
pub(crate) const ON_A_CLOCK: [&str; 2] = ["--cpu", "max"];

/// Adds [`ON_A_CLOCK`] for an x86-64 guest, unless the test names a processor or what counts.
pub(crate) fn on_a_clock(vpmu: &mut Command) {
    let is_named = |word: &std::ffi::OsStr| word == "--cpu" || word == "--backing";
    if !Arch::X86_64.has_hardware_kvm() && !vpmu.get_args().any(is_named) {
        vpmu.args(ON_A_CLOCK);
    }
}

/// Compares with these options and returns the file that `--json` wrote.
pub(crate) fn compare(arch: &str, options: &[&str], command: &str, json: &Path) -> Option<String> {
    let mut vpmu = vpmu(arch)?;
    vpmu.args(["compare", "--arch", arch, "--json"])
        .arg(json)
        .args(options);
    if arch == Arch::X86_64.name() {
        on_a_clock(&mut vpmu);
    }
    let output = vpmu.args(["--", command]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    Some(fs::read_to_string(json).unwrap())
}

/// What `compare` has found of one design's guest.
pub(crate) struct Compared {
    /// All of the guest's output.
    pub(crate) console: String,
    /// The guest's figures.
    pub(crate) run: Value,
    /// The records of each program.
    pub(crate) records: Vec<Value>,
}

/// Runs `script` in an x86-64 guest of one design. `compare` runs it, because it tries again where QEMU has ended the
/// guest.
pub(crate) fn compared(
    vpmu: &mut Command,
    options: impl FnOnce(&mut Command),
    script: &str,
) -> Compared {
    let folder = tempfile::tempdir().unwrap();
    let (json, kept) = (
        folder.path().join("results.json"),
        folder.path().join("kept"),
    );
    vpmu.args(["compare", "--arch", "x86_64", "--json"])
        .arg(&json)
        .arg("--keep")
        .arg(&kept);
    options(vpmu);
    on_a_clock(vpmu);
    let output = vpmu.args(["--", script]).output().unwrap();
    let design = fs::read_dir(&kept)
        .ok()
        .and_then(|mut designs| designs.next()?.ok())
        .map(|design| design.path());
    let read = |name| design.as_ref().and_then(|it| fs::read(it.join(name)).ok());
    let console = read("console.log").unwrap_or_default();
    let console = String::from_utf8_lossy(&console).into_owned();
    println!("{console}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success());
    let results: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
    let run = results["runs"][0].clone();
    assert_eq!(run["status"], 0);
    Compared {
        console,
        run,
        records: serde_json::from_slice(&read("records.json").unwrap()).unwrap(),
    }
}

/// Returns the rest of the first line that begins with `word`.
pub(crate) fn said<'a>(console: &'a str, word: &str) -> &'a str {
    let mut lines = console.lines();
    let rest = lines.find_map(|line| line.strip_prefix(word)?.strip_prefix(' '));
    rest.unwrap_or_else(|| panic!("no {word}: {console}"))
        .trim()
}

/// Returns the number behind `word`, at the beginning of the first line that has nothing else.
pub(crate) fn number<N: FromStr>(console: &str, word: &str) -> N {
    let mut lines = console.lines();
    let number = lines.find_map(|line| {
        let rest = line.strip_prefix(word)?.strip_prefix(' ')?;
        rest.trim().parse().ok()
    });
    number.unwrap_or_else(|| panic!("no {word}: {console}"))
}

/// The processors that guests have at the moment, and since when.
pub(crate) struct Turn(usize, Instant);

struct Turns {
    /// Number of tests that have asked.
    asked: u64,
    /// Number of tests that have had their turn. The others wait in the order in which they asked.
    served: u64,
    /// Processors without a guest; `None` before the first turn.
    free: Option<usize>,
}

static TURNS: Mutex<Turns> = Mutex::new(Turns {
    asked: 0,
    served: 0,
    free: None,
});
static CHANGED: Condvar = Condvar::new();

/// Waits until this machine has a processor for each of `guests` that run at once, or for as many as it has processors.
/// Each guest also takes a gigabyte, so more guests at once might not fit.
pub(crate) fn turn(guests: usize) -> Turn {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let guests = guests.min(processors);
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    let mine = turns.asked;
    turns.asked += 1;
    loop {
        let free = *turns.free.get_or_insert(processors);
        if turns.served == mine && free >= guests {
            turns.served += 1;
            turns.free = Some(free - guests);
            CHANGED.notify_all();
            return Turn(guests, Instant::now());
        }
        turns = CHANGED.wait(turns).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (thread, seconds) = (thread::current(), self.1.elapsed().as_secs());
        let test = thread.name().unwrap_or_default();
        eprintln!("{test} had {} processors for {seconds} s", self.0);
        let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
        turns.free = turns.free.map(|free| free + self.0);
        CHANGED.notify_all();
    }
}
