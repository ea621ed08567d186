//! Makes one HTML page of saved results, with tables and plots. The page fetches nothing from
//! elsewhere.
//!
//! The page shows the files in the order of their names. Figures that a file has as null are shown
//! as `-` and have no bar.

use std::fs;
use std::path::Path;

use askama::Template;
use serde::Deserialize;

use super::result::{Results, Run};
use super::table;
use crate::{Error, Result};

/// The schema of files that this vpmu reads.
const SCHEMA: u32 = 1;
/// The longest bar, pixels.
const LONGEST: u32 = 260;
const LABEL_WIDTH: u32 = 150;
const BAR_DISTANCE: u32 = 22;

/// The result of a folder.
#[derive(Debug)]
pub struct Page {
    /// The page itself.
    pub html: String,
    /// The number of files in the page.
    pub files: usize,
    /// JSON files that hold no results, by name.
    pub skipped: Vec<String>,
}

/// A file that `--json` of `run`, `compare` or `bench` wrote.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Saved {
    Runs(Results),
    Bench(SavedBench),
}

#[derive(Debug, Deserialize)]
struct SavedBench {
    schema: u32,
    bench: String,
    rows: Vec<SavedRow>,
}

#[derive(Debug, Deserialize)]
struct SavedRow {
    figure: String,
    mode: String,
    measured: Option<f64>,
    published: Option<f64>,
    unit: String,
}

#[derive(Template)]
#[template(path = "page.html")]
struct Html {
    columns: &'static [&'static str],
    legend: &'static str,
    comparisons: Vec<Comparison>,
    benches: Vec<Bench>,
}

struct Comparison {
    file: String,
    about: String,
    command: String,
    rows: Vec<[String; table::COLUMNS.len() - 1]>,
    plots: Vec<String>,
    exits: Vec<(String, String)>,
}

struct Bench {
    file: String,
    name: String,
    rows: Vec<[String; 5]>,
    plots: Vec<String>,
}

#[derive(Template)]
#[template(path = "plot.html")]
struct Plot<'a> {
    title: &'a str,
    width: u32,
    height: u32,
    label_width: u32,
    bars: Vec<Bar>,
}

struct Bar {
    label: String,
    class: &'static str,
    y: u32,
    length: u32,
    value: String,
}

/// Makes a page of the JSON files in `folder`.
///
/// # Errors
///
/// When the folder cannot be read, or holds no results.
pub fn of_folder(folder: &Path) -> Result<Page> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::file("read", folder))? {
        let path = entry.map_err(Error::file("read", folder))?.path();
        if path.extension().is_some_and(|kind| kind == "json") && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    let (mut comparisons, mut benches, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    for path in paths {
        let file = path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .unwrap_or_default();
        let text = fs::read(&path).map_err(Error::file("read", &path))?;
        match serde_json::from_slice(&text) {
            Ok(Saved::Runs(results)) if results.schema == SCHEMA && !results.runs.is_empty() => {
                comparisons.push(Comparison::of(file, &results.runs));
            }
            Ok(Saved::Bench(bench)) if bench.schema == SCHEMA => {
                benches.push(Bench::of(file, bench));
            }
            _ => skipped.push(file),
        }
    }
    let files = comparisons.len() + benches.len();
    if files == 0 {
        return Err(Error::format(
            folder,
            "no results in it; `vpmu run`, `compare` and `bench` write some with --json FILE",
        ));
    }
    let html = Html {
        columns: &table::COLUMNS[..table::COLUMNS.len() - 1],
        legend: table::LEGEND,
        comparisons,
        benches,
    };
    Ok(Page {
        html: render(&html),
        files,
        skipped,
    })
}

fn render(template: &impl Template) -> String {
    template.render().expect("writing to memory cannot fail")
}

impl Comparison {
    fn of(file: String, runs: &[Run]) -> Self {
        let first = &runs[0];
        let time = if runs.iter().all(|run| run.deterministic) {
            "counted instructions"
        } else {
            "real time"
        };
        let cpu = first.cpu.as_deref().map(|cpu| format!(" ({cpu})"));
        let about = format!(
            "{}{}, {} vCPU, {} run of the command, {time}",
            first.arch,
            cpu.unwrap_or_default(),
            first.vcpus,
            first.runs,
        );
        let plot = |title: &str, figure: fn(&Run) -> Option<f64>| {
            let values = runs
                .iter()
                .map(|run| (run.design().to_string(), figure(run)));
            plot(title, "measured", values)
        };
        let plots = [
            plot("real time, s", |run| Some(run.real_s)),
            plot("exits for each PMI", |run| run.exits_per_pmi),
            plot("the hypervisor's share of the time, %", |run| {
                Some((run.host_share? * 10_000.0).round() / 100.0)
            }),
        ];
        let kinds = |run: &Run| {
            let exits = run.exits.as_ref()?;
            Some((run.design().to_string(), table::kinds(exits)))
        };
        Self {
            file,
            about,
            command: first.command.clone(),
            rows: runs
                .iter()
                .map(|run| table::cells(run, Some(first)))
                .collect(),
            plots: plots.into_iter().flatten().collect(),
            exits: runs.iter().filter_map(kinds).collect(),
        }
    }
}

impl Bench {
    fn of(file: String, bench: SavedBench) -> Self {
        let mut figures: Vec<&str> = Vec::new();
        for row in &bench.rows {
            if !figures.contains(&row.figure.as_str()) {
                figures.push(&row.figure);
            }
        }
        let plots = figures.iter().flat_map(|&figure| {
            let rows = || bench.rows.iter().filter(move |row| row.figure == figure);
            let title = |kind: &str| match rows().next().map(|row| row.unit.as_str()) {
                Some(unit) if !unit.is_empty() => format!("{figure}, {unit} ({kind})"),
                _ => format!("{figure} ({kind})"),
            };
            // Published figures come from other machines, so each machine has a scale of its own.
            let measured = rows().map(|row| (row.mode.clone(), row.measured));
            let published = rows().map(|row| (row.mode.clone(), row.published));
            [
                plot(&title("measured"), "measured", measured),
                plot(&title("published"), "published", published),
            ]
        });
        let plots = plots.flatten().collect();
        let rows = bench.rows.iter().map(|row| {
            [
                row.figure.clone(),
                row.mode.clone(),
                table::number(row.measured),
                table::number(row.published),
                row.unit.clone(),
            ]
        });
        Self {
            rows: rows.collect(),
            file,
            name: bench.bench,
            plots,
        }
    }
}

/// Draws horizontal bars, in proportion to the largest figure. `None` when fewer
/// than two figures are known: there is nothing to compare.
fn plot(
    title: &str,
    class: &'static str,
    values: impl Iterator<Item = (String, Option<f64>)>,
) -> Option<String> {
    let known: Vec<(String, f64)> = values
        .filter_map(|(label, value)| Some((label, value.filter(|value| value.is_finite())?)))
        .collect();
    let largest = known.iter().map(|(_, value)| *value).fold(0.0, f64::max);
    if known.len() < 2 || largest <= 0.0 {
        return None;
    }
    let bars: Vec<Bar> = (0..)
        .zip(known)
        .map(|(index, (label, value))| Bar {
            label,
            class,
            y: BAR_DISTANCE * index,
            length: (value.max(0.0) / largest * f64::from(LONGEST)).round() as u32,
            value: table::number(Some(value)),
        })
        .collect();
    let plot = Plot {
        title,
        width: LABEL_WIDTH + LONGEST + 120,
        height: BAR_DISTANCE * bars.len() as u32,
        label_width: LABEL_WIDTH,
        bars,
    };
    Some(render(&plot))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = r#"{"arch":"aarch64","pmu":"PMU","vcpus":1,"guest_counters":6,"host_counters":null,
        "command":"echo '<b>' & true","runs":1,"status":0,"real_s":REAL,"user_s":1.0,"sys_s":0.5,"samples":10,
        "lost_samples":0,"throttled":0,"max_sample_rate":100000,"pmis":10,"exits":EXITS,"exits_per_pmi":null,
        "pmu_exits_per_pmi":null,"host_share":null,"exit_share":null,"deterministic":true,"later":1}"#;
    const BENCH: &str = r#"{"schema":1,"bench":"partition","rows":[
        {"figure":"perf_run_s","mode":"kvm","measured":5.0,"published":4.143,"unit":"s"},
        {"figure":"perf_run_s","mode":"partitioned","measured":2.5,"published":null,"unit":"s"}]}"#;

    fn run(pmu: &str, real: &str, exits: &str) -> String {
        let run = RUN.replace("PMU", pmu).replace("REAL", real);
        run.replace("EXITS", exits)
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn results_become_tables_and_plots() {
        let runs = [
            run("native", "2.0", "null"),
            run("partitioned", "4.0", r#"{"irq:pmu":10}"#),
        ];
        let results = format!(r#"{{"schema":1,"runs":[{}]}}"#, runs.join(","));
        let folder = folder(&[
            ("b.json", BENCH),
            ("a.json", &results),
            ("records.json", "[]"),
            ("later.json", r#"{"schema":2,"runs":[]}"#),
            ("notes.txt", "x"),
        ]);
        let page = of_folder(folder.path()).unwrap();
        assert_eq!(page.files, 2);
        assert_eq!(page.skipped, ["later.json", "records.json"]);
        let html = &page.html;
        assert!(html.contains("<td>partitioned</td><td>6+1</td><td>4.000</td><td>2.000</td>"));
        assert!(html.contains("irq:pmu 10"), "{html}");
        // One bar is half as long as the longest.
        for length in ["width=\"130\"", "width=\"260\""] {
            assert_eq!(html.matches(length).count(), 2, "{length}: {html}");
        }
        // This figure is known for one design only, and no plot is made up.
        assert!(!html.contains("exits for each PMI"), "{html}");
        assert!(!html.contains("(published)"), "{html}");
        assert!(html.contains("4.1430"), "{html}");
    }

    #[test]
    fn the_page_is_whole_and_safe() {
        let results = format!(
            r#"{{"schema":1,"runs":[{}]}}"#,
            run("native", "2.0", "null")
        );
        let folder = folder(&[("a.json", &results)]);
        let html = of_folder(folder.path()).unwrap().html;
        assert!(!html.contains("echo '<b>'"), "{html}");
        for outside in ["src=", "href=", "@import", "<script"] {
            assert!(!html.contains(outside), "{outside}");
        }
    }

    #[test]
    fn a_folder_without_results_says_how_to_make_some() {
        let empty = folder(&[("records.json", "{")]);
        let error = of_folder(empty.path()).unwrap_err().to_string();
        assert!(error.contains("--json"), "{error}");
        assert!(of_folder(&empty.path().join("none")).is_err());
    }
}
