//! The figures of a bench, and the file that its `--json` writes.

use std::path::Path;

use serde::Serialize;

use crate::Result;
use crate::host::files::write_whole;
use crate::spec::design::Backing;

/// One line of a bench's result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The measured quantity.
    pub figure: String,
    /// The design or policy.
    pub mode: &'static str,
    /// The result; `None` where it cannot be known.
    pub measured: Option<f64>,
    /// The published result; `None` where there is none.
    pub published: Option<f64>,
    /// The unit of both results.
    pub unit: &'static str,
}

impl Row {
    /// Makes a line of what nobody has published.
    pub fn new(
        figure: impl Into<String>,
        mode: &'static str,
        measured: Option<f64>,
        unit: &'static str,
    ) -> Self {
        Self {
            figure: figure.into(),
            mode,
            measured,
            published: None,
            unit,
        }
    }

    /// Puts a published result beside the measured one, if there is one.
    #[must_use]
    pub fn beside(self, published: Option<f64>) -> Self {
        Self { published, ..self }
    }
}

/// The file that `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    schema: u32,
    bench: &'static str,
    /// The version of the QEMU that ran the guests, and whose it is; `None` where no QEMU did.
    qemu: Option<String>,
    /// What counted for this project's x86 guests; `None` where that is nothing, or not the same for all.
    backing: Option<Backing>,
    rows: Vec<Row>,
}

impl Report {
    /// Makes the file of the bench called `bench`, whose guests this QEMU ran.
    pub fn new(
        bench: &'static str,
        qemu: Option<String>,
        backing: Option<Backing>,
        rows: Vec<Row>,
    ) -> Self {
        Self {
            schema: 1,
            bench,
            qemu,
            backing,
            rows,
        }
    }

    /// Returns one line for each figure and design.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Returns the QEMU that ran the guests.
    pub fn qemu(&self) -> Option<&str> {
        self.qemu.as_deref()
    }

    /// Returns what counted for this project's x86 guests, where that is the same for all.
    pub fn backing(&self) -> Option<Backing> {
        self.backing
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
        let row = Row {
            figure: "host_share".to_owned(),
            mode: "partitioned",
            measured: Some(0.005_84),
            published: None,
            unit: "share",
        };
        let qemu = Some("10.0.2 (Debian)".to_owned());
        let json = Report::new("partition", qemu, None, vec![row]).json();
        insta::assert_snapshot!(String::from_utf8(json).unwrap());
    }
}
