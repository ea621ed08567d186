//! The display of progress while the lab works: bars on a terminal, plain lines elsewhere, always
//! on standard error.

use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The place where progress is shown.
#[derive(Debug, Clone)]
pub struct Progress {
    bars: MultiProgress,
    style: Style,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    Bars,
    Lines,
    Silent,
}

/// A task whose progress is shown.
#[derive(Debug)]
pub struct Task {
    bar: ProgressBar,
    name: Arc<str>,
    style: Style,
}

impl Progress {
    /// Shows progress on standard error: bars on a terminal, else lines.
    pub fn stderr() -> Self {
        let style = if std::io::stderr().is_terminal() {
            Style::Bars
        } else {
            Style::Lines
        };
        Self {
            bars: MultiProgress::new(),
            style,
        }
    }

    /// Shows progress as [`Progress::stderr`] on a terminal, else nowhere: in a
    /// script, standard error is the command's alone.
    pub fn terminal() -> Self {
        if std::io::stderr().is_terminal() {
            Self::stderr()
        } else {
            Self::silent()
        }
    }

    /// Shows nothing.
    pub fn silent() -> Self {
        Self {
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::hidden()),
            style: Style::Silent,
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
        match self.style {
            Style::Bars => bar.enable_steady_tick(Duration::from_millis(200)),
            Style::Lines => eprintln!("vpmu: {name} ..."),
            Style::Silent => {}
        }
        Task {
            bar,
            name: name.into(),
            style: self.style,
        }
    }
}

impl Task {
    /// Shows the current step.
    pub fn say(&self, message: &str) {
        match self.style {
            Style::Bars => self.bar.set_message(message.to_owned()),
            Style::Lines => eprintln!("vpmu: {}: {message}", self.name),
            Style::Silent => {}
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
