//! Makes a page in Markdown of a bench's results, which `vpmu bench NAME --json FILE` writes.
//!
//! Pages in `docs/results` are made from the JSON beside them, by `tests/results.rs`, so a figure in a page cannot be
//! older than the run. A page has what a bench is about; the details (`DETAILS`) are in the JSON and in the HTML page.

use super::figures::Report;
use super::story::Page;
use super::tables::{Table, tables};
use crate::spec::design::Backing;

/// Kinds of figures that explain the others: distributions, and counts by cause. They are most of a long bench's rows, and
/// are read where they can be drawn.
const DETAILS: [&str; 4] = ["guest", "latency_ns", "msr_writes", "woken"];

/// Returns the page of a bench with its figures, followed by those of `--model amd` in `amd`.
pub fn markdown(page: &Page, bench: &Report, amd: Option<&Report>) -> String {
    let name = &bench.bench;
    let (files, of_them) = match amd {
        Some(_) => (format!("{name}.json and {name}-amd.json"), "none"),
        None => (format!("{name}.json"), "neither"),
    };
    let mut text = format!(
        "# {}\n\n<!-- Made of {files} by tests/results.rs of vpmu-lab: edit {of_them} by hand. -->\n\n",
        page.title
    );
    for sentence in page.sentences(bench).flatten() {
        text += &format!("{sentence}\n");
    }
    text += &format!("\n{}{}", page.method, figures(page, bench, "##"));
    if let Some(amd) = amd {
        text += "\n## AMD's PMU (`--model amd`)\n";
        text += &figures(page, amd, "###");
    }
    text
}

/// Writes the groups under headings that begin with `level`.
fn figures(page: &Page, bench: &Report, level: &str) -> String {
    let counted = |backing: Backing| format!("\nCounted by {}.\n", backing.counter());
    let mut text = bench.backing.map_or_else(String::new, counted);
    for group in &page.groups {
        let rows = page.rows(group, bench);
        if !rows.is_empty() {
            text += &format!("\n{level} {}\n", group.heading);
            let shown = |of: &&Table<'_>| of.kind.is_none_or(|kind| !DETAILS.contains(&kind));
            text.extend(tables(&rows).iter().filter(shown).map(table));
        }
    }
    text
}

/// Writes a table. Its first column is headed by the figures' kind.
fn table(table: &Table<'_>) -> String {
    let title = table.kind.unwrap_or("figure");
    let mut text = format!("\n| {title} | {} |", table.modes.join(" | "));
    for mode in &table.published {
        text += &format!(" published: {mode} |");
    }
    let columns = table.modes.len() + table.published.len();
    text += &format!("\n|---|{}\n", "---|".repeat(columns));
    for line in &table.lines {
        text += &format!("| `{}` | {} |\n", line.name, line.cells.join(" | "));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"schema":1,"bench":"b","rows":[
        {"figure":"exits","mode":"plain","measured":22841.0,"published":7512945.0,"unit":"exits"},
        {"figure":"exits","mode":"lazy","measured":207.0,"published":null,"unit":"exits"},
        {"figure":"exits:halt","mode":"plain","measured":9.0,"published":null,"unit":"exits"},
        {"figure":"gone","mode":"lazy","measured":-0.5,"published":97.25,"unit":"percent"},
        {"figure":"exits:idle","mode":"plain","measured":null,"published":null,"unit":"exits"}]}"#;
    const PAGE: &str = "claim exits@plain/lazy: Exits\ngroup: Busy\ngroup :idle: Idle\n\n\
        # Title\n\nIt has {gone@lazy!}.\nNot known: {exits:idle@plain}.\n\nMethod.\n";

    fn read(json: &str) -> serde_json::Result<Report> {
        serde_json::from_str(json)
    }

    #[test]
    fn figures_are_in_tables() {
        let text = markdown(&Page::parse(PAGE), &read(JSON).unwrap(), None);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn amds_figures_stand_behind_intels() {
        let report = &read(JSON).unwrap();
        let page = Page::parse(PAGE);
        let one = markdown(&page, report, None);
        let both = markdown(&page, report, Some(report));
        assert!(both.contains("b.json and b-amd.json"));
        let tables = |text: &str| text.matches("| `exits` |").count();
        assert_eq!((tables(&one), tables(&both)), (2, 4));
        assert!(
            both.contains("\n## AMD's PMU (`--model amd`)\n\n### Busy\n"),
            "{both}"
        );
    }

    #[test]
    fn what_is_no_result_is_refused() {
        assert!(read("{}").is_err());
    }
}
