//! The failures of the lab, each with advice about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The advice for a full disk.
pub(crate) const NO_SPACE: &str = "free some space (XDG_CACHE_HOME moves the cache)";
/// Describes a guest that never comes to its end.
pub(crate) const STUCK: &str =
    "the guest's kernel turned in a circle with its interrupts off, or waits for one that was lost";

/// A failure of the lab itself; never of the command it ran.
///
/// The text fits after `vpmu: ` and ends with the way out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be used.
    #[error("failed to {action} {}: {source}{}", path.display(), hint(source))]
    File {
        /// The failed action, as a verb: "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A program of the machine is not installed.
    #[error("{program} is not installed; {fix}")]
    MissingProgram {
        /// Its name.
        program: String,
        /// The command that installs it.
        fix: &'static str,
    },
    /// A program of the machine failed.
    #[error("{program} failed ({status}):\n{output}\n{hint}")]
    Program {
        /// Its name.
        program: String,
        /// The way in which it ended.
        status: String,
        /// The end of what it printed.
        output: String,
        /// Advice that usually helps.
        hint: &'static str,
    },
    /// A file has the wrong format.
    #[error("{}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The problem, and the file to give instead.
        problem: String,
    },
    /// Options that do not go together.
    #[error("{0}")]
    Usage(String),
    /// A guest did not come to a good end.
    #[error("{failure}{}", quoted(console))]
    Guest {
        /// What happened.
        failure: Failure,
        /// Its last console lines.
        console: Vec<String>,
    },
    /// Anything else, in words.
    #[error("{0}")]
    Other(String),
    /// Ctrl-C, or a request to end.
    #[error("interrupted")]
    Interrupted,
}

/// What keeps a guest from a good end.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The guest did not reach the command within this limit.
    #[error("the guest did not start the command within {} s (--boot-timeout)", _0.as_secs())]
    Boot(Duration),
    /// This wall-clock limit passed.
    #[error("stopped after {} s; `run` and `compare` take more with --timeout SECS", _0.as_secs())]
    Timeout(Duration),
    /// The guest's kernel panicked, with this line.
    #[error("the guest's kernel gave up: {0}")]
    Panic(String),
    /// The guest's kernel runs in an endless loop, or has lost an interrupt.
    #[error("{STUCK}")]
    Stuck,
    /// Like [`Failure::Panic`] or [`Failure::Stuck`], where QEMU is known to be the cause at times.
    #[error(
        "a kernel gave up: {0}\nthis may be QEMU's fault: 10.0 has been seen to deliver an interrupt twice to a \
         nested guest when it counts instructions, about one in ten thousand, or not at all; `compare` tries \
         again; or take fewer samples, or give `run` and `compare` --realtime; a QEMU without this fault: \
         script/qemu builds it, and --qemu takes its folder"
    )]
    RepeatedInterrupt(String),
    /// The KVM host went down with its guest and said nothing.
    #[error(
        "the KVM host was reset under its guest\nno program in a host can do that, so it is QEMU's fault: it has \
         been seen to with two processors in real time, once in some twenty runs on a busy machine; try again, or on a QEMU without \
         its faults: script/qemu builds it, and --qemu takes its folder"
    )]
    HostReset,
    /// This project's hypervisor ended the guest, with this message.
    #[error("{0}")]
    Monitor(String),
    /// QEMU neither ran nor ended for this time.
    #[error("the machine stopped: QEMU used no processor time for {} s; try again, or with --realtime", _0.as_secs())]
    Hang(Duration),
    /// QEMU or a VMM ended before the command did.
    #[error("{program} ended early ({status}){}", quoted_text(message))]
    Ended {
        /// QEMU or vpmu-vmm.
        program: String,
        /// The way in which the program ended.
        status: String,
        /// The program's own message.
        message: String,
    },
    /// The guest ended without reporting the command's result, in this way as far as known.
    #[error("the guest ended without reporting what the command did; {0}")]
    NoReport(String),
}

impl Failure {
    /// Makes the error of a guest whose console said no more than `console`.
    pub fn with(self, console: Vec<String>) -> Error {
        Error::Guest {
            failure: self,
            console,
        }
    }
}

/// The lab's results.
pub type Result<T> = std::result::Result<T, Error>;

/// Refuses options that do not go together.
///
/// # Errors
///
/// Always.
pub fn usage<T>(text: impl Into<String>) -> Result<T> {
    Err(Error::Usage(text.into()))
}

impl Error {
    /// Returns what kept a guest from a good end, where that is the error.
    pub fn failure(&self) -> Option<&Failure> {
        match self {
            Self::Guest { failure, .. } => Some(failure),
            _ => None,
        }
    }

    /// Makes the error of a program that `fix` installs.
    pub(crate) fn missing(program: impl Into<String>, fix: &'static str) -> Self {
        let program = program.into();
        Self::MissingProgram { program, fix }
    }

    /// Makes an error of an operation on `path`, for `map_err`.
    pub fn file(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            action,
            path: path.as_ref().to_owned(),
            source,
        }
    }

    /// Makes an error of a file that has the wrong format.
    pub fn format(path: impl AsRef<Path>, problem: impl Into<String>) -> Self {
        Self::Format {
            path: path.as_ref().to_owned(),
            problem: problem.into(),
        }
    }
}

fn hint(source: &io::Error) -> String {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!("; {NO_SPACE}"),
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "; choose another folder (XDG_CACHE_HOME moves the cache)".to_owned()
        }
        _ => String::new(),
    }
}

fn quoted(console: &[String]) -> String {
    if console.is_empty() {
        return String::new();
    }
    let lines: String = console.iter().map(|line| format!("\n  | {line}")).collect();
    format!("\nlast console lines:{lines}")
}

fn quoted_text(message: &str) -> String {
    let message = message.trim();
    if message.is_empty() {
        String::new()
    } else {
        format!(": {message}")
    }
}
