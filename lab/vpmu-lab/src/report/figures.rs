//! The figures of a bench, and the file that its `--json` writes.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::host::files::write_whole;
use crate::spec::design::Backing;

/// One line of a bench's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The measured quantity.
    pub figure: String,
    /// The design or policy.
    pub mode: String,
    /// The result; `None` where it cannot be known.
    pub measured: Option<f64>,
    /// The published result; `None` where there is none.
    pub published: Option<f64>,
    /// The unit of both results.
    pub unit: String,
}

impl Row {
    /// Makes a line of what nobody has published.
    pub fn new(
        figure: impl Into<String>,
        mode: impl Into<String>,
        measured: Option<f64>,
        unit: impl Into<String>,
    ) -> Self {
        Self {
            figure: figure.into(),
            mode: mode.into(),
            measured,
            published: None,
            unit: unit.into(),
        }
    }

    /// Puts a published result beside the measured one, if there is one.
    #[must_use]
    pub fn beside(self, published: Option<f64>) -> Self {
        Self { published, ..self }
    }
}

/// The file that `--json` writes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    #[serde(default)]
    pub(super) schema: u32,
    #[serde(default)]
    pub(super) bench: String,
    /// The version of the QEMU that ran the guests, and whose it is; `None` where no QEMU did.
    pub qemu: Option<String>,
    /// What counted for this project's x86 guests; `None` where that is nothing, or not the same for all.
    pub backing: Option<Backing>,
    /// One line for each figure and design.
    pub rows: Vec<Row>,
}

impl Report {
    /// Makes the file of the bench called `bench`, whose guests this QEMU ran.
    pub fn new(
        bench: &str,
        qemu: Option<String>,
        backing: Option<Backing>,
        rows: Vec<Row>,
    ) -> Self {
        Self {
            schema: 1,
            bench: bench.to_owned(),
            qemu,
            backing,
            rows,
        }
    }

    /// Returns the row of `figure` under `mode`.
    pub(super) fn find(&self, figure: &str, mode: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| row.figure == figure && row.mode == mode)
    }

    /// Returns the file as JSON.
    pub fn json(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("a report is plain data");
        text.push(b'\n');
        text
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        write_whole(path, &self.json())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_bench() {
        let row = Row::new("host_share", "partitioned", Some(0.005_84), "share");
        let qemu = Some("10.0.2 (Debian)".to_owned());
        let json = Report::new("partition", qemu, None, vec![row]).json();
        insta::assert_snapshot!(String::from_utf8(json).unwrap());
    }
}
