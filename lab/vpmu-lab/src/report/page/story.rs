//! The words about a bench that stand beside its figures in the HTML page.
//!
//! A sentence names its figures by their keys in the JSON, so no figure in it is older than the run:
//!
//! | in a sentence | becomes |
//! |---|---|
//! | `{exits_per_pmi@kvm}` | the measured figure with its unit |
//! | `{exits_per_pmi@kvm!}` | the published figure with its unit |
//! | `{exits_per_pmi@kvm/partitioned}` | how often the second figure goes into the first |
//! | `{exits_per_pmi@kvm/partitioned!}` | the same of the published figures |

use super::super::number::{factor, quantity};
use super::super::saved::{Bench, Figure};

/// The story of a bench: what its figures mean.
#[derive(Debug)]
pub struct Story {
    /// The bench's subject, the section's heading.
    pub title: &'static str,
    /// When, and for what, the figures beside the measured ones were published.
    pub published: &'static str,
    /// Sentences with figures in braces. A sentence whose figures are not all known is left out.
    pub sentences: &'static [&'static str],
    /// The figure that stands for the bench at the top of the page.
    pub highlight: Highlight,
    /// The drawings of each group of figures, in order. Figures that a group lacks are left out.
    pub charts: &'static [Chart<'static>],
}

/// A figure under two designs.
#[derive(Debug)]
pub struct Highlight {
    /// The figure's name for a reader.
    pub label: &'static str,
    /// The figure's key.
    pub figure: &'static str,
    /// The mode that the bench starts from; `None` where nothing is compared.
    pub from: Option<&'static str>,
    /// The mode that the bench is about.
    pub to: &'static str,
}

/// A drawing.
#[derive(Debug, Clone, Copy)]
pub struct Chart<'a> {
    /// The figure's key without the group's suffix, or the part of the keys before the colon.
    pub figure: &'a str,
    /// The heading.
    pub label: &'a str,
    /// The kind of drawing.
    pub kind: Kind,
}

/// The kinds of drawing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A bar for each mode.
    Bars,
    /// A bar for each mode, of the kinds behind the colon.
    Stack,
    /// As [`Kind::Stack`], each bar of the same length.
    Shares,
}

/// Fills in the figures of `sentence`; `None` when one is not known.
pub(super) fn fill(sentence: &str, bench: &Bench) -> Option<String> {
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

fn value(key: &str, bench: &Bench) -> Option<String> {
    let of: fn(&Figure) -> Option<f64> = match key.ends_with('!') {
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
    fn sentences_are_filled_or_left_out() {
        let bench: Bench = serde_json::from_str(
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
