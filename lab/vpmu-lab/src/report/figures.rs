//! The figures of a bench, and the file that its `--json` writes.

use serde::{Deserialize, Serialize};

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
    pub(crate) schema: u32,
    #[serde(default)]
    pub(crate) bench: String,
    /// The version of the QEMU that ran the guests, and whose it is; `None` where no QEMU did.
    pub qemu: Option<String>,
    /// What counted for this project's x86 guests; `None` where that is nothing, or not the same for all.
    pub backing: Option<Backing>,
    /// One line for each figure and design.
    pub rows: Vec<Row>,
}

impl Report {
    /// Returns the row of `figure` under `mode`.
    pub(super) fn find(&self, figure: &str, mode: &str) -> Option<&Row> {
        self.rows
            .iter()
            .find(|row| row.figure == figure && row.mode == mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::files::write_json;

    #[test]
    fn the_file_of_a_bench() {
        let row = Row::new("host_share", "partitioned", Some(0.005_84), "share");
        let qemu = Some("10.0.2 (Debian)".to_owned());
        let report = Report {
            schema: 1,
            bench: "partition".to_owned(),
            qemu,
            backing: None,
            rows: vec![row],
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        write_json(file.path(), &report).unwrap();
        insta::assert_snapshot!(std::fs::read_to_string(file.path()).unwrap());
    }
}
