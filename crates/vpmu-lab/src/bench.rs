//! Published experiments, done again: what was measured beside what was
//! published.
//!
//! Absolute times differ, because the published machines are fast and run the
//! command longer; what is to be compared is one design with another.

use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use crate::cache::{Cache, write_whole};
use crate::cancel::Cancel;
use crate::compare::{Comparison, compare};
use crate::design::Pmu;
use crate::experiment::Experiment;
use crate::guest::images::Images;
use crate::guest::job::Command;
use crate::machine::Machine;
use crate::progress::Progress;
use crate::result::Run;
use crate::{Error, Result};

/// One published experiment.
#[derive(Debug)]
pub struct Bench {
    /// As on the command line.
    pub name: &'static str,
    /// What it is about.
    pub about: &'static str,
    parts: &'static [Part],
}

/// A command and the figures taken from it.
#[derive(Debug)]
struct Part {
    command: &'static str,
    figures: &'static [Figure],
}

#[derive(Debug)]
struct Figure {
    name: &'static str,
    unit: &'static str,
    of: fn(&Run) -> Option<f64>,
    published: &'static [(Pmu, f64)],
}

/// One line of a bench's result.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// What was measured.
    pub figure: &'static str,
    /// Under which design.
    pub mode: &'static str,
    /// The result; `None` where the design cannot know it.
    pub measured: Option<f64>,
    /// The published result; `None` where there is none.
    pub published: Option<f64>,
    /// Of both.
    pub unit: &'static str,
}

/// What `--json` writes.
#[derive(Debug, Serialize)]
pub struct Report {
    schema: u32,
    bench: &'static str,
    rows: Vec<Row>,
}

/// The partitioned PMU against KVM's emulated one, published in 2025 for
/// KVM on Arm with ten counters; the gzip run there was of 64 MB.
///
/// `--no-bpf-event`: without it perf waits for a helper thread that wakes up
/// once a second, and every run takes some whole number of seconds more.
const PARTITION: Bench = Bench {
    name: "partition",
    about: "counters split by MDCR_EL2.HPMN, against emulated ones",
    parts: &[
        Part {
            command: "perf record --no-bpf-event -F 1000 -e cycles,cycles:u,cycles:k,cycles,\
                      cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,\
                      cycles:u,cycles:k -o perf.data -- gzip -c random.bin > /dev/null",
            figures: &[
                Figure {
                    name: "perf_run_s",
                    unit: "s",
                    of: |run| Some(run.real_s),
                    published: &[(Pmu::Kvm, 4.143), (Pmu::Partitioned, 3.139)],
                },
                Figure {
                    name: "perf_run_sys_s",
                    unit: "s",
                    of: |run| Some(run.sys_s),
                    published: &[(Pmu::Kvm, 0.159), (Pmu::Partitioned, 0.110)],
                },
                Figure {
                    name: "samples",
                    unit: "samples",
                    of: |run| run.samples.map(|count| count as f64),
                    published: &[],
                },
                Figure {
                    name: "exits_per_pmi",
                    unit: "exits",
                    of: |run| run.exits_per_pmi,
                    published: &[],
                },
            ],
        },
        Part {
            command: "perf record --no-bpf-event -F 4000 -e cycles,cycles:u,cycles:k,cycles,\
                      cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,\
                      cycles:u,cycles:k -o perf.data -- stress-ng --quiet --cpu 0 --timeout 2",
            figures: &[Figure {
                name: "host_share",
                unit: "share",
                of: |run| run.host_share,
                published: &[(Pmu::Kvm, 0.3496), (Pmu::Partitioned, 0.0097)],
            }],
        },
    ],
};

/// All of them.
pub const BENCHES: &[Bench] = &[PARTITION];

impl Bench {
    /// Runs it under every design.
    ///
    /// # Errors
    ///
    /// When a design fails, or on an interruption.
    pub fn run(
        &'static self,
        keep: Option<&Path>,
        cache: &Cache,
        cancel: &Cancel,
        progress: &Progress,
    ) -> Result<Report> {
        let mut experiments = Vec::new();
        for (number, part) in self.parts.iter().enumerate() {
            let keep = keep.map(|folder| folder.join(format!("{}-{}", self.name, number + 1)));
            let experiment = Experiment {
                machine: Machine {
                    vcpus: 1,
                    memory: 1024,
                    realtime: false,
                    qemu_args: Vec::new(),
                },
                host_counters: 0,
                command: Command::from_words(&[part.command.to_owned()]),
                runs: 1,
                kernel: None,
                initrd: None,
                append: None,
                add: Vec::new(),
                timeout: Duration::from_secs(1800),
                boot_timeout: Duration::from_secs(240),
                keep,
            };
            experiment.check(&Pmu::ALL)?;
            experiments.push((part, experiment));
        }
        let images = Images::prepare(cache, cancel, progress)?;
        let mut rows = Vec::new();
        for (part, experiment) in experiments {
            let comparison = compare(
                &experiment,
                &Pmu::ALL,
                cache,
                Some(&images),
                cancel,
                progress,
            )?;
            rows.extend(part.rows(comparison)?);
        }
        Ok(Report {
            schema: 1,
            bench: self.name,
            rows,
        })
    }
}

impl Part {
    fn rows(&self, comparison: Comparison) -> Result<Vec<Row>> {
        if let Some((_, error)) = comparison.failures.into_iter().next() {
            return Err(error);
        }
        if let Some(row) = comparison.rows.iter().find(|row| row.run.status != 0) {
            return Err(Error::CommandFailed {
                pmu: row.pmu,
                status: row.run.status,
                output: String::from_utf8_lossy(&row.output).into_owned(),
            });
        }
        let runs = || comparison.rows.iter().map(|row| &row.run);
        Ok(self
            .figures
            .iter()
            .flat_map(|figure| runs().map(|run| figure.row(run)))
            .collect())
    }
}

impl Figure {
    fn row(&self, run: &Run) -> Row {
        let published = self.published.iter().find(|(pmu, _)| *pmu == run.pmu);
        Row {
            figure: self.name,
            mode: run.pmu.name(),
            measured: (self.of)(run),
            published: published.map(|(_, value)| *value),
            unit: self.unit,
        }
    }
}

impl Report {
    /// One line for each figure and design.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).expect("a report is plain data");
        text.push(b'\n');
        write_whole(path, &text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::result::Settings;

    #[test]
    fn rows_have_what_was_published() {
        let settings = Settings {
            pmu: Pmu::Kvm,
            vcpus: 1,
            runs: 1,
            deterministic: true,
            command: "x",
        };
        let meter = br#"{"meter":{"status":0,"signal":null,"real_ns":2500000000,"user_us":1,"sys_us":1,"pmis":0}}"#;
        let run = Run::from_records(&settings, &[Record::parse(meter).unwrap()]).unwrap();
        let report = Report {
            schema: 1,
            bench: PARTITION.name,
            rows: PARTITION.parts[0]
                .figures
                .iter()
                .map(|figure| figure.row(&run))
                .collect(),
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["rows"][0]["figure"], "perf_run_s");
        assert_eq!(json["rows"][0]["mode"], "kvm");
        assert_eq!(json["rows"][0]["measured"], 2.5);
        assert_eq!(json["rows"][0]["published"], 4.143);
        assert_eq!(json["rows"][3]["measured"], serde_json::Value::Null);
    }
}
