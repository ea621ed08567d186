//! The section of a bench: what its figures mean, the drawings, and all figures in tables.

use super::super::markdown::{self, Page};
use super::super::number::{factor, number, quantity};
use super::super::saved::{self, Figure, tables, unique};
use super::draw::{draw, percent};
use super::story::{Chart, Kind, Story, fill};
use super::{Claim, Figures, Group, Section, Side};

/// The drawings of a bench without a story, at most.
const DRAWN: usize = 6;

/// What the page knows of a bench besides its figures.
#[derive(Debug, Clone, Copy)]
pub struct About {
    /// The bench's page in Markdown, for the groups of its figures.
    pub page: &'static Page,
    /// The bench's story, where it has one.
    pub story: Option<&'static Story>,
}

/// The page of a bench that this vpmu does not know.
const UNKNOWN: Page = Page {
    title: "",
    intro: "",
    groups: &[markdown::Group::new("", "")],
};

/// Makes the section of the bench in `file`.
pub(super) fn section(file: &str, bench: &saved::Bench, about: Option<About>) -> Section {
    let page = about.map_or(&UNKNOWN, |about| about.page);
    let story = about.and_then(|about| about.story);
    let id = file.trim_end_matches(".json").to_owned();
    // Only other vendors' results are saved beside a bench's own.
    let variant = match id.strip_prefix(bench.bench.as_str()) {
        Some("") | None => String::new(),
        Some(ending) => format!(" ({})", ending.trim_start_matches('-').to_uppercase()),
    };
    let title = story.map_or(bench.bench.as_str(), |story| story.title);
    let mut groups: Vec<Group> = page
        .groups
        .iter()
        .map(|group| {
            let rows = bench.group(page, group);
            let charts = story.map_or_else(|| default_charts(&rows), |story| story.charts.to_vec());
            Group {
                heading: group.heading.replace('`', ""),
                drawings: charts
                    .iter()
                    .filter_map(|&chart| draw(chart, &rows))
                    .collect(),
            }
        })
        .filter(|group| !group.drawings.is_empty())
        .collect();
    let first = if groups.is_empty() {
        None
    } else {
        Some(groups.remove(0))
    };
    let all = page.groups.iter().map(|group| bench.group(page, group));
    Section {
        title: format!("{title}{variant}"),
        kicker: kicker(bench, story),
        command: None,
        sentences: story.map_or_else(Vec::new, |story| {
            let sentences = story.sentences.iter();
            sentences
                .filter_map(|sentence| fill(sentence, bench))
                .collect()
        }),
        first,
        others: groups,
        figures: all
            .flat_map(|rows| tables(&rows).iter().map(Figures::of).collect::<Vec<_>>())
            .collect(),
        lead: None,
        claim: story.and_then(|story| claim(&id, &variant, story, bench)),
        file: file.to_owned(),
        id,
    }
}

/// Says where the figures are from.
fn kicker(bench: &saved::Bench, story: Option<&Story>) -> String {
    let mut text = format!("bench {}", bench.bench);
    if let Some(story) = story {
        text += &format!(", published {}", story.published);
    }
    if let Some(qemu) = &bench.qemu {
        text += &format!(", measured on QEMU {qemu}");
    }
    text
}

/// Returns bars for the figures that more than one mode has.
fn default_charts<'a>(rows: &[saved::Named<'a>]) -> Vec<Chart<'a>> {
    let names = unique(rows.iter().map(|(name, _)| *name));
    let known = |name: &&str| {
        let rows = rows
            .iter()
            .filter(|(of, row)| of == name && row.measured.is_some());
        rows.count() > 1
    };
    let chart = |name: &'a str| Chart {
        figure: name,
        label: name,
        kind: Kind::Bars,
    };
    names
        .into_iter()
        .filter(known)
        .take(DRAWN)
        .map(chart)
        .collect()
}

fn claim(id: &str, variant: &str, story: &Story, bench: &saved::Bench) -> Option<Claim> {
    let highlight = &story.highlight;
    let to = bench.find(highlight.figure, highlight.to)?;
    let from = highlight
        .from
        .and_then(|mode| bench.find(highlight.figure, mode));
    let side = |of: fn(&Figure) -> Option<f64>| {
        let (from, value) = (from.and_then(of), of(to)?);
        Some(Side {
            from: from.map(|from| number(from, &to.unit)),
            to: quantity(value, &to.unit),
            factor: from.and_then(|from| factor(from, value)),
            left: from.map(|from| percent(value, from)),
        })
    };
    Some(Claim {
        id: id.to_owned(),
        label: format!("{}{variant}", highlight.label),
        modes: match highlight.from {
            Some(from) => format!("{from} → {}", highlight.to),
            None => highlight.to.to_owned(),
        },
        measured: side(|row| row.measured)?,
        published: side(|row| row.published),
    })
}
