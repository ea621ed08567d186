//! Runs programs of the machine to their end: `apt-get`, `dpkg-deb`.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::NO_SPACE;
use crate::host::cancel::Cancel;
use crate::{Error, Result};

/// The program by which others end with vpmu.
pub const SETPRIV: Tool = Tool {
    program: "setpriv",
    fix: "apt-get install util-linux",
    hint: "",
};

const POLL: Duration = Duration::from_millis(50);

/// A program, with messages for the cases that it is missing or fails.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    /// The program's name, looked up in `PATH`.
    pub program: &'static str,
    /// The command that installs the program. The message about a missing program quotes it.
    pub fix: &'static str,
    /// Advice that usually helps. The message about a failure ends with it, after the program's own
    /// words.
    pub hint: &'static str,
}

impl Tool {
    /// Returns a command line to add arguments to. The kernel ends the program
    /// when vpmu is killed: an orphaned apt-get would hold its locks.
    pub(crate) fn command(&self) -> Result<Command> {
        self.check()?;
        bound_to_us(Path::new(self.program))
    }

    /// Checks that the program is installed.
    pub(crate) fn check(&self) -> Result<()> {
        match self.is_installed() {
            true => Ok(()),
            false => Err(Error::missing(self.program, self.fix)),
        }
    }

    /// Tells whether the program is in `PATH`.
    pub fn is_installed(&self) -> bool {
        first_with(&path(), self.program).is_some()
    }

    /// Runs the program, calls `tick` now and then, and returns its standard output.
    pub(crate) fn run(&self, command: Command, cancel: &Cancel, tick: &dyn Fn()) -> Result<String> {
        self.run_within(Duration::MAX, command, cancel, tick)
    }

    /// Runs the program as [`Tool::run`] does, and ends it after `limit`.
    pub(crate) fn run_within(
        &self,
        limit: Duration,
        mut command: Command,
        cancel: &Cancel,
        tick: &dyn Fn(),
    ) -> Result<String> {
        let temporary =
            || tempfile::tempfile().map_err(Error::file("write in", std::env::temp_dir()));
        let (mut output, mut errors) = (temporary()?, temporary()?);
        let duplicate = |file: &File| file.try_clone().map_err(Error::file("open", self.program));
        command
            .env("LC_ALL", "C")
            .stdout(duplicate(&output)?)
            .stderr(duplicate(&errors)?);
        let child = command.spawn().map_err(Error::file("run", self.program))?;
        let mut child = KillOnDrop(child);
        let begin = Instant::now();
        let status = loop {
            let status = child.0.try_wait();
            if let Some(status) = status.map_err(Error::file("wait for", self.program))? {
                break Some(status);
            }
            cancel.check()?;
            if begin.elapsed() > limit {
                break None;
            }
            tick();
            thread::sleep(POLL);
        };
        if status.is_some_and(|status| status.success()) {
            return self.text(&mut output);
        }
        // Ctrl-C ends the program, too, and perhaps first.
        cancel.check()?;
        // A program that is over its time may write while its output is read.
        drop(child);
        let said = self.text(&mut output)? + &self.text(&mut errors)?;
        let last: Vec<&str> = said.lines().rev().take(12).collect();
        Err(Error::Program {
            program: self.program.to_owned(),
            status: status.map_or_else(
                || format!("ended after {} s", limit.as_secs()),
                |status| status.to_string(),
            ),
            output: last.into_iter().rev().collect::<Vec<_>>().join("\n"),
            hint: if said.contains("No space left on device") {
                NO_SPACE
            } else {
                self.hint
            },
        })
    }

    fn text(&self, file: &mut File) -> Result<String> {
        let mut bytes = Vec::new();
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .map_err(Error::file("read the output of", self.program))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Returns a command line for a program that the kernel ends when vpmu is killed.
pub(crate) fn bound_to_us(program: &Path) -> Result<Command> {
    SETPRIV.check()?;
    let mut command = Command::new(SETPRIV.program);
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .stdin(Stdio::null());
    Ok(command)
}

/// Returns the folders of `PATH`.
pub(crate) fn path() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).collect()
}

/// Returns the file of this name in the first of the folders that has one.
pub(crate) fn first_with(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    let mut files = folders.iter().map(|folder| folder.join(name));
    files.find(|file| file.is_file())
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Both calls fail only for a child that has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    const SHELL: Tool = Tool {
        program: "sh",
        fix: "",
        hint: "look there",
    };

    fn shell(script: &str) -> Result<String> {
        let mut command = SHELL.command().unwrap();
        command.args(["-c", script]);
        SHELL.run(command, &Cancel::default(), &|| ())
    }

    #[test]
    fn output_and_failure() {
        assert_eq!(shell("echo out; echo err >&2").unwrap(), "out\n");
        let error = shell("echo out; echo err >&2; exit 3")
            .unwrap_err()
            .to_string();
        assert!(error.contains("out\nerr\nlook there"), "{error}");
    }

    #[test]
    fn missing_program() {
        let tool = Tool {
            program: "vpmu-no-such-program",
            fix: "install it",
            hint: "",
        };
        let error = tool.command().unwrap_err();
        assert_eq!(
            error.to_string(),
            "vpmu-no-such-program is not installed; install it"
        );
        assert!(!tool.is_installed());
        assert!(SHELL.is_installed());
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended_with_its_last_words() {
        let mut command = SHELL.command().unwrap();
        command.args(["-c", "echo out; exec sleep 1000"]);
        let limit = Duration::from_secs(1);
        let run = SHELL.run_within(limit, command, &Cancel::default(), &|| ());
        let error = run.unwrap_err().to_string();
        assert!(error.contains("ended after 1 s"), "{error}");
        assert!(error.contains("out\nlook there"), "{error}");
    }

    #[test]
    fn cancelled() {
        let cancel = Cancel::default();
        cancel.flag().store(true, Ordering::Relaxed);
        let mut command = SHELL.command().unwrap();
        command.args(["-c", "sleep 100"]);
        let error = SHELL.run(command, &cancel, &|| ()).unwrap_err();
        assert!(matches!(error, Error::Interrupted));
    }
}
