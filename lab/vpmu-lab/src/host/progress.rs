//! The display of progress while the lab works: bars on a terminal, plain lines elsewhere, always
//! on standard error.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// The place where progress is shown.
#[derive(Debug, Clone)]
pub struct Progress {
    /// Drawn on a terminal alone.
    bars: MultiProgress,
    /// Whether plain lines are written in place of the bars.
    lines: bool,
}

/// A task whose progress is shown.
#[derive(Debug)]
pub struct Task {
    bar: ProgressBar,
    lines: bool,
}

impl Progress {
    /// Shows progress on standard error: bars on a terminal, else lines.
    pub fn stderr() -> Self {
        Self {
            bars: MultiProgress::new(),
            lines: !std::io::stderr().is_terminal(),
        }
    }

    /// Shows progress as [`Progress::stderr`] on a terminal, else nowhere: in a
    /// script, standard error is the command's alone.
    pub fn terminal() -> Self {
        Self {
            bars: MultiProgress::new(),
            lines: false,
        }
    }

    /// Begins a task of unknown length.
    pub fn task(&self, name: &str) -> Task {
        self.begin(
            name,
            ProgressBar::new_spinner(),
            "{spinner} {prefix:12} {elapsed:>4} {msg}",
        )
    }

    /// Begins a task of `total` bytes.
    pub fn bytes(&self, name: &str, total: u64) -> Task {
        self.begin(
            name,
            ProgressBar::new(total),
            "{spinner} {prefix} [{bar:30}] {binary_bytes}/{binary_total_bytes} {eta}",
        )
    }

    fn begin(&self, name: &str, bar: ProgressBar, template: &str) -> Task {
        let bar = self.bars.add(bar);
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name.to_owned());
        let lines = self.lines;
        if lines {
            eprintln!("vpmu: {name} ...");
        } else {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Task { bar, lines }
    }
}

impl Task {
    /// Shows the current step.
    pub fn say(&self, message: &str) {
        self.bar.set_message(message.to_owned());
        if self.lines {
            eprintln!("vpmu: {}: {message}", self.bar.prefix());
        }
    }

    /// Shows how many bytes are done.
    pub fn set(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    /// Ends the task and removes its bar.
    pub fn done(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.done();
    }
}
