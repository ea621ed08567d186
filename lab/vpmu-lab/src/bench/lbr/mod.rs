//! Measures samples with last branch records of a guest that is followed for them, and checks each record.

mod checker;

use super::parts::{Figure, Part, QUIET, figure, first, off_weights, part, sample_cost, timed};
use super::{Bench, Context, Row, emulated};
use crate::Result;
use crate::report::result;
use crate::spec::Request;
use crate::spec::design::{Lbr, Model, Pebs, Policy};
use checker::checker;

pub(super) const BENCH: Bench = Bench {
    name: "lbr",
    has_models: true,
    has_counters: false,
    page: include_str!("page.md"),
    rows,
};

const RECORD: &str = "perf record --no-bpf-event -q -o perf.data -e";
/// Samples by interrupts, and the precise ones, which are PEBS records where the guest has PEBS.
const CYCLES: &str = "cycles";
const PRECISE: &str = "cycles:pp";
/// Periods of the profile. Primes, so that none beats with the workload's loops as another does.
// A sample of AMD's takes 31,000 ns of its period: 131,071 left the workload's unit of 100,000 instructions, and each
// sample was taken where the last one was.
const PERIODS: [u32; 4] = [140_009, 149_993, 169_559, 190_027];

/// A way to have branches recorded, or none.
struct Way {
    /// The mode of its figures, and the end of their names.
    mode: &'static str,
    suffix: &'static str,
    lbr: Lbr,
    pebs: Pebs,
    /// Options of vpmu-vmm.
    options: &'static [&'static str],
    parts: Vec<Part>,
}

/// Returns the ways for a model whose stack has `depth` records.
fn ways(depth: u32) -> Vec<Way> {
    // Some hundred samples show what each instruction's exit costs.
    let steps = vec![
        fixed(CYCLES, depth, 300),
        time(CYCLES, "-b", 300),
        kernel(CYCLES, depth),
    ];
    let unused = |mode, lbr| Way {
        mode,
        suffix: ":unused",
        lbr,
        ..predict(vec![plain(), time(CYCLES, "", 3000)])
    };
    vec![
        Way {
            mode: "step",
            options: &["--follow=steps"],
            ..predict(steps)
        },
        predict(all(CYCLES, depth)),
        unused("offered", Lbr::On),
        unused("none", Lbr::Off),
    ]
}

/// Returns the ways that only Intel's processors have: eight records, and samples that are PEBS records with their branches.
fn intels() -> Vec<Way> {
    let eight = |event| vec![fixed(event, 8, 3400), time(event, "-b", 1000)];
    vec![
        Way {
            suffix: ":8",
            lbr: Lbr::Eight,
            ..predict(eight(CYCLES))
        },
        pebs(all(PRECISE, 32)),
        Way {
            suffix: ":8",
            lbr: Lbr::Eight,
            ..pebs(eight(PRECISE))
        },
    ]
}

fn predict(parts: Vec<Part>) -> Way {
    Way {
        mode: "predict",
        suffix: "",
        lbr: Lbr::On,
        pebs: Pebs::Off,
        options: &[],
        parts,
    }
}

fn pebs(parts: Vec<Part>) -> Way {
    Way {
        mode: "pebs",
        pebs: Pebs::Exit,
        ..predict(parts)
    }
}

/// Returns all that is measured of stacks of `depth`.
fn all(event: &'static str, depth: u32) -> Vec<Part> {
    // As many branches, whatever a sample has of them.
    vec![
        fixed(event, depth, 3400 * 32 / depth),
        time(event, "-b", 1000),
        profile(event),
        kernel(event, depth),
    ]
}

/// Samples at a fixed period, whose branches are checked.
fn fixed(event: &str, depth: u32, scale: u32) -> Part {
    let check = checker(depth);
    // Of user space.
    let event = match event {
        PRECISE => "cycles:ppu",
        _ => "cycles:u",
    };
    part(
        "fixed",
        format!(
            "{QUIET}{RECORD} {event} -b -c 100000 -- workload --scale {scale} && \
             perf script -i perf.data --comm workload -F brstacksym 2>/dev/null > stacks && awk '{check}' stacks"
        ),
        of_fixed,
    )
}

/// What a sample takes of the guest's time. The workload's samples alone: a tenth or more are of the program that takes
/// its time, which they cost nothing.
fn time(event: &str, option: &str, scale: u32) -> Part {
    let command = timed(&format!("{RECORD} {event} {option}"), "-c 100000", scale);
    part("time", command, |row| Ok(vec![sample_cost(row)?]))
}

/// Profiles by several periods, each and together: a single one can beat with the workload's loops.
fn profile(event: &str) -> Part {
    const SCALE: u32 = 1700;
    let one = |period| {
        format!(
            "{RECORD} {event} -b -c {period} -- workload --scale {SCALE} && \
             perf report -i perf.data --stdio --comms workload --no-branch-stack --sort symbol -F sample,sym -t , \
             2>/dev/null | awk -F, '/^ *[0-9]/ {{ split($2, word, \" \"); n[word[2]] += $1; all += $1 }} \
             END {{ for (name in n) print \"samples:{period}:\" name, n[name]; print \"samples:{period}\", all }}'"
        )
    };
    let command = format!("{QUIET}{}", PERIODS.map(one).join(" && "));
    part("profile", command, |row| {
        let together = difference(row, &PERIODS)?;
        let each = PERIODS.map(|period| difference(row, &[period]));
        let each: Vec<f64> = each.into_iter().collect::<Result<_>>()?;
        let worst = each.into_iter().fold(0.0, f64::max);
        Ok(vec![
            figure("largest_share_difference_points", Some(together), "points"),
            figure("worst_period_difference_points", Some(worst), "points"),
        ])
    })
}

/// Returns the largest difference of a function's share of the samples of these periods from its weight, in points.
fn difference(row: &result::Row, periods: &[u32]) -> Result<f64> {
    let all = periods
        .iter()
        .map(|period| first(row, &format!("samples:{period}")));
    let all: f64 = all.sum::<Result<f64>>()?;
    Ok(off_weights(|function| {
        let of = |period| first(row, &format!("samples:{period}:{function}")).unwrap_or(0.0);
        100.0 * periods.iter().map(of).sum::<f64>() / all
    }))
}

fn kernel(event: &str, depth: u32) -> Part {
    let command = format!(
        "{QUIET}echo 'i=0; while [ $i -lt 60 ]; do /bin/busybox true; i=$((i + 1)); done' > forks && \
         {RECORD} {event} -b -c 300000 -- sh forks && \
         perf script -i perf.data -F brstack 2>/dev/null | awk 'NF > 0 {{ n++; full += NF == {depth} }} \
         END {{ print \"samples\", n; print \"full\", 100 * full / n }}'"
    );
    part("kernel", command, |row| {
        let samples = first(row, "samples")?;
        let exits = per_sample(row, samples, &["follow"]);
        Ok(vec![
            figure("samples:kernel", Some(samples), "samples"),
            figure("exits_per_sample:kernel", exits, "exits"),
            figure("full_stacks_percent:kernel", Some(first(row, "full")?), "%"),
        ])
    })
}

/// Samples without branches.
fn plain() -> Part {
    let command = format!("{QUIET}{RECORD} {CYCLES} -c 100000 -- workload --scale 3000");
    part("plain", command, |row| {
        let samples = row.run.samples.unwrap_or(0) as f64;
        let exits = row.run.pmu_exits().map(|count| count as f64 / samples);
        let exits = exits.filter(|_| samples > 0.0);
        Ok(vec![
            figure("samples", Some(samples), "samples"),
            figure("exits_per_sample", exits, "exits"),
        ])
    })
}

/// Returns exits of these kinds for each sample.
fn per_sample(row: &result::Row, samples: f64, kinds: &[&str]) -> Option<f64> {
    let exits = row.run.exits.as_ref()?;
    let is_one = |kind: &str| kinds.iter().any(|&begin| kind.starts_with(begin));
    let count: u64 = (exits.iter())
        .filter(|(kind, _)| is_one(kind))
        .map(|(_, count)| count)
        .sum();
    (samples > 0.0).then(|| count as f64 / samples)
}

fn of_fixed(row: &result::Row) -> Result<Vec<Figure>> {
    /// Reads of records: Intel's and AMD's.
    const READS: [&str; 4] = [
        "msr:read:0x12",
        "msr:read:0x15",
        "msr:read:0x16",
        "msr:read:0xc00103",
    ];
    let samples = row.run.samples.unwrap_or(0) as f64;
    let exits = |kinds| per_sample(row, samples, kinds);
    Ok(vec![
        figure("samples", Some(samples), "samples"),
        figure("exits_per_sample", exits(&["follow"]), "exits"),
        figure("reads_per_sample", exits(&READS), "exits"),
        figure("full_stacks_percent", Some(first(row, "full")?), "%"),
        figure("skipped_samples", Some(first(row, "skipped")?), "samples"),
        figure("checked_branches", Some(first(row, "checked")?), "branches"),
        figure("wrong_branches", Some(first(row, "wrong")?), "branches"),
    ])
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&[Policy::Paused]);
    let (model, ways) = match context.model {
        Model::Auto | Model::Intel => {
            let mut ways = ways(32);
            ways.extend(intels());
            (Model::Intel, ways)
        }
        // AMD's core extension has no records.
        Model::Amd | Model::AmdV2 => (Model::AmdV2, ways(16)),
    };
    let mut rows = Vec::new();
    for way in ways {
        let request = Request {
            model,
            lbr: way.lbr,
            pebs: way.pebs,
            ..context.request(way.options)
        };
        let label = format!("{}{}-", way.mode, way.suffix.replace(':', "-"));
        let names = (label.as_str(), way.suffix);
        rows.extend(context.measure(&request, &designs, &way.parts, names, |_| way.mode)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_valid_shell() {
        for way in ways(32).into_iter().chain(intels()) {
            crate::bench::parts::tests::assert_valid_shell(&way.parts);
        }
    }
}
