//! Runs QEMU, or a VMM: never longer than asked, never orphaned, and never stuck without notice.
//!
//! QEMU gets its own process group, so a terminal's Ctrl-C reaches only vpmu,
//! which then ends QEMU. When vpmu is killed, the kernel ends QEMU
//! ([`crate::host::tool::Tool::command`]). One thread reads the console and may
//! block on the user's standard output as long as it likes; the other watches
//! the clock.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::activity::Activity;
use super::clock::Clock;
use crate::host::cancel::Cancel;
use crate::host::parallel::lock;
use crate::run::console::{Piece, Splitter, Transcript};
use crate::{Error, Failure, Result};

const POLL: Duration = Duration::from_millis(20);
/// The interval between reads of QEMU's processor time.
const INTERVAL: Duration = Duration::from_millis(100);
/// The time that QEMU may take to end after the console was closed.
const LAST_WORDS: Duration = Duration::from_secs(60);

/// Limits by the wall clock. Time in which QEMU waits for a busy processor does not count.
#[derive(Debug)]
pub(crate) struct Limits {
    /// Until the end.
    pub(crate) total: Duration,
    /// Until the command begins; `None` when no command is expected.
    pub(crate) boot: Option<Duration>,
    /// Limit for a machine that uses no processor time and does not wait for the reader. `None`
    /// when idling is normal: in real time an idle guest uses no processor time.
    pub(crate) quiet: Option<Duration>,
    /// The clock of a machine whose guest may spin for ever.
    pub(crate) clock: Option<Clock>,
}

/// The destinations of console bytes.
pub(crate) struct Streams {
    /// The command's output, or everything when `raw`.
    pub(crate) output: Box<dyn Write + Send>,
    /// Takes a copy of the whole console.
    pub(crate) log: Option<File>,
    /// Whether the whole console is passed on, not only the command's output.
    pub(crate) raw: bool,
}

/// The part of a run that is under way, for the display of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Until the command begins.
    Boot,
    /// While the command runs.
    Command,
    /// After the command.
    Report,
}

impl Stage {
    fn of(transcript: &Transcript) -> Self {
        match (transcript.begun, transcript.ended) {
            (false, _) => Self::Boot,
            (true, false) => Self::Command,
            (true, true) => Self::Report,
        }
    }
}

/// Runs `command` to its end and returns the transcript of its console. Messages
/// call the command `program`. QEMU is gone whatever happens.
pub(crate) fn run(
    mut command: Command,
    program: &str,
    streams: Streams,
    limits: Limits,
    cancel: &Cancel,
    stage: &mut dyn FnMut(Stage),
) -> Result<Transcript> {
    let mut errors = tempfile::tempfile().map_err(Error::file("write in", std::env::temp_dir()))?;
    let duplicate = errors.try_clone();
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(duplicate.map_err(Error::file("open", "a temporary file"))?)
        .process_group(0);
    let child = command.spawn().map_err(Error::file("run", program))?;
    let mut qemu = Qemu(child);
    let stdout = qemu.0.stdout.take().expect("standard output is piped");
    let shared = Arc::new(Shared::default());
    let reader = {
        let shared = Arc::clone(&shared);
        thread::spawn(move || read_console(stdout, streams, &shared))
    };

    let mut watch = Watch::new(&qemu.0, &shared, limits);
    let mut last_stage = Stage::Boot;
    stage(last_stage);
    while !reader.is_finished() {
        thread::sleep(POLL);
        cancel.check()?;
        let now = Stage::of(&lock(&shared.transcript));
        if now != last_stage {
            last_stage = now;
            stage(now);
        }
        if let Some(failure) = watch.passed(now) {
            let transcript = lock(&shared.transcript);
            return Err(transcript.failed(ended_badly(&transcript).unwrap_or(failure)));
        }
    }
    reader.join().unwrap_or(Ok(()))?;
    let status = qemu.wait(program, LAST_WORDS)?;
    // The reader is gone, so the transcript is whole and nobody else's.
    let transcript = std::mem::take(&mut *lock(&shared.transcript));
    if !status.success() {
        let mut message = String::new();
        // QEMU's message could not be read, so its status has to do.
        let _ = errors
            .rewind()
            .and_then(|()| errors.read_to_string(&mut message));
        return Err(transcript.failed(Failure::Ended {
            program: program.to_owned(),
            status: status.to_string(),
            message,
        }));
    }
    Ok(transcript)
}

/// A run's limits, and how far the run is from them.
struct Watch<'a> {
    limits: Limits,
    start: Instant,
    read: Instant,
    activity: Activity,
    shared: &'a Shared,
}

impl<'a> Watch<'a> {
    fn new(child: &Child, shared: &'a Shared, limits: Limits) -> Self {
        let start = Instant::now();
        Self {
            limits,
            start,
            read: start,
            activity: Activity::new(child),
            shared,
        }
    }

    /// Returns the limit that is passed at `stage`.
    fn passed(&mut self, stage: Stage) -> Option<Failure> {
        let elapsed = self.start.elapsed();
        let passed = |limit| elapsed > limit && elapsed - self.activity.waited() > limit;
        let limit = self.limits.total;
        if passed(limit) {
            return Some(Failure::Timeout(limit));
        }
        let boot = self.limits.boot.filter(|_| stage == Stage::Boot);
        if let Some(limit) = boot.filter(|&limit| passed(limit)) {
            return Some(Failure::Boot(limit));
        }
        // A machine that has a clock to watch may not be quiet either: both count instructions.
        let quiet = self.limits.quiet?;
        if self.read.elapsed() <= INTERVAL {
            return None;
        }
        self.read = Instant::now();
        self.activity.read();
        if let Some(clock) = &mut self.limits.clock
            && clock.stands_still(self.activity.used())
        {
            return Some(Failure::Stuck);
        }
        // A machine may wait while the user's terminal or pager does not take its output.
        if self.shared.writing.load(Ordering::Relaxed) {
            self.activity.reset();
        }
        (self.activity.quiet_for() > quiet).then_some(Failure::Hang(quiet))
    }
}

/// Returns the guest's own report of a bad end.
pub(crate) fn ended_badly(transcript: &Transcript) -> Option<Failure> {
    let monitor = transcript.monitor.clone().map(Failure::Monitor);
    monitor.or_else(|| transcript.panic.clone().map(Failure::Panic))
}

#[derive(Default)]
struct Shared {
    transcript: Mutex<Transcript>,
    /// Whether the reader waits for the user's terminal or pager.
    writing: AtomicBool,
}

fn read_console(mut from: impl Read, mut streams: Streams, shared: &Shared) -> Result<()> {
    let mut splitter = Splitter::default();
    let mut buffer = [0; 16 << 10];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::file("read", "the console")(error)),
        };
        let chunk = &buffer[..count];
        if let Some(log) = &mut streams.log {
            log.write_all(chunk)
                .map_err(Error::file("write", "the console log"))?;
        }
        for piece in splitter.feed(chunk) {
            let output = lock(&shared.transcript).note(&piece).to_vec();
            let bytes = match &piece {
                Piece::Bytes(bytes) if streams.raw => bytes,
                _ => &output,
            };
            pass_on(bytes, &mut streams, shared)?;
        }
    }
    let rest = splitter.finish();
    if streams.raw {
        pass_on(&rest, &mut streams, shared)?;
    }
    Ok(())
}

fn pass_on(bytes: &[u8], streams: &mut Streams, shared: &Shared) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    shared.writing.store(true, Ordering::Relaxed);
    let written = streams
        .output
        .write_all(bytes)
        .and_then(|()| streams.output.flush());
    shared.writing.store(false, Ordering::Relaxed);
    written.map_err(Error::file("write", "the output"))
}

/// Kills QEMU and whatever it started when dropped.
struct Qemu(Child);

impl Qemu {
    fn wait(&mut self, program: &str, limit: Duration) -> Result<ExitStatus> {
        let start = Instant::now();
        loop {
            let status = self.0.try_wait();
            if let Some(status) = status.map_err(Error::file("wait for", "the machine"))? {
                return Ok(status);
            }
            if start.elapsed() > limit {
                let failure = Failure::Ended {
                    program: program.to_owned(),
                    status: "console closed".to_owned(),
                    message: String::new(),
                };
                return Err(failure.with(Vec::new()));
            }
            thread::sleep(POLL);
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Some(group) = Pid::from_raw(self.0.id().cast_signed()) {
            // Fails only when all of the group are gone.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const LIMITS: Limits = Limits {
        total: Duration::from_secs(20),
        boot: None,
        quiet: None,
        clock: None,
    };

    fn shell(script: &str, limits: Limits) -> Result<Transcript> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let streams = Streams {
            output: Box::new(std::io::sink()),
            log: None,
            raw: false,
        };
        run(
            command,
            "the program",
            streams,
            limits,
            &Cancel::default(),
            &mut |_| (),
        )
    }

    #[test]
    fn a_good_end() {
        let transcript = shell("printf '\\036{\"vpmu\":\"command\"}\\n'", LIMITS).unwrap();
        assert!(transcript.begun);
    }

    /// Runs `script` into a total limit.
    fn until(script: &str, done: impl Fn(&Error) -> bool) -> Error {
        let total = |total| Limits { total, ..LIMITS };
        let error = until_limit(script, total, done);
        assert!(
            matches!(error.failure(), Some(Failure::Timeout(_))),
            "{error}"
        );
        error
    }

    /// Runs `script` into a limit. On a machine so busy that the script has not done its part within the limit, repeats
    /// with longer limits. Returns the first error that `done` accepts.
    fn until_limit(
        script: &str,
        limits: impl Fn(Duration) -> Limits,
        done: impl Fn(&Error) -> bool,
    ) -> Error {
        for seconds in [0.2, 2.0, 20.0, 200.0] {
            let error = shell(script, limits(Duration::from_secs_f64(seconds))).unwrap_err();
            if done(&error) {
                return error;
            }
        }
        panic!("{script:?} has done nothing in 200 seconds");
    }

    #[test]
    fn total_limit() {
        until("echo last words; sleep 1000", |error| {
            error.to_string().contains("| last words")
        });
    }

    #[test]
    fn boot_limit_and_panic() {
        let limits = Limits {
            boot: Some(Duration::from_millis(300)),
            ..LIMITS
        };
        let error = shell("sleep 100", limits).unwrap_err();
        assert!(matches!(error.failure(), Some(Failure::Boot(_))), "{error}");
        let boot = |boot| Limits {
            total: Duration::from_secs(1000),
            boot: Some(boot),
            ..LIMITS
        };
        until_limit(
            "echo Kernel panic - not syncing: x; sleep 1000",
            boot,
            |error| matches!(error.failure(), Some(Failure::Panic(_))),
        );
    }

    #[test]
    fn a_stopped_machine() {
        let limits = Limits {
            quiet: Some(Duration::from_millis(300)),
            ..LIMITS
        };
        let error = shell("exec sleep 100", limits).unwrap_err();
        assert!(matches!(error.failure(), Some(Failure::Hang(_))), "{error}");
    }

    #[test]
    fn a_bad_end() {
        let error = shell("echo console; echo why >&2; exit 3", LIMITS).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("exit status: 3") && text.contains("why"),
            "{text}"
        );
        assert!(text.contains("| console"), "{text}");
    }

    #[test]
    fn the_whole_group_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pid");
        let script = format!("sleep 1000 & echo $! > {}; wait", path.display());
        let pid = || fs::read_to_string(&path).unwrap_or_default();
        until(&script, |_| pid().ends_with('\n'));
        let pid = pid();
        let gone = |pid: &str| {
            fs::read_to_string(format!("/proc/{pid}/stat"))
                .map_or(true, |stat| stat.contains(") Z"))
        };
        for _ in 0..1000 {
            if gone(pid.trim()) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("a child of the child is still there");
    }
}
