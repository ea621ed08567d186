//! The figures of a bench as tables.

use itertools::Itertools;

use super::figures::Row;
use super::number::number;

/// A figure with its name in its group: without the group's suffix.
pub(super) type Named<'a> = (&'a str, &'a Row);

/// A table of figures of one kind: a line for each figure, a column for each mode.
pub(super) struct Table<'a> {
    /// The part of the figures' names before the colon; `None` for figures without a kind.
    pub(super) kind: Option<&'a str>,
    /// The columns of measured figures.
    pub(super) modes: Vec<&'a str>,
    /// The columns of published figures.
    pub(super) published: Vec<&'a str>,
    pub(super) lines: Vec<Line<'a>>,
}

/// One figure in a [`Table`].
pub(super) struct Line<'a> {
    pub(super) name: &'a str,
    pub(super) unit: &'a str,
    /// `-` where the figure could not be known, empty where there is none.
    pub(super) cells: Vec<String>,
}

/// Returns a table of the plain figures, then a table for each kind.
pub(super) fn tables<'a>(rows: &[Named<'a>]) -> Vec<Table<'a>> {
    let kind = |name: &'a str| name.split_once(':').map(|(kind, _)| kind);
    let kinds = rows.iter().map(|(name, _)| kind(name)).unique();
    // The plain figures come first.
    kinds
        .sorted_by_key(Option::is_some)
        .map(|wanted| {
            let rows: Vec<Named<'a>> = rows
                .iter()
                .filter(|(name, _)| kind(name) == wanted)
                .map(|&(name, row)| (name.split_once(':').map_or(name, |(_, rest)| rest), row))
                .collect();
            Table::of(wanted, &rows)
        })
        .collect()
}

impl<'a> Table<'a> {
    fn of(kind: Option<&'a str>, rows: &[Named<'a>]) -> Self {
        let mode = |(_, row): &Named<'a>| row.mode.as_str();
        let modes = rows.iter().map(mode).unique().collect_vec();
        let has_published = rows.iter().filter(|(_, row)| row.published.is_some());
        let published = has_published.map(mode).unique().collect_vec();
        let mut names = rows.iter().map(|&(name, _)| name).unique().collect_vec();
        // A mode may lack a bucket that another has.
        if names.iter().all(|name| name.parse::<u64>().is_ok()) {
            names.sort_by_key(|name| name.parse::<u64>().ok());
        }
        let line = |name: &'a str| {
            let here = || rows.iter().filter(move |(of, _)| *of == name);
            let of = |mode: &str| {
                here()
                    .find(|(_, row)| row.mode == mode)
                    .map(|(_, row)| *row)
            };
            let measured = modes
                .iter()
                .map(|mode| cell(of(mode), |row| row.measured, "-"));
            let published = published
                .iter()
                .map(|mode| cell(of(mode), |row| row.published, ""));
            Line {
                name,
                unit: here().next().map_or("", |(_, row)| &row.unit),
                cells: measured.chain(published).collect(),
            }
        };
        Self {
            kind,
            lines: names.into_iter().map(line).collect(),
            modes,
            published,
        }
    }
}

fn cell(row: Option<&Row>, value: impl Fn(&Row) -> Option<f64>, unknown: &str) -> String {
    row.map_or(String::new(), |row| {
        value(row).map_or(unknown.to_owned(), |value| number(value, &row.unit))
    })
}
