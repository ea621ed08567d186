//! The drawings of figures by design: bars, and bars of several kinds.
//!
//! A bar is a table's cell with a width, so a drawing is a table, too, fits any width, and its text keeps its
//! size. Published figures come from other machines, so they have a scale of their own.

use askama::Template;
use itertools::Itertools;

use super::super::figures::Row as Figure;
use super::super::number::quantity;
use super::super::tables::Named;
use super::render;

/// The beginnings of figures whose kinds behind the colon add up.
const SUMS: [&str; 4] = [
    "exits",
    "four_events_per_pmi:exits",
    "per_pmi",
    "host_ops_per_pmi",
];

/// The kinds with a colour of their own in a bar of several kinds.
const COLOURS: usize = 8;

/// The measured or published figures of a mode, by kind.
struct Row<'a> {
    mode: &'a str,
    is_published: bool,
    parts: Vec<(&'a str, f64)>,
}

#[derive(Template)]
#[template(path = "bars.html")]
struct Bars<'a> {
    label: &'a str,
    /// Kept free for the longest text, in em.
    room: f64,
    rows: Vec<BarRow<'a>>,
}

struct BarRow<'a> {
    mode: &'a str,
    measured: Option<Bar>,
    published: Option<Bar>,
}

/// A bar; `None` in its place where a figure cannot be known.
struct Bar {
    /// In percent of the longest.
    width: f64,
    text: String,
}

#[derive(Template)]
#[template(path = "stack.html")]
struct Stack<'a> {
    label: &'a str,
    room: f64,
    rows: Vec<StackRow<'a>>,
    legend: Vec<(usize, &'a str)>,
}

struct StackRow<'a> {
    mode: &'a str,
    is_published: bool,
    total: String,
    width: f64,
    /// All parts in words.
    summary: String,
    parts: Vec<Part>,
}

struct Part {
    colour: usize,
    x: f64,
    width: f64,
    title: String,
}

/// Draws a group's figures: bars of those that more than one mode has, then the sums by kind.
pub(super) fn draw(rows: &[Named<'_>]) -> Vec<String> {
    let plain = rows.iter().map(|(name, _)| *name).unique();
    let plain = plain.filter(|name| !name.contains(':'));
    let sums = SUMS.map(|name| stack(&label(name, "by kind"), rows_of_kinds(name, rows)));
    plain
        .map(|name| bars(name, rows))
        .chain(sums)
        .flatten()
        .collect()
}

/// Returns a figure's key as a heading.
fn label(key: &str, behind: &str) -> String {
    let words = key.replace(['_', ':'], " ");
    format!("{words} {behind}").trim_end().to_owned()
}

/// Draws the counts of `runs` by kind, in `unit`.
pub(super) fn kinds<'a>(
    label: &str,
    unit: &'a str,
    runs: impl IntoIterator<Item = (&'a str, Vec<(&'a str, f64)>)>,
) -> Option<String> {
    let rows = runs.into_iter().map(|(mode, parts)| Row {
        mode,
        is_published: false,
        parts,
    });
    stack(label, (rows.collect(), unit))
}

/// Draws a bar for each of `values`, its name and its text beside it.
pub(super) fn measured(
    label: &str,
    names: &[String],
    values: impl Iterator<Item = Option<(f64, String)>>,
) -> Option<String> {
    let values = values.collect_vec();
    let largest = largest(values.iter().flatten().map(|(value, _)| *value));
    let rows: Vec<BarRow<'_>> = (names.iter().zip(values))
        .map(|(mode, value)| BarRow {
            mode,
            measured: value.map(|(value, text)| Bar::of(value, largest, text)),
            published: None,
        })
        .collect();
    // One figure by itself is in the table.
    let known = rows.iter().filter(|row| row.measured.is_some()).count();
    (known > 1).then(|| render(&Bars::of(label, rows)))
}

fn bars(name: &str, rows: &[Named<'_>]) -> Option<String> {
    let rows: Vec<&Figure> = rows
        .iter()
        .filter(|(of, _)| *of == name)
        .map(|(_, row)| *row)
        .collect();
    let longest = |of: fn(&Figure) -> Option<f64>| largest(rows.iter().filter_map(|row| of(row)));
    let measured = longest(|row| row.measured);
    let published = longest(|row| row.published);
    let known = rows.iter().flat_map(|row| [row.measured, row.published]);
    // One figure by itself is in the table.
    if known.flatten().count() < 2 {
        return None;
    }
    let bar = |value: Option<f64>, longest, row: &Figure| {
        value.map(|value| Bar::of(value, longest, quantity(value, &row.unit)))
    };
    let rows = rows.iter().map(|row| BarRow {
        mode: &row.mode,
        measured: bar(row.measured, measured, row),
        published: bar(row.published, published, row),
    });
    Some(render(&Bars::of(&label(name, ""), rows.collect())))
}

impl<'a> Bars<'a> {
    fn of(label: &'a str, rows: Vec<BarRow<'a>>) -> Self {
        let bars = rows.iter().flat_map(|row| [&row.measured, &row.published]);
        let room = room(bars.flatten().map(|bar| bar.text.as_str()));
        Self { label, room, rows }
    }
}

/// Returns the room that the longest of `texts` takes beside a bar, in em.
fn room<'a>(texts: impl Iterator<Item = &'a str>) -> f64 {
    let longest = texts.map(|text| text.chars().count()).max().unwrap_or(0);
    (longest as f64 * 6.0).round() / 10.0 + 1.0
}

impl Bar {
    fn of(value: f64, longest: f64, text: String) -> Self {
        let width = percent(value, longest);
        Self { width, text }
    }
}

/// Returns the figures `prefix:KIND`, and their unit: measured ones by mode, then published ones.
fn rows_of_kinds<'a>(prefix: &str, rows: &[Named<'a>]) -> (Vec<Row<'a>>, &'a str) {
    let of_kind = |name: &'a str| name.strip_prefix(prefix)?.strip_prefix(':');
    let rows: Vec<Named<'a>> = rows
        .iter()
        .filter_map(|&(name, row)| Some((of_kind(name)?, row)))
        .collect();
    let modes = rows.iter().map(|(_, row)| row.mode.as_str()).unique();
    let modes = modes.collect_vec();
    let unit = rows.first().map_or("", |(_, row)| &row.unit);
    let select = |mode: &'a str, is_published: bool| Row {
        mode,
        is_published,
        parts: rows
            .iter()
            .filter(|(_, row)| row.mode == mode)
            .filter_map(|&(kind, row)| {
                let value = if is_published {
                    row.published
                } else {
                    row.measured
                };
                Some((kind, value.filter(|&value| value > 0.0)?))
            })
            .collect(),
    };
    let measured = modes.iter().map(|&mode| select(mode, false));
    let published = modes.iter().map(|&mode| select(mode, true));
    let known = measured
        .chain(published)
        .filter(|row| !row.parts.is_empty());
    (known.collect(), unit)
}

fn stack(label: &str, (rows, unit): (Vec<Row<'_>>, &str)) -> Option<String> {
    let mut sums: Vec<(&str, f64)> = Vec::new();
    for row in &rows {
        // Each bar weighs the same: else the kinds of the largest would have all the colours.
        let total = row.total();
        for &(kind, value) in &row.parts {
            match sums.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, sum)) => *sum += value / total,
                None => sums.push((kind, value / total)),
            }
        }
    }
    if sums.len() < 2 {
        return None;
    }
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    let rest = sums.len() > COLOURS;
    sums.truncate(if rest { COLOURS - 1 } else { COLOURS });
    let mut legend: Vec<(usize, &str)> = sums.iter().map(|(kind, _)| *kind).enumerate().collect();
    if rest {
        legend.push((COLOURS, "other kinds"));
    }
    let longest = |is_published| {
        let rows = rows.iter().filter(|row| row.is_published == is_published);
        largest(rows.map(Row::total))
    };
    let longest = [longest(false), longest(true)];
    let rows: Vec<StackRow<'_>> = rows
        .iter()
        .map(|row| row.draw(&legend, longest[usize::from(row.is_published)], unit))
        .collect();
    Some(render(&Stack {
        label,
        room: room(rows.iter().map(|row| row.total.as_str())),
        rows,
        legend,
    }))
}

impl<'a> Row<'a> {
    fn total(&self) -> f64 {
        self.parts.iter().map(|(_, value)| value).sum()
    }

    fn draw(&self, legend: &[(usize, &str)], longest: f64, unit: &str) -> StackRow<'a> {
        let total = self.total();
        let mut x = 0.0;
        let mut parts = Vec::new();
        for &(colour, name) in legend {
            let is_rest = colour == COLOURS;
            let of = |kind: &str| legend.iter().any(|&(_, known)| known == kind);
            let values = self.parts.iter().filter(|&&(kind, _)| match is_rest {
                true => !of(kind),
                false => kind == name,
            });
            let value: f64 = values.map(|(_, value)| value).sum();
            if value > 0.0 {
                let width = percent(value, total);
                parts.push(Part {
                    colour,
                    x,
                    width,
                    title: format!("{name}: {}", quantity(value, unit)),
                });
                x += width;
            }
        }
        StackRow {
            mode: self.mode,
            is_published: self.is_published,
            total: quantity(total, unit),
            width: percent(total, longest),
            summary: parts.iter().map(|part| &part.title).join(", "),
            parts,
        }
    }
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.filter(|value| value.is_finite()).fold(0.0, f64::max)
}

/// Returns the percentage that `part` is of `whole`, with two digits behind the point: more than 0 for any part, and 0
/// for what is none.
pub(super) fn percent(part: f64, whole: f64) -> f64 {
    let percent = (part / whole * 10_000.0).round() / 100.0;
    if part > 0.0 && percent.is_finite() {
        percent.clamp(0.01, 100.0)
    } else {
        0.0
    }
}
