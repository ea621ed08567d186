//! Makes a page in Markdown of a bench's results, which `vpmu bench NAME --json FILE` writes.
//!
//! Pages in `docs/results` are made from the JSON beside them, by `tests/results.rs`, so a figure in a page cannot be
//! older than the run.

use serde::Deserialize;

use crate::{Error, Result};

/// A page's text beside its figures. It names no figure of a run.
#[derive(Debug)]
pub struct Page {
    /// The first heading.
    pub title: &'static str,
    /// How the figures were measured.
    pub intro: &'static str,
    /// The figures in groups; a figure without a group of its own is in the first.
    pub groups: &'static [Group],
}

/// A group of figures: those whose names end with `suffix`.
#[derive(Debug)]
pub struct Group {
    /// The end of the figures' names, such as `:idle`; empty for the first group.
    pub suffix: &'static str,
    /// The group's heading.
    pub heading: &'static str,
}

#[derive(Deserialize)]
struct Figures {
    rows: Vec<Figure>,
}

#[derive(Deserialize)]
struct Figure {
    figure: String,
    mode: String,
    measured: Option<f64>,
    published: Option<f64>,
    unit: String,
}

/// Returns the page of `bench`, with the figures in `json`, followed by those of `--model amd` in `amd`.
///
/// # Errors
///
/// When either file was not written by `vpmu bench --json`.
pub fn markdown(bench: &str, page: &Page, json: &[u8], amd: Option<&[u8]>) -> Result<String> {
    let (files, of_them) = match amd {
        Some(_) => (format!("{bench}.json and {bench}-amd.json"), "none"),
        None => (format!("{bench}.json"), "neither"),
    };
    let mut text = format!(
        "# {}\n\n<!-- Made of {files} by tests/results.rs of vpmu-lab: edit {of_them} by hand. -->\n\n{}",
        page.title, page.intro
    );
    text += &page.figures(json, "##")?;
    if let Some(amd) = amd {
        text += "\n## AMD's PMU (`--model amd`)\n";
        text += &page.figures(amd, "###")?;
    }
    Ok(text)
}

impl Page {
    /// Writes the groups under headings that begin with `level`.
    fn figures(&self, json: &[u8], level: &str) -> Result<String> {
        let figures: Figures = serde_json::from_slice(json)
            .map_err(|error| Error::Usage(format!("not the JSON of a bench: {error}")))?;
        let mut text = String::new();
        for group in self.groups {
            let rows: Vec<(&str, &Figure)> = figures
                .rows
                .iter()
                .filter(|row| self.group_of(&row.figure).suffix == group.suffix)
                .map(|row| {
                    let name = row.figure.strip_suffix(group.suffix).unwrap_or(&row.figure);
                    (name, row)
                })
                .collect();
            if !rows.is_empty() {
                text += &format!("\n{level} {}\n", group.heading);
                text += &tables(&rows);
            }
        }
        Ok(text)
    }

    fn group_of(&self, figure: &str) -> &Group {
        self.groups
            .iter()
            .find(|group| !group.suffix.is_empty() && figure.ends_with(group.suffix))
            .unwrap_or(&self.groups[0])
    }
}

/// Writes a table of the plain figures, and a table for each kind. A figure's kind stands before a colon.
fn tables(rows: &[(&str, &Figure)]) -> String {
    let kind = |name: &str| name.split_once(':').map(|(kind, _)| kind.to_owned());
    let mut kinds = Vec::new();
    for (name, _) in rows {
        if !kinds.contains(&kind(name)) {
            kinds.push(kind(name));
        }
    }
    // The plain figures come first.
    kinds.sort_by_key(Option::is_some);
    kinds
        .iter()
        .map(|wanted| {
            let rows: Vec<_> = rows
                .iter()
                .filter(|(name, _)| kind(name) == *wanted)
                .map(|&(name, row)| (name.split_once(':').map_or(name, |(_, rest)| rest), row))
                .collect();
            table(wanted.as_deref().unwrap_or("figure"), &rows)
        })
        .collect()
}

fn table(title: &str, rows: &[(&str, &Figure)]) -> String {
    let mut modes: Vec<&str> = Vec::new();
    let mut published: Vec<&str> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for (name, row) in rows {
        for (list, value, wanted) in [
            (&mut modes, row.mode.as_str(), true),
            (&mut published, row.mode.as_str(), row.published.is_some()),
            (&mut names, *name, true),
        ] {
            if wanted && !list.contains(&value) {
                list.push(value);
            }
        }
    }
    // A mode may lack a bucket that another has.
    if names.iter().all(|name| name.parse::<u64>().is_ok()) {
        names.sort_by_key(|name| name.parse::<u64>().ok());
    }
    let mut text = format!("\n| {title} | {} |", modes.join(" | "));
    for mode in &published {
        text += &format!(" published: {mode} |");
    }
    text += &format!("\n|---|{}\n", "---|".repeat(modes.len() + published.len()));
    for name in names {
        let of = |mode: &str| {
            let found = rows
                .iter()
                .find(|(of, row)| *of == name && row.mode == mode);
            found.map(|(_, row)| *row)
        };
        text += &format!("| `{name}` |");
        for mode in &modes {
            text += &cell(of(mode), |row| row.measured, "-");
        }
        for mode in &published {
            text += &cell(of(mode), |row| row.published, "");
        }
        text += "\n";
    }
    text
}

/// Writes a figure: `unknown` where it could not be known, nothing where there is none.
fn cell(row: Option<&Figure>, value: impl Fn(&Figure) -> Option<f64>, unknown: &str) -> String {
    let text = row.map_or(String::new(), |row| {
        value(row).map_or(unknown.to_owned(), |value| number(value, &row.unit))
    });
    format!(" {text} |")
}

/// Writes a number with commas between thousands, and three decimals at most.
fn number(value: f64, unit: &str) -> String {
    let text = format!("{:.3}", value.abs());
    let (whole, decimals) = text.split_once('.').unwrap_or((&text, ""));
    let mut grouped = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    let decimals = decimals.trim_end_matches('0');
    let sign = if value < 0.0 { "-" } else { "" };
    let point = if decimals.is_empty() { "" } else { "." };
    let unit = if unit == "percent" { " %" } else { "" };
    format!("{sign}{grouped}{point}{decimals}{unit}")
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
    const PAGE: Page = Page {
        title: "Title",
        intro: "Intro.\n",
        groups: &[
            Group {
                suffix: "",
                heading: "Busy",
            },
            Group {
                suffix: ":idle",
                heading: "Idle",
            },
        ],
    };

    #[test]
    fn figures_are_in_tables() {
        let text = markdown("b", &PAGE, JSON.as_bytes(), None).unwrap();
        let (_, body) = text.split_once("Intro.\n").unwrap();
        let expected = "
## Busy

| figure | plain | lazy | published: plain | published: lazy |
|---|---|---|---|---|
| `exits` | 22,841 | 207 | 7,512,945 |  |
| `gone` |  | -0.5 % |  | 97.25 % |

| exits | plain |
|---|---|
| `halt` | 9 |

## Idle

| figure | plain |
|---|---|
| `exits` | - |
";
        assert_eq!(body, expected);
    }

    #[test]
    fn amds_figures_stand_behind_intels() {
        let json = JSON.as_bytes();
        let (one, both) = (
            markdown("b", &PAGE, json, None),
            markdown("b", &PAGE, json, Some(json)),
        );
        let (one, both) = (one.unwrap(), both.unwrap());
        assert!(both.contains("b.json and b-amd.json"));
        let tables = |text: &str| text.matches("| `exits` |").count();
        assert_eq!((tables(&one), tables(&both)), (2, 4));
        assert!(
            both.contains("\n## AMD's PMU (`--model amd`)\n\n### Busy\n"),
            "{both}"
        );
        assert!(markdown("b", &PAGE, json, Some(b"{}")).is_err());
    }

    #[test]
    fn numbers_are_grouped() {
        for (value, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (1000.0, "1,000"),
            (12_617_503.0, "12,617,503"),
            (1234.5678, "1,234.568"),
            (-100.0, "-100"),
        ] {
            assert_eq!(number(value, ""), text);
        }
    }

    #[test]
    fn what_is_no_result_is_refused() {
        assert!(markdown("b", &PAGE, b"{}", None).is_err());
    }
}
