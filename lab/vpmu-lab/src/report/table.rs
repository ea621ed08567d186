//! The table that `compare` prints, its legend and its warnings.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use itertools::Itertools;

use super::figures;
use super::number::number;
use super::result::Row;
use crate::report::result::Run;
use crate::spec::arch::Arch;
use crate::spec::design::{Backing, Design, Pmu};

/// A column of a table of runs: its head, and the figure of a run, in some columns relative to the first run.
type Column = (&'static str, fn(&Run, &Run) -> String);

pub(super) const COLUMNS: [Column; 11] = [
    ("design", |run, _| run.design().to_string()),
    ("counters", |run, _| {
        optional(run.guest_counters, |n| match run.arch {
            Arch::Aarch64 => format!("{n}+1"),
            Arch::X86_64 => n.to_string(),
        })
    }),
    ("real s", |run, _| format!("{:.3}", run.real_s)),
    ("x", |run, first| times(run.real_s, first.real_s)),
    ("user+sys s", |run, _| format!("{:.3}", run.busy_s())),
    ("x", |run, first| times(run.busy_s(), first.busy_s())),
    ("samples", |run, _| count(run.samples)),
    ("PMIs", |run, _| count(run.pmis)),
    ("exits", |run, _| {
        count(run.exits.as_ref().map(|exits| exits.values().sum()))
    }),
    ("exits/PMI", |run, _| {
        optional(run.exits_per_pmi, |x| format!("{x:.2}"))
    }),
    ("host share", |run, _| {
        optional(run.host_share, |share| format!("{:.2} %", share * 100.0))
    }),
];

/// The number of kinds of exit that a row shows.
const SHOWN_KINDS: usize = 8;
/// A stock kernel's kernel.perf_event_max_sample_rate.
const STOCK_SAMPLE_RATE: u64 = 100_000;

/// The meanings of the columns.
pub const LEGEND: &str = "\
real, user+sys  the command's time by the guest's clock (wall: this machine's, boot included)
x               relative to the first row
PMIs            performance monitoring interrupts that the guest took during the command
exits           times the hypervisor took over during the command, whatever for
host share      part of the machine's time that the hypervisor took meanwhile
-               not applicable, or not known to that design";

/// Returns the table, relative to its first row.
pub fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_header(COLUMNS.iter().map(|(head, _)| *head).chain(["wall s"]));
    for row in rows {
        let cells = COLUMNS.map(|(_, figure)| figure(&row.run, &rows[0].run));
        let wall = format!("{:.1}", row.wall.as_secs_f64());
        table.add_row(cells.into_iter().chain([wall]));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Says what counted for each x86 guest; `None` where there is none.
pub fn backing<'a>(runs: impl Iterator<Item = &'a Run> + Clone) -> Option<String> {
    let of = |backing: Backing| {
        let runs = runs.clone().filter(|run| run.arch == Arch::X86_64);
        let names = runs.filter(|run| run.backing == Some(backing));
        let names = names.map(Run::design).join(", ");
        (!names.is_empty()).then(|| format!("{} ({names})", backing.counter()))
    };
    let kinds = [Backing::Hardware, Backing::Clock].into_iter();
    let kinds = kinds.filter_map(of).join(" and by ");
    (!kinds.is_empty()).then(|| format!("counted by {kinds}"))
}

/// Names the QEMU that ran the guests; `None` where none did.
pub fn qemu(version: Option<&str>) -> Option<String> {
    Some(format!("QEMU {}\n", version?))
}

/// Returns the table of a bench.
pub fn bench(rows: &[figures::Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header([
        "figure",
        "mode",
        "measured",
        "published",
        "unit",
    ]);
    for row in rows {
        table.add_row([
            row.figure.clone(),
            row.mode.clone(),
            optional(row.measured, |value| number(value, "")),
            optional(row.published, |value| number(value, "")),
            row.unit.clone(),
        ]);
    }
    for column in table.column_iter_mut().skip(2).take(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Lists each row's kinds of exit, the most frequent first.
pub fn exits(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let Some(exits) = &row.run.exits else {
            continue;
        };
        let _ = write!(text, "{:12} {}", row.design, kinds(exits));
        if let Some(pmu) = row.run.pmu_exits_per_pmi {
            let _ = write!(text, " ({pmu:.2} for each PMI are the PMU's)");
        }
        text.push('\n');
    }
    text
}

/// Returns the most frequent kinds of exit, with their counts.
pub fn kinds(exits: &BTreeMap<String, u64>) -> String {
    let mut kinds = (exits.iter()).sorted_by_key(|&(kind, count)| (Reverse(count), kind));
    let shown = kinds.by_ref().take(SHOWN_KINDS);
    let shown = shown
        .map(|(kind, count)| format!("{kind} {count}"))
        .collect_vec();
    let (more, rest) = (kinds.len(), kinds.map(|(_, count)| count).sum::<u64>());
    let rest = (more > 0).then(|| format!("{more} more kinds {rest}"));
    shown.into_iter().chain(rest).join(", ")
}

/// Warns of figures that may be wrong, with the reason and the option that mends them.
pub fn warnings(rows: &[Row]) -> Vec<String> {
    let mut warnings = Vec::new();
    for row in rows {
        let (design, run) = (row.design, &row.run);
        warnings.extend(doubts(run));
        if let Some(rate) = run.max_sample_rate.filter(|&rate| rate < STOCK_SAMPLE_RATE) {
            warnings.push(format!(
                "{design}: the guest's kernel allowed only {rate} samples a second in the end, because \
                 samples took more than a quarter of its time; lower perf's -F to compare equal work"
            ));
        }
        if run.samples == Some(0) {
            warnings.push(format!(
                "{design}: perf recorded no samples: the command was too short, or its events do not \
                 count on this machine"
            ));
        }
        if !run.deterministic {
            warnings.push(format!(
                "{design}: measured in real time (--realtime, or this machine's own KVM), so figures differ \
                 from run to run; --runs gives means"
            ));
        }
    }
    warnings
}

/// Returns sentences about what makes a run's figures wrong, each with the reason.
pub(super) fn doubts(run: &Run) -> impl Iterator<Item = String> {
    let design = run.design();
    let failed = (run.status != 0).then(|| {
        format!(
            "{design}: the command ended with status {}, so its figures may be of half a run; \
             see what it printed with `vpmu run --arch {} --pmu {}`",
            run.status, run.arch, run.pmu
        )
    });
    let lost = match run.lost_samples {
        Some(0) => None,
        Some(count) => Some(lost(design, &format!("{count}"))),
        None if run.samples.is_some() => Some(lost(design, "an unknown number of")),
        None => None,
    };
    (failed.into_iter().chain(uncounted(run)))
        .chain(throttled(run))
        .chain(lost)
}

/// Returns sentences about what was not counted in a guest, each with the reason.
pub fn uncounted(run: &Run) -> impl Iterator<Item = String> {
    let sentences = [no_pmu(run), lost_counters(run), part_time_counters(run)];
    sentences.into_iter().flatten()
}

/// Returns a sentence for a guest whose kernel found no PMU, with the reason.
fn no_pmu(run: &Run) -> Option<String> {
    if run.guest_counters.is_some() {
        return None;
    }
    let why = match (run.arch, run.pmu) {
        (Arch::X86_64, Pmu::Native) => {
            "the emulated processor has none: script/qemu builds a QEMU whose has"
        }
        (Arch::X86_64, Pmu::Kvm) => {
            "KVM passes on the host's, and the emulated processor has none: script/qemu builds a QEMU whose has"
        }
        _ => "see its dmesg",
    };
    Some(format!(
        "{}: the guest's kernel found no PMU, so only software events count ({why})",
        run.design()
    ))
}

/// Returns a sentence for a guest with counters that stood still, with the reason and the option that mends it.
fn lost_counters(run: &Run) -> Option<String> {
    let vmm = run.vmm.as_ref()?;
    let count = vmm.measured.as_ref().map_or(0, |span| span.lost);
    if count == 0 {
        return None;
    }
    let why = match vmm.backing.as_deref() {
        // The options of `vpmu exec` are not the VMM's.
        Some("clock") if run.pmu == Pmu::Exec => {
            "only cycles have a clock to count them; vpmu exec --approximate-instructions counts \
             instructions and branches as cycles"
        }
        Some("clock") => {
            "only cycles have a clock to count them; \
             --vmm-arg=--approximate-instructions counts instructions and branches as cycles"
        }
        _ => "the host's counters lack it, or are taken",
    };
    Some(format!(
        "{}: {count} times the guest asked for an event that the host could not count, and its counter \
         stood still ({why})",
        run.design()
    ))
}

/// Returns a sentence for a guest whose counters are too low, with the reason and the way to mend it.
fn part_time_counters(run: &Run) -> Option<String> {
    let count = run.vmm.as_ref()?.measured.as_ref()?.part_time;
    (count > 0).then(|| {
        format!(
            "{}: {count} times a counter of the guest counted only part of the time, and is too low: others have counters of \
             the host's (its NMI watchdog: sysctl kernel.nmi_watchdog=0; perf), or the host throttled the event",
            run.design()
        )
    })
}

/// Returns a sentence for a guest whose kernel throttled a recording, with the way to a whole one.
pub fn throttled(run: &Run) -> Option<String> {
    let count = run.throttled.filter(|&count| count > 0)?;
    Some(format!(
        "{}: the guest's kernel throttled events {count} times, because samples came faster than it allows, and \
         samples are missing; lower perf's -F, raise its -c, or run first in the guest: sysctl -w \
         kernel.perf_event_max_sample_rate=100000 kernel.perf_cpu_time_max_percent=0 (the rate is refused after the \
         percentage)",
        run.design()
    ))
}

fn lost(design: Design, count: &str) -> String {
    format!(
        "{design}: perf lost {count} samples, because its buffer was full; give perf a larger one \
         (-m) or lower its -F"
    )
}

fn count(count: Option<u64>) -> String {
    optional(count, |n| n.to_string())
}

/// Writes how often `base` goes into `value`.
fn times(value: f64, base: f64) -> String {
    optional((base > 0.0).then(|| value / base), |x| format!("{x:.3}"))
}

fn optional<T>(value: Option<T>, show: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use insta::assert_snapshot;

    use super::*;

    fn row(pmu: Pmu, real_s: f64) -> Row {
        let native = pmu == Pmu::Native;
        Row {
            design: pmu.into(),
            run: Run {
                arch: Arch::Aarch64,
                pmu,
                policy: None,
                vcpus: 1,
                cpu: None,
                qemu: None,
                backing: None,
                guest_counters: Some(6),
                host_counters: None,
                command: "true".to_owned(),
                runs: 1,
                status: 0,
                real_s,
                user_s: real_s / 2.0,
                sys_s: 0.0,
                samples: Some(3000),
                lost_samples: Some(0),
                throttled: Some(0),
                max_sample_rate: Some(STOCK_SAMPLE_RATE),
                pmis: Some(1000),
                exits: (!native)
                    .then(|| BTreeMap::from([("irq:pmu".to_owned(), 1000), ("hvc".to_owned(), 3)])),
                exits_per_pmi: (!native).then_some(1.003),
                pmu_exits_per_pmi: (!native).then_some(1.0),
                host_share: (!native).then_some(0.0097),
                exit_share: None,
                host_operations: None,
                host_operations_per_pmi: None,
                deterministic: true,
                monitor: None,
                vmm: None,
                second: None,
                host_profile: None,
                guest_profile: None,
                traces: Vec::new(),
            },
            output: Vec::new(),
            wall: Duration::from_millis(10_340),
        }
    }

    #[test]
    fn a_comparison_in_the_terminal() {
        let rows = [row(Pmu::Native, 2.0), row(Pmu::Partitioned, 2.02)];
        assert_snapshot!(format!("{}\n\n{}", table(&rows), exits(&rows)));
        assert!(warnings(&rows).is_empty());
    }

    #[test]
    fn a_bench_in_the_terminal() {
        let row = |mode, measured, published| {
            figures::Row::new("handle_overflow_ns", mode, measured, "ns").beside(published)
        };
        assert_snapshot!(bench(&[
            row("recreate", Some(10_036.0), Some(85_282_765.0)),
            row("reuse", Some(113.456_78), Some(97.0)),
            row("paused", None, None),
        ]));
    }

    #[test]
    fn exits_beyond_the_most_frequent_are_summed() {
        let exits = (0..12).map(|number| (format!("kind:{number:02}"), 1000 - number));
        assert_snapshot!(kinds(&exits.collect()));
    }

    #[test]
    fn counters_that_stood_still_are_told() {
        let vmm = r#"{"policy":"paused","backing":"clock","general":6,
            "measured":{"pmis":0,"exits":{},"lost":3},"total":{"pmis":0,"exits":{},"lost":3}}"#;
        let mut row = row(Pmu::Emulated, 1.0);
        row.run.vmm = Some(serde_json::from_str(vmm).unwrap());
        assert_snapshot!(warnings(&[row]).join("\n"));
    }

    #[test]
    fn warnings_name_the_way_out() {
        let mut bad = row(Pmu::Kvm, 1.0);
        bad.run.status = 2;
        bad.run.throttled = Some(3);
        bad.run.max_sample_rate = Some(2500);
        bad.run.lost_samples = None;
        bad.run.samples = Some(0);
        bad.run.deterministic = false;
        bad.run.guest_counters = None;
        assert_snapshot!(warnings(&[bad]).join("\n"));
    }
}
