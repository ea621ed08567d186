//! The section of a bench: what its figures mean, the drawings, and all figures in tables.

use super::super::figures::{Report, Row};
use super::super::number::{factor, number, quantity};
use super::super::story::Page;
use super::super::tables::tables;
use super::draw::{draw, percent};
use super::{Claim, Figures, Group, Section, Side};

/// Makes the section of the bench in `file`, whose page is `known`.
pub(super) fn section(file: &str, bench: &Report, known: Option<Page>) -> Section {
    let title = known
        .as_ref()
        .map_or(bench.bench.as_str(), |page| page.title);
    let page = &known.unwrap_or_else(|| Page::parse(""));
    let id = file.trim_end_matches(".json").to_owned();
    // Only other vendors' results are saved beside a bench's own.
    let variant = match id.strip_prefix(bench.bench.as_str()) {
        Some("") | None => String::new(),
        Some(ending) => format!(" ({})", ending.trim_start_matches('-').to_uppercase()),
    };
    let all: Vec<_> = page
        .groups
        .iter()
        .map(|group| (group.heading.replace('`', ""), page.rows(group, bench)))
        .collect();
    let groups = all.iter().map(|(heading, rows)| Group {
        heading: heading.clone(),
        drawings: draw(rows),
    });
    let qemu = bench.qemu.as_deref();
    let qemu = qemu.map(|qemu| format!(", measured on QEMU {qemu}"));
    Section {
        title: format!("{title}{variant}"),
        kicker: format!("bench {}{}", bench.bench, qemu.unwrap_or_default()),
        command: None,
        sentences: page.sentences(bench).flatten().collect(),
        groups: groups.filter(|group| !group.drawings.is_empty()).collect(),
        figures: all
            .iter()
            .flat_map(|(_, rows)| tables(rows).iter().map(Figures::of).collect::<Vec<_>>())
            .collect(),
        lead: None,
        claim: claim(&id, &variant, page, bench),
        file: file.to_owned(),
        id,
    }
}

fn claim(id: &str, variant: &str, page: &Page, bench: &Report) -> Option<Claim> {
    let (key, label) = page.claim;
    let (figure, modes) = key.split_once('@')?;
    let (from, to) = match modes.split_once('/') {
        Some((from, to)) => (bench.find(figure, from), to),
        None => (None, modes),
    };
    let to = bench.find(figure, to)?;
    let side = |of: fn(&Row) -> Option<f64>| {
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
        label: format!("{label}{variant}"),
        modes: modes.replace('/', " → "),
        measured: side(|row| row.measured)?,
        published: side(|row| row.published),
    })
}
