//! `vpmu top`: the guests' statistics as a live table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use itertools::Itertools;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Cell, Paragraph, Row as TableRow, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use serde_json::{Value, json};
use vpmu_lab::host::cancel::Cancel;
use vpmu_lab::{Error, Result, usage};

use super::{NONE, Row, Span, rows};
use crate::print::print;
use crate::values::seconds;

pub(crate) const AFTER: &str = "\
Columns: PMI/s, EXITS/s (exits to the VMM), SAMPLES/s (PMIs and PEBS records), GUEST and HOST (the parts of one CPU that the \
guest ran, and that the vCPU's thread ran without it, by the kernel's clock ticks), PMU and BACKING (what counts), LOST since the \
vCPU began, and why.

Keys: p, e, s, h, l, n sort by PMIs, exits, samples, host time, losses, guest; up and down choose a vCPU, Enter looks into it, \
Esc goes back; q or Ctrl-C ends.

--once --json prints an object with \"schema\": 1, \"seconds\" and \"vcpus\", a list with \"pid\", \"guest\", \"vcpu\", \
\"thread\", \"pmu\", \"backing\", \"per_second\" (\"pmis\", \"exits\", \"samples\"), \"guest_share\", \"host_share\", \"exits\", \"lost\", \
\"why\" and \"figures\"; exits, lost and figures are totals. Without a guest vcpus is empty.

Exit status: 0; 125 when files of guests cannot be read, 130 after a signal.";

/// Time between two looks for a signal.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct Top {
    /// Print one table and end
    #[arg(long)]
    once: bool,
    /// Print JSON
    #[arg(long, requires = "once")]
    json: bool,
    /// Time between two readings, over which rates are taken
    #[arg(long, value_name = "SECS", default_value = "1", value_parser = seconds)]
    interval: Duration,
}

pub(crate) fn top(options: &Top, cancel: &Cancel) -> Result<()> {
    if options.once {
        return once(options, cancel);
    }
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        return usage(
            "a live table needs a terminal: --once prints one, --once --json for programs",
        );
    }
    let mut view = View::new(rows()?);
    // Also makes a panic restore the terminal.
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let ended = live(&mut view, &mut terminal, options.interval, cancel);
    ratatui::restore();
    ended?;
    cancel.check()
}

fn failed(source: io::Error) -> Error {
    Error::file("use", "the terminal")(source)
}

fn once(options: &Top, cancel: &Cancel) -> Result<()> {
    let (before, begun) = (rows()?, Instant::now());
    while begun.elapsed() < options.interval && !before.is_empty() {
        cancel.check()?;
        thread::sleep(
            options
                .interval
                .saturating_sub(begun.elapsed())
                .min(PATIENCE),
        );
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let spans = Span::all(&before, rows()?, elapsed);
    let text = match (options.json, spans.is_empty()) {
        (true, _) => format!("{}\n", json(&spans, elapsed)),
        (false, true) => format!("{NONE}\n"),
        (false, false) => table(&spans),
    };
    print(&text)
}

fn json(spans: &[Span], seconds: f64) -> Value {
    let vcpu = |span: &Span| {
        let row = &span.row;
        json!({
            "pid": row.pid,
            "guest": row.guest,
            "vcpu": row.vcpu.number,
            "thread": row.vcpu.thread,
            "pmu": row.vcpu.pmu,
            "backing": row.vcpu.backing.map(|_| row.backing()),
            "per_second": {"pmis": span.pmis, "exits": span.exits, "samples": span.samples},
            "guest_share": span.guest,
            "host_share": span.host,
            "exits": row.exits().collect::<BTreeMap<_, _>>(),
            "lost": row.lost().into_iter().collect::<BTreeMap<_, _>>(),
            "why": row.why(),
            "figures": row.vcpu.statistics.figures().collect::<BTreeMap<_, _>>(),
        })
    };
    json!({"schema": 1, "seconds": seconds, "vcpus": spans.iter().map(vcpu).collect::<Vec<_>>()})
}

/// A column: its head, its width, and what it has of a vCPU.
type Column = (&'static str, u16, fn(&Span) -> String);

const COLUMNS: [Column; 12] = [
    ("PID", 8, |span| span.row.pid.to_string()),
    ("GUEST", 16, |span| span.row.guest.clone()),
    ("VCPU", 4, |span| span.row.vcpu.number.to_string()),
    ("PMI/s", 8, |span| format!("{:.0}", span.pmis)),
    ("EXITS/s", 9, |span| format!("{:.0}", span.exits)),
    ("SAMPLES/s", 9, |span| format!("{:.0}", span.samples)),
    ("GUEST", 6, |span| share(span.guest)),
    ("HOST", 6, |span| share(span.host)),
    ("PMU", 11, |span| span.row.vcpu.pmu.to_owned()),
    ("BACKING", 8, |span| span.row.backing().to_owned()),
    ("LOST", 7, |span| span.lost.to_string()),
    ("WHY", 20, |span| span.row.why()),
];

fn share(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |it| format!("{:.1}%", it * 100.0))
}

fn heads() -> [String; 12] {
    COLUMNS.map(|(head, ..)| head.to_owned())
}

fn cells(span: &Span) -> [String; 12] {
    COLUMNS.map(|(.., cell)| cell(span))
}

fn table(spans: &[Span]) -> String {
    let mut text = String::new();
    for line in [heads()].into_iter().chain(spans.iter().map(cells)) {
        let words = line.iter().zip(COLUMNS);
        let mut words =
            words.map(|(word, (_, width, _))| format!("{word:<0$}", usize::from(width)));
        let _ = writeln!(text, "{}", words.join(" ").trim_end());
    }
    text
}

/// What the user sees, and has chosen.
struct View {
    before: Vec<Row>,
    spans: Vec<Span>,
    read: Instant,
    sort: char,
    table: TableState,
    /// Whether one vCPU is looked into.
    is_inside: bool,
}

impl View {
    fn new(rows: Vec<Row>) -> Self {
        let mut view = Self {
            spans: Span::all(&[], rows.clone(), 1.0),
            before: rows,
            read: Instant::now(),
            sort: 'n',
            table: TableState::new().with_selected(0),
            is_inside: false,
        };
        view.order();
        view
    }

    /// Takes another reading.
    fn update(&mut self, rows: Vec<Row>) {
        let seconds = self.read.elapsed().as_secs_f64();
        self.read = Instant::now();
        self.change(|view| {
            view.spans = Span::all(&view.before, rows.clone(), seconds);
            view.before = rows;
        });
    }

    /// Changes what there is, or its order. The same vCPU stays chosen, wherever it then is.
    fn change(&mut self, change: impl FnOnce(&mut Self)) {
        let id = |span: &Span| (span.row.pid, span.row.vcpu.number);
        let chosen = self.chosen().map(id);
        change(self);
        self.order();
        match self.spans.iter().position(|span| Some(id(span)) == chosen) {
            Some(place) => self.table.select(Some(place)),
            None => self.is_inside = false,
        }
    }

    fn order(&mut self) {
        let key = |span: &Span| match self.sort {
            'p' => span.pmis,
            'e' => span.exits,
            's' => span.samples,
            'h' => span.host.unwrap_or(-1.0),
            'l' => span.lost as f64,
            _ => 0.0,
        };
        // Most first; equals by name.
        self.spans.sort_by(|a, b| {
            let name = |span: &Span| (span.row.guest.clone(), span.row.pid, span.row.vcpu.number);
            key(b)
                .total_cmp(&key(a))
                .then_with(|| name(a).cmp(&name(b)))
        });
    }

    fn chosen(&self) -> Option<&Span> {
        self.spans.get(self.table.selected()?)
    }

    /// Does what a key asks for. Returns whether to end.
    fn press(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('q') => return true,
            KeyCode::Char(sort @ ('p' | 'e' | 's' | 'h' | 'l' | 'n')) => {
                self.change(|view| view.sort = sort);
            }
            KeyCode::Up | KeyCode::Char('k') => self.table.select_previous(),
            KeyCode::Down | KeyCode::Char('j') => self.table.select_next(),
            KeyCode::Enter => self.is_inside = self.chosen().is_some(),
            KeyCode::Esc => self.is_inside = false,
            _ => {}
        }
        false
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let [head, body, foot] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Min(1),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        let pids = self.spans.iter().map(|span| span.row.pid).unique();
        let (vcpus, guests) = (self.spans.len(), pids.count());
        let counts = format!("vpmu top: {vcpus} vCPUs of {guests} guests");
        frame.render_widget(Line::from(counts), head);
        let keys = "p e s h l n: sort   Enter: look into   Esc: back   q: end";
        frame.render_widget(Line::from(keys), foot);
        match self.chosen().filter(|_| self.is_inside) {
            Some(span) => frame.render_widget(Paragraph::new(inside(span)), body),
            None if self.spans.is_empty() => {
                frame.render_widget(Paragraph::new(NONE).wrap(Wrap { trim: false }), body);
            }
            None => {
                let bold = Style::new().add_modifier(Modifier::BOLD);
                let rows = self
                    .spans
                    .iter()
                    .map(|span| TableRow::new(cells(span).map(Cell::from)));
                let widths = COLUMNS.map(|(head, width, _)| match head {
                    "WHY" => Constraint::Min(width),
                    _ => Constraint::Length(width),
                });
                let table = Table::new(rows, widths)
                    .header(TableRow::new(heads()).style(bold))
                    .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
                frame.render_stateful_widget(table, body, &mut self.table);
            }
        }
    }
}

/// Returns all that is known of a vCPU.
fn inside(span: &Span) -> String {
    let row = &span.row;
    let thread = row
        .vcpu
        .thread
        .map_or_else(|| "has not run".to_owned(), |it| format!("thread {it}"));
    let mut text = format!(
        "{}, process {}, vCPU {}, {thread}: PMU {}, backing {}\n{}\n\n",
        row.guest,
        row.pid,
        row.vcpu.number,
        row.vcpu.pmu,
        row.backing(),
        row.why()
    );
    let exits = row
        .exits()
        .map(|(kind, count)| (format!("exits.{kind}"), count));
    let figures = row
        .vcpu
        .statistics
        .figures()
        .map(|(name, count)| (name.to_owned(), count));
    let all: Vec<_> = exits.chain(figures).collect();
    for (n, (name, count)) in all.iter().enumerate() {
        let end = if n % 3 == 2 { '\n' } else { ' ' };
        let _ = write!(text, "{name:<24}{count:>14}{end}");
    }
    text
}

fn live(
    view: &mut View,
    terminal: &mut DefaultTerminal,
    interval: Duration,
    cancel: &Cancel,
) -> Result<()> {
    while !cancel.is_cancelled() {
        terminal.draw(|frame| view.draw(frame)).map_err(failed)?;
        let left = interval.saturating_sub(view.read.elapsed());
        if event::poll(left.min(PATIENCE)).map_err(failed)?
            && let Event::Key(key) = event::read().map_err(failed)?
            && key.kind == KeyEventKind::Press
            && view.press(key)
        {
            break;
        }
        if view.read.elapsed() >= interval {
            // What cannot be read may be anybody's, and ends no view.
            view.update(rows().unwrap_or_default());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::tests::row;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen(view: &mut View) -> String {
        let mut terminal = Terminal::new(TestBackend::new(140, 16)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    fn press(view: &mut View, code: KeyCode) -> bool {
        view.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_sort_choose_and_look_into_one() {
        let mut view = View::new(vec![row(7, 3), row(8, 4)]);
        let first = |view: &View| view.spans[0].row.pid;
        assert!(screen(&mut view).contains("2 vCPUs of 2 guests"));
        assert_eq!(first(&view), 7);
        press(&mut view, KeyCode::Char('l'));
        assert_eq!(first(&view), 8, "it has lost more");
        // The same is chosen still, and looked into.
        press(&mut view, KeyCode::Enter);
        press(&mut view, KeyCode::Char('n'));
        let text = screen(&mut view);
        assert!(
            text.contains("process 7") && text.contains("exits.rdpmc"),
            "{text}"
        );
        // It stays chosen when another becomes more.
        view.update(vec![row(7, 9), row(8, 4)]);
        assert_eq!(first(&view), 7);
        assert!(screen(&mut view).contains("process 7"));
        press(&mut view, KeyCode::Esc);
        assert!(screen(&mut view).contains("EXITS/s"));
        view.update(Vec::new());
        assert!(screen(&mut view).contains("no guest with this PMU"));
        assert!(press(&mut view, KeyCode::Char('q')));
    }
}
