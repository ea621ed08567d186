//! Measures samples of a guest with PEBS, whose records an exit makes or the host's kernel, compared with samples by
//! interrupts on the same kernel, and what PEBS costs who does not profit by it.

use super::parts::{
    Figure, Part, QUIET, SHARES, figure, first, part, sample_cost, share_error, timed,
    us_per_sample,
};
use super::{Bench, Context, Row, emulated};
use crate::Result;
use crate::report::result;
use crate::spec::design::Policy;

pub(super) const BENCH: Bench = Bench {
    name: "pebs",
    has_models: false,
    has_counters: false,
    page: include_str!("pebs.md"),
    rows,
};

/// The ways to collect records: a name, the VMM's option, and the event that samples precisely.
const WAYS: [[&str; 3]; 3] = [
    ["none", "--pebs=off", "cycles"],
    ["exit", "--pebs=exit", "cycles:pp"],
    ["ring", "--pebs=ring", "cycles:pp"],
];

/// Some 3,000 samples: a guest with many more interrupts hits a fault of QEMU's.
const SCALE: u32 = 3000;
/// 1.6 times the workload's unit of 105 microseconds. Samples 100 microseconds apart, with little in between that takes
/// time of its own, would walk through the unit in steps of a twentieth.
const PERIOD: u32 = 169_559;
/// Guest time of 1,000 operations is some 15 ms without perf.
const OPERATIONS: u32 = 1000;

const RECORD: &str = "perf record --no-bpf-event -q -o perf.data";

fn parts(precise: &str) -> Vec<Part> {
    let fixed = format!("{RECORD} -e {precise} -c 100000");
    let time = format!(
        "{}us() {{ name=$1; shift; \"$@\" perf bench sched pipe -l {OPERATIONS} 2>&1 | \
         awk -v name=$name '/usecs\\/op/ {{ print name, $1 }}'; }}; \
         us alone env; us stat perf stat -e cycles; us record {RECORD}; us precise {fixed}",
        timed(&format!("{RECORD} -e {precise}"), "-c 100000", SCALE)
    );
    let profile =
        format!("{QUIET}{RECORD} -e {precise} -c {PERIOD} -- workload --scale {SCALE} && {SHARES}");
    vec![
        part(
            "fixed",
            format!("{QUIET}{fixed} -- workload --scale {SCALE}"),
            of_fixed,
        ),
        part("time", time, of_time),
        part("profile", profile, |row| Ok(vec![share_error(row)])),
        part("plain", timed(RECORD, "-F 4000", SCALE), of_plain),
    ]
}

/// Returns exits that serve the PMU and interrupts, for each sample.
fn per_sample(row: &result::Row) -> [Option<f64>; 2] {
    let samples = row.run.samples.filter(|&samples| samples > 0);
    [row.run.pmu_exits(), row.run.pmis].map(|count| Some(count? as f64 / samples? as f64))
}

fn of_fixed(row: &result::Row) -> Result<Vec<Figure>> {
    let [exits, nmis] = per_sample(row);
    let samples = row.run.samples.map(|samples| samples as f64);
    Ok(vec![
        figure("samples", samples, "samples"),
        figure("exits_per_sample", exits, "exits"),
        figure("nmis_per_sample", nmis, "NMIs"),
    ])
}

fn of_plain(row: &result::Row) -> Result<Vec<Figure>> {
    let [exits, nmis] = per_sample(row);
    Ok(vec![
        figure("exits_per_sample:frequency", exits, "exits"),
        figure("nmis_per_sample:frequency", nmis, "NMIs"),
        figure("guest_us_per_sample:frequency", us_per_sample(row)?, "us"),
        figure("guest_ms:frequency", Some(first(row, "with")? / 1e6), "ms"),
    ])
}

fn of_time(row: &result::Row) -> Result<Vec<Figure>> {
    let mut figures = vec![sample_cost(row)?];
    for word in ["alone", "stat", "record", "precise"] {
        let name = format!("sched_pipe_us:{word}");
        figures.push(figure(name, Some(first(row, word)?), "us"));
    }
    Ok(figures)
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for [name, option, precise] in WAYS {
        let request = context.request(&[option]);
        let (designs, label) = (emulated(&[Policy::Paused]), format!("{name}-"));
        let parts = parts(precise);
        rows.extend(context.measure(&request, &designs, &parts, (&label, ""), |_| name)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_valid_shell() {
        for [.., precise] in WAYS {
            crate::bench::parts::tests::assert_valid_shell(&parts(precise));
        }
    }
}
