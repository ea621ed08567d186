//! Makes one HTML page of saved results. The page fetches nothing from elsewhere and runs no script.
//!
//! The page shows the files in the order of their names. A figure that a file has as null is shown as `-` and has
//! no bar.

mod bench;
mod comparison;
mod draw;

use std::fs;
use std::path::Path;

use askama::Template;
use serde::Deserialize;

use super::figures::Report;
use super::result::{Results, Run};
use super::story::Page;
use super::{table, tables};
use crate::{Error, Result};

/// The schema of files that this vpmu reads.
const SCHEMA: u32 = 1;

/// The result of a folder.
#[derive(Debug)]
pub struct Made {
    /// The page itself.
    pub html: String,
    /// The number of files in the page.
    pub files: usize,
    /// JSON files that hold no results, by name.
    pub skipped: Vec<String>,
}

/// A file that `--json` of `run`, `compare` or `bench` wrote.
#[derive(Deserialize)]
#[serde(untagged)]
enum Saved {
    Runs(Results),
    Bench(Report),
}

#[derive(Template)]
#[template(path = "page.html")]
struct Html {
    /// The drawings at the top: each comparison with native.
    leads: Vec<String>,
    /// The benches' lines for the table at the top.
    claims: Vec<Claim>,
    sections: Vec<Section>,
    /// Words and their meanings.
    legend: Vec<(&'static str, &'static str)>,
}

/// A file's part of the page.
struct Section {
    id: String,
    file: String,
    title: String,
    /// Where the figures are from, above the title.
    kicker: String,
    command: Option<String>,
    sentences: Vec<String>,
    /// All but the first are shown when the reader asks for them.
    groups: Vec<Group>,
    figures: Vec<Figures>,
    /// The drawing at the top of the page.
    lead: Option<String>,
    claim: Option<Claim>,
}

/// Drawings, as HTML, under a heading.
struct Group {
    heading: String,
    drawings: Vec<String>,
}

/// A table, whose first column names the rows.
struct Figures {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// A bench's line in the table at the top.
struct Claim {
    id: String,
    label: String,
    modes: String,
    measured: Side,
    published: Option<Side>,
}

struct Side {
    from: Option<String>,
    to: String,
    factor: Option<String>,
    /// What is left of the first figure, percent.
    left: Option<f64>,
}

/// Makes a page of the JSON files in `folder`. `page_of` returns the page of a bench by its name.
///
/// # Errors
///
/// When the folder cannot be read, or holds no results.
pub fn of_folder(folder: &Path, page_of: fn(&str) -> Option<Page>) -> Result<Made> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::file("read", folder))? {
        let path = entry.map_err(Error::file("read", folder))?.path();
        if path.extension().is_some_and(|kind| kind == "json") && path.is_file() {
            paths.push(path);
        }
    }
    // Without its ending, so that a bench stands before its other vendor's results.
    paths.sort_by_key(|path| path.with_extension(""));
    let (mut sections, mut skipped) = (Vec::new(), Vec::new());
    for path in paths {
        let name = path.file_name().unwrap_or_default();
        let file = name.to_string_lossy().into_owned();
        let text = fs::read(&path).map_err(Error::file("read", &path))?;
        match serde_json::from_slice(&text) {
            Ok(Saved::Runs(results)) if results.schema == SCHEMA && !results.runs.is_empty() => {
                sections.push(comparison::section(&file, &results.runs));
            }
            Ok(Saved::Bench(saved)) if saved.schema == SCHEMA && !saved.rows.is_empty() => {
                sections.push(bench::section(&file, &saved, page_of(&saved.bench)));
            }
            _ => skipped.push(file),
        }
    }
    if sections.is_empty() {
        return Err(Error::format(
            folder,
            "no results in it; `vpmu run`, `compare` and `bench` write some with --json FILE",
        ));
    }
    Ok(Made {
        files: sections.len(),
        html: html(sections),
        skipped,
    })
}

/// Makes a page of the figures of one comparison; `None` without a figure.
pub fn of_runs(runs: &[Run]) -> Option<String> {
    let is_any = !runs.is_empty();
    is_any.then(|| html(vec![comparison::section("comparison", runs)]))
}

fn html(mut sections: Vec<Section>) -> String {
    let legend = table::LEGEND
        .lines()
        .filter_map(|line| line.split_once("  "))
        .map(|(word, meaning)| (word, meaning.trim_start()));
    let each = sections.iter_mut();
    let leads = each.filter_map(|section| section.lead.take()).collect();
    let each = sections.iter_mut();
    let claims = each.filter_map(|section| section.claim.take()).collect();
    render(&Html {
        leads,
        claims,
        sections,
        legend: legend.collect(),
    })
}

fn render(template: &impl Template) -> String {
    template.render().expect("writing to memory cannot fail")
}

impl Figures {
    fn of(table: &tables::Table<'_>) -> Self {
        let head = [table.kind.unwrap_or("figure"), "unit"].map(str::to_owned);
        let measured = table.modes.iter().map(ToString::to_string);
        let published = table
            .published
            .iter()
            .map(|mode| format!("published: {mode}"));
        let row = |line: &tables::Line<'_>| {
            let unit = match line.unit {
                // The numbers have the sign.
                "percent" | "share" => "",
                unit => unit,
            };
            let mut row = vec![line.name.to_owned(), unit.to_owned()];
            row.extend(line.cells.iter().cloned());
            row
        };
        Self {
            columns: head.into_iter().chain(measured).chain(published).collect(),
            rows: table.lines.iter().map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
