//! The section of a comparison: time and exits by design, exits by kind, the functions of profiles.

use std::cmp::Reverse;

use itertools::Itertools;

use super::super::number::number;
use super::super::profile::own;
use super::super::result::Run;
use super::super::table;
use super::draw::{kinds, measured};
use super::{Figures, Group, Section};
use crate::spec::design::Pmu;

/// The functions of a profile that are listed.
const LISTED: usize = 8;

/// Makes the section of the runs in `file`, the first of which the others are relative to.
pub(super) fn section(file: &str, runs: &[Run]) -> Section {
    let names: Vec<String> = runs.iter().map(|run| run.design().to_string()).collect();
    let first = &runs[0];
    Section {
        id: file.trim_end_matches(".json").to_owned(),
        file: file.to_owned(),
        title: match runs {
            [run] => format!("One command under {}", run.design()),
            _ => format!("One command under {} designs", runs.len()),
        },
        kicker: kicker(runs),
        command: Some(first.command.clone()),
        sentences: sentences(runs),
        groups: vec![Group {
            heading: String::new(),
            drawings: drawings(runs, &names),
        }],
        figures: [table_of(runs), exits(runs, &names)]
            .into_iter()
            .chain(profiles(runs, &names))
            .filter(|table| !table.rows.is_empty())
            .collect(),
        lead: lead(runs, &names),
        claim: None,
    }
}

/// Draws the time of each design beside that of native; `None` where the first run is not native.
fn lead(runs: &[Run], names: &[String]) -> Option<String> {
    let native = runs
        .first()
        .filter(|run| run.pmu == Pmu::Native && is_whole(run))?;
    let times = runs.iter().map(|run| {
        let factor = run.real_s / native.real_s;
        is_whole(run).then(|| (factor, format!("{factor:.3} x")))
    });
    let label = format!("{}: {}", native.arch, shortened(&native.command));
    measured(&label, names, times)
}

/// Returns whether the command came to its end: a failed one takes no time.
fn is_whole(run: &Run) -> bool {
    run.status == 0
}

/// Returns the last of several commands on one line: of a list of events only how many they are.
fn shortened(command: &str) -> String {
    let command = command.rsplit("; ").next().unwrap_or(command);
    let mut words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    for index in 1..words.len() {
        let events = words[index].split(',').count();
        if words[index - 1] == "-e" && events > 3 {
            words[index] = format!("[{events} events]");
        }
    }
    words.join(" ")
}

fn kicker(runs: &[Run]) -> String {
    let first = &runs[0];
    let time = if runs.iter().all(|run| run.deterministic) {
        "time is counted in instructions"
    } else {
        "real time"
    };
    let cpu = first.cpu.as_deref().map(|cpu| format!(" ({cpu})"));
    let qemu = first
        .qemu
        .as_deref()
        .map(|qemu| format!(", on QEMU {qemu}"));
    let plural = |count: u32, word: &str| match count {
        1 => format!("1 {word}"),
        _ => format!("{count} {word}s"),
    };
    format!(
        "{}{}, {}, {} of the command, {time}{}",
        first.arch,
        cpu.unwrap_or_default(),
        plural(first.vcpus, "vCPU"),
        plural(first.runs, "run"),
        qemu.unwrap_or_default(),
    )
}

/// Says how long each design takes beside the first, and how many exits a PMI takes.
fn sentences(runs: &[Run]) -> Vec<String> {
    let mut sentences = Vec::new();
    let (first, others) = (&runs[0], &runs[1..]);
    if !others.is_empty() && first.real_s > 0.0 {
        let times = others
            .iter()
            .map(|run| format!("{:.3} ({})", run.real_s / first.real_s, run.design()));
        sentences.push(format!(
            "The command takes {:.3} s under {}, and {} times as long under the others.",
            first.real_s,
            first.design(),
            listed(&times.collect::<Vec<_>>())
        ));
    }
    let exits = runs
        .iter()
        .filter_map(|run| Some(format!("{:.2} ({})", run.exits_per_pmi?, run.design())));
    let exits: Vec<String> = exits.collect();
    if !exits.is_empty() {
        sentences.push(format!("A PMI takes {} exits.", listed(&exits)));
    }
    sentences.extend(table::backing(runs.iter()).map(|text| format!("It was {text}.")));
    let doubts = runs.iter().flat_map(table::doubts);
    sentences.extend(doubts.map(|text| format!("{text}.")));
    sentences
}

fn listed(items: &[String]) -> String {
    match items {
        [before @ .., last] if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => items.concat(),
    }
}

fn drawings(runs: &[Run], names: &[String]) -> Vec<String> {
    let bars = |label: &str, figure: &dyn Fn(&Run) -> Option<(f64, String)>| {
        let values = runs.iter().map(|run| figure(run).filter(|_| is_whole(run)));
        measured(label, names, values)
    };
    let seconds = |value: f64| Some((value, format!("{value:.3} s")));
    let by_kind = runs.iter().zip(names).filter_map(|(run, name)| {
        let exits = run.exits.as_ref()?.iter();
        let exits = exits.map(|(kind, &count)| (kind.as_str(), count as f64));
        Some((
            name.as_str(),
            exits.filter(|(_, count)| *count > 0.0).collect(),
        ))
    });
    [
        bars("Time of the command", &|run| seconds(run.real_s)),
        bars("Processor time, user and kernel", &|run| {
            seconds(run.busy_s())
        }),
        bars("Exits for each PMI", &|run| {
            run.exits_per_pmi
                .map(|exits| (exits, format!("{exits:.2} exits")))
        }),
        bars("The hypervisor's share of the time", &|run| {
            run.host_share
                .map(|share| (share, format!("{:.2} %", share * 100.0)))
        }),
        bars("Samples that perf took", &|run| {
            let samples = run.samples? as f64;
            Some((samples, format!("{} samples", number(samples, ""))))
        }),
        kinds("Exits by kind", "exits", by_kind),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the table that `compare` prints.
fn table_of(runs: &[Run]) -> Figures {
    let row = |run: &Run| table::COLUMNS.map(|(_, figure)| figure(run, &runs[0]));
    Figures {
        columns: table::COLUMNS.map(|(head, _)| head.to_owned()).to_vec(),
        rows: runs.iter().map(|run| row(run).to_vec()).collect(),
    }
}

fn exits(runs: &[Run], names: &[String]) -> Figures {
    let rows = runs
        .iter()
        .zip(names)
        .filter_map(|(run, name)| Some(vec![name.clone(), table::kinds(run.exits.as_ref()?)]));
    Figures {
        columns: vec!["design".to_owned(), "exits by kind".to_owned()],
        rows: rows.collect(),
    }
}

/// Returns the functions with the most samples of each profile, their callees left out.
fn profiles(runs: &[Run], names: &[String]) -> Vec<Figures> {
    let mut tables = Vec::new();
    for (run, name) in runs.iter().zip(names) {
        let of = [
            ("the hypervisor's profile", &run.host_profile),
            ("the guest's own profile", &run.guest_profile),
        ];
        for (of, profile) in of {
            let Some(profile) = profile else { continue };
            let own = own(profile);
            let all: f64 = own.values().map(|&samples| samples as f64).sum();
            let own = (own.into_iter()).sorted_by_key(|&(function, own)| (Reverse(own), function));
            let row = |(function, samples): (&str, u64)| {
                let percent = (samples as f64 / all * 1000.0).round() / 10.0;
                vec![function.to_owned(), number(percent, "percent")]
            };
            tables.push(Figures {
                columns: vec![format!("{name}: {of}"), "own samples".to_owned()],
                rows: own.take(LISTED).map(row).collect(),
            });
        }
    }
    tables
}
