//! What a bench's figures mean: the page of the bench, as a file beside it has it.
//!
//! Lines with names stand first: `about: SUBJECT`, `claim FIGURE@MODE: NAME` or `claim FIGURE@FROM/TO: NAME`, and one
//! `group SUFFIX: HEADING` or more. Then a title, a paragraph that says what the figures mean, a sentence on each line, and
//! how they were measured. A sentence names its figures by their keys in the JSON, so no figure in it is older than the run:
//!
//! | in a sentence | becomes |
//! |---|---|
//! | `{exits_per_pmi@kvm}` | the measured figure with its unit |
//! | `{exits_per_pmi@kvm!}` | the published figure with its unit |
//! | `{exits_per_pmi@kvm/partitioned}` | how often the second figure goes into the first |
//! | `{exits_per_pmi@kvm/partitioned!}` | the same of the published figures |

use super::figures::{Report, Row};
use super::number::{factor, quantity};
use super::tables::Named;

/// A bench's page without its figures.
#[derive(Debug)]
pub struct Page {
    /// What the bench is about, in a line.
    pub about: &'static str,
    pub(super) title: &'static str,
    /// What the figures mean.
    story: &'static str,
    /// How the figures were measured.
    pub(super) method: &'static str,
    /// The figure that stands for the bench at the top of the HTML page, and its name for a reader.
    pub(super) claim: (&'static str, &'static str),
    /// The figures in groups; a figure without a group of its own is in the first.
    pub(super) groups: Vec<Group>,
}

/// A group of figures: those whose names end with `suffix`.
#[derive(Debug)]
pub(super) struct Group {
    /// The end of the figures' names, such as `:idle`; may be empty for the first group.
    pub(super) suffix: &'static str,
    pub(super) heading: &'static str,
}

impl Page {
    /// Reads a page's text, as the module says. What is missing is empty.
    pub fn parse(text: &'static str) -> Self {
        let (head, body) = text.split_once("\n# ").unwrap_or_default();
        let mut parts = body.splitn(3, "\n\n");
        let mut part = || parts.next().unwrap_or_default();
        let mut page = Self {
            about: "",
            title: part(),
            story: part(),
            method: part(),
            claim: ("", ""),
            groups: Vec::new(),
        };
        for (key, text) in head.lines().filter_map(|line| line.split_once(": ")) {
            match key.split_once(' ').unwrap_or((key, "")) {
                ("about", _) => page.about = text,
                ("claim", figure) => page.claim = (figure, text),
                (_, suffix) => page.groups.push(Group {
                    suffix,
                    heading: text,
                }),
            }
        }
        if page.groups.is_empty() {
            page.groups.push(Group {
                suffix: "",
                heading: "",
            });
        }
        page
    }

    /// Returns the sentences that say what the figures mean; `None` for a sentence whose figures are not all known.
    pub(super) fn sentences(&self, bench: &Report) -> impl Iterator<Item = Option<String>> {
        self.story.lines().map(|sentence| fill(sentence, bench))
    }

    /// Returns the figures of one of the groups, in the file's order.
    pub(super) fn rows<'a>(&self, group: &Group, bench: &'a Report) -> Vec<Named<'a>> {
        bench
            .rows
            .iter()
            .filter(|row| self.group_of(&row.figure).suffix == group.suffix)
            .map(|row| {
                let name = row.figure.strip_suffix(group.suffix).unwrap_or(&row.figure);
                (name, row)
            })
            .collect()
    }

    /// Returns the group that `figure` belongs to.
    fn group_of(&self, figure: &str) -> &Group {
        self.groups
            .iter()
            .find(|group| !group.suffix.is_empty() && figure.ends_with(group.suffix))
            .unwrap_or(&self.groups[0])
    }
}

/// Fills in the figures of `sentence`; `None` when one is not known.
fn fill(sentence: &str, bench: &Report) -> Option<String> {
    let mut text = String::new();
    let mut rest = sentence;
    while let Some((before, behind)) = rest.split_once('{') {
        let (key, after) = behind.split_once('}')?;
        text += before;
        text += &value(key, bench)?;
        rest = after;
    }
    Some(text + rest)
}

fn value(key: &str, bench: &Report) -> Option<String> {
    let of: fn(&Row) -> Option<f64> = match key.ends_with('!') {
        true => |row| row.published,
        false => |row| row.measured,
    };
    let (figure, modes) = key.trim_end_matches('!').split_once('@')?;
    let known = |mode| {
        let row = bench.find(figure, mode)?;
        Some((of(row)?, row.unit.as_str()))
    };
    match modes.split_once('/') {
        Some((from, to)) => factor(known(from)?.0, known(to)?.0),
        None => known(modes).map(|(value, unit)| quantity(value, unit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_its_parts() {
        let text = "about: It\nclaim n:x@old/new: Name\ngroup: First: one\ngroup :x: Second\n\n# Title\n\nA.\nB.\n\nHow.\n\nWhere.\n";
        let page = Page::parse(text);
        assert_eq!(
            (page.about, page.title, page.story),
            ("It", "Title", "A.\nB.")
        );
        assert_eq!(page.method, "How.\n\nWhere.\n");
        assert_eq!(page.claim, ("n:x@old/new", "Name"));
        let groups = page
            .groups
            .iter()
            .map(|group| (group.suffix, group.heading));
        let groups: Vec<_> = groups.collect();
        assert_eq!(groups, [("", "First: one"), (":x", "Second")]);
    }

    #[test]
    fn sentences_are_filled_or_left_out() {
        let bench: Report = serde_json::from_str(
            r#"{"schema":1,"bench":"b","rows":[
            {"figure":"t:x","mode":"old","measured":1639.5,"published":4.0,"unit":"ns"},
            {"figure":"t:x","mode":"new","measured":998.0,"published":2.0,"unit":"ns"},
            {"figure":"n","mode":"new","measured":null,"published":1.0,"unit":"exits"}]}"#,
        )
        .unwrap();
        for (sentence, text) in [
            ("No figure.", Some("No figure.")),
            ("{t:x@old} or {t:x@new!}.", Some("1,639.5 ns or 2 ns.")),
            ("{t:x@old/new}, {t:x@old/new!}", Some("1.64, 2")),
            ("{n@new!}", Some("1 exit")),
            ("unknown: {n@new}", None),
            ("no such mode: {n@old}", None),
            ("not closed: {n@new", None),
        ] {
            assert_eq!(fill(sentence, &bench).as_deref(), text, "{sentence}");
        }
    }
}
