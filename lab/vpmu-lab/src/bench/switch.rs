//! What a switch between two guests costs the PMU, on arm64: lazy against eager, partitioned against emulated. The
//! published partition names a number of registers, and has measured nothing.

use std::path::Path;

use super::{Bench, Context, Row, hundredths};
use crate::image::artifacts;
use crate::image::job::Output;
use crate::run::compare::Captured;
use crate::run::{self, Lab, Sink};
use crate::spec::arch::Arch;
use crate::spec::design::Pmu;
use crate::spec::{Request, SecondPayload, SecondRequest};
use crate::{Failure, Result};
use vpmu_measure::{Monitor, Span};

pub(super) const BENCH: Bench = Bench {
    name: "switch",
    page: include_str!("switch.md"),
    has_models: false,
    has_counters: false,
    rows,
};

/// What both guests do with their PMUs; a test of the bare-metal program has the same name.
const MODES: [&str; 4] = ["unused", "stopped", "one", "all"];

/// Microseconds of a turn.
const SLICE: u32 = 1_000;

/// A way to switch: the figures' suffix, the design, and whether the switch is eager.
const WAYS: [(&str, Pmu, bool); 3] = [
    (":lazy", Pmu::Partitioned, false),
    (":eager", Pmu::Partitioned, true),
    (":emulated", Pmu::Emulated, false),
];

/// A figure: its name, its unit, and how it is taken from the marked time.
type Figure = (&'static str, &'static str, fn(&Span) -> Option<f64>);

const FIGURES: [Figure; 3] = [
    ("registers_per_switch", "registers", |span| {
        per_switch(span, "pmu_registers")
    }),
    ("instructions_per_switch", "instructions", |span| {
        per_switch(span, "pmu_instructions")
    }),
    ("traps_per_switch", "traps", traps),
];

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let program = artifacts::find(Arch::Aarch64, artifacts::PAYLOAD)?;
    let mut rows = Vec::new();
    for (suffix, pmu, eager) in WAYS {
        for mode in MODES {
            let monitor = measure(context, &program, (suffix, pmu, eager), mode)?;
            let isolates = pmu == Pmu::Emulated || monitor.more["isolation"]["partition"] == true;
            let span = monitor.measured.as_ref().filter(|_| isolates);
            rows.extend(FIGURES.iter().map(|(figure, unit, of)| {
                let measured = span.and_then(of).map(hundredths);
                Row::new(format!("{figure}{suffix}"), mode, measured, *unit)
            }));
        }
    }
    // Those of a figure stand together.
    rows.sort_by_key(|row| {
        let place = |(figure, _, _): &Figure| row.figure.starts_with(figure);
        FIGURES.iter().position(place)
    });
    Ok(rows)
}

/// Runs two guests that are alike, and returns the monitor's statistics.
fn measure(
    context: &Context<'_>,
    program: &Path,
    (suffix, pmu, eager): (&str, Pmu, bool),
    mode: &str,
) -> Result<Monitor> {
    let words = format!("test=switch.{mode}");
    let part = format!("{}-{mode}-{}", context.bench.name, &suffix[1..]);
    let mut request = Request {
        kernel: Some(program.to_owned()),
        append: Some(words.clone()),
        second: Some(SecondRequest {
            payload: SecondPayload::Image {
                image: program.to_owned(),
                initrd: None,
            },
            command: None,
            append: words,
            memory: None,
            slice: Some(SLICE),
            eager,
        }),
        host_counters: u32::from(pmu == Pmu::Partitioned),
        keep: context.keep.map(|folder| folder.join(&part)),
        ..Request::new(Arch::Aarch64)
    };
    request.machine.qemu = context.qemu.clone();
    let spec = request.check(&[pmu.into()])?;
    run::check(&spec)?;
    let lab = Lab::prepare(&spec, context.session)?;
    if let Some(version) = &lab.qemu {
        context.version.get_or_init(|| version.to_string());
    }
    let task = context.session.progress.task(&part);
    let first = Captured::default();
    let sink = Sink {
        output: Output::Stream,
        to: Box::new(first.clone()),
    };
    let outcome = run::run(&lab, &spec.guests[0], 0, sink, &mut |_| {})?;
    task.done();
    let passed = |console: &[u8]| String::from_utf8_lossy(console).contains(" 1 passed, 0 failed");
    let failed = |how: String, console: &[u8]| {
        let console = String::from_utf8_lossy(console);
        Failure::NoReport(how).with(console.lines().map(str::to_owned).collect())
    };
    let second = outcome.second.unwrap_or_default().console;
    for (guest, console) in [("first", &first.take()), ("second", &second)] {
        if !passed(console) {
            return Err(failed(format!("the {guest} guest's test failed"), console));
        }
    }
    (outcome.monitor).ok_or_else(|| failed("the monitor did not report".to_owned(), &second))
}

fn of_switches(span: &Span, name: &str) -> Option<f64> {
    span.more.get("switches")?.get(name)?.as_f64()
}

fn per_switch(span: &Span, name: &str) -> Option<f64> {
    Some(of_switches(span, name)? / of_switches(span, "count")?)
}

/// Trapped accesses to PMU registers, of both guests.
fn traps(span: &Span) -> Option<f64> {
    let first = span.exits.iter();
    let first = first.filter(|(kind, _)| kind.starts_with("sysreg:PM"));
    let first = first.map(|(_, count)| *count).sum::<u64>() as f64;
    let second = of_switches(span, "second_pmu_traps")?;
    Some((first + second) / of_switches(span, "count")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_for_each_switch_and_of_both_guests() {
        let span: Span = serde_json::from_str(
            r#"{"ticks":1,"el2_ticks":1,"pmis":0,"exits":{"sysreg:PMCR_EL0:w":3,"wfi":9},
                "switches":{"count":4,"pmu_registers":168,"pmu_instructions":null,"second_pmu_traps":1}}"#,
        )
        .unwrap();
        let figures = FIGURES.map(|(_, _, of)| of(&span));
        assert_eq!(figures, [Some(42.0), None, Some(1.0)]);
    }
}
