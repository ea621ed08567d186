//! Compares a profile taken in a guest with the host's, published in 2019 for KVM
//! on Intel with a program of four functions.
//!
//! The host of the guest is the emulated machine. Where a QEMU does not emulate its PMU, a clock takes the
//! samples there. The workload executes known numbers of instructions in each function, and an instruction
//! takes a nanosecond on that machine. So both profiles have to show the same weights.

use super::parts::{CYCLES, WEIGHTS, first, share_difference, timed, us_per_sample};
use super::{Bench, Context, Row, beside, emulated, hundredths, mode};
use crate::Result;
use crate::report::result;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Model, Pmu, Policy};

pub(super) const BENCH: Bench = Bench {
    name: "sampling",
    page: include_str!("sampling.md"),
    has_models: true,
    has_counters: true,
    rows,
};

/// The published shares on the host and in the guest with reuse. Without reuse no function was among the first.
const PUBLISHED: [(&str, &str, f64); 9] = [
    ("share_points:main", "host", 48.19),
    ("share_points:foo", "host", 18.44),
    ("share_points:bar", "host", 21.21),
    ("share_points:qux", "host", 11.64),
    ("share_points:main", "reuse", 46.18),
    ("share_points:foo", "reuse", 20.29),
    ("share_points:bar", "reuse", 22.29),
    ("share_points:qux", "reuse", 10.47),
    ("largest_share_difference_points", "reuse", 2.01),
];

const POLICIES: [Policy; 3] = [Policy::Recreate, Policy::Reuse, Policy::Paused];

/// The period, in nanoseconds and in the guest's cycles. Having no divisor in common
/// with the workload's unit of 100,000, it meets each part of the unit in proportion.
/// Chance alone would make two profiles of 2000 samples differ by more than a point.
const PERIOD: u32 = 1_003_331;

fn command(event: &str) -> String {
    format!(
        "perf record --no-bpf-event -q -e {event} -c {PERIOD} -o perf.data -- workload --scale 20000 && \
         perf report -i perf.data --stdio --sort symbol -F overhead,sym -t , 2>/dev/null | \
         awk -F, '/^ *[0-9]/ {{ split($2, word, \" \"); print \"share:\" word[2], $1 + 0 }}'"
    )
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let native = [Design::from(Pmu::Native)];
    let event = match context.qemu.has_x86_pmu() {
        true => "cycles",
        false => "cpu-clock",
    };
    let host = context.compare(
        beside_native(Model::default()),
        "host",
        &native,
        &command(event),
    )?;
    let (guest, designs) = (beside_native(context.model), emulated(&POLICIES));
    let guests = context.compare(guest, "guest", &designs, &command("cycles"))?;
    let host = shares(&host[0])?;
    let guests = guests
        .iter()
        .map(|row| Ok((mode(row.design), shares(row)?)));
    let guests = guests.collect::<Result<Vec<_>>>()?;
    let mut rows = Vec::new();
    for (index, (function, _)) in WEIGHTS.iter().enumerate() {
        let figure = format!("share_points:{function}");
        let row = |mode, shares: &[f64; 4]| Row::new(&figure, mode, Some(shares[index]), "points");
        rows.push(row("host", &host));
        rows.extend(guests.iter().map(|(mode, shares)| row(*mode, shares)));
    }
    rows.extend(guests.iter().map(|(mode, shares)| {
        let off = Some(largest_difference(shares, &host));
        Row::new("largest_share_difference_points", *mode, off, "points")
    }));
    let rows = rows.into_iter().map(|row| beside(row, &PUBLISHED));
    let mut rows: Vec<Row> = rows.collect();
    for (kind, period) in [("", "-c 100000"), (":plain", "-F 4000")] {
        rows.extend(cost(context, kind, period)?);
    }
    Ok(rows)
}

/// Requests a guest whose profile is compared with native's, in the same time.
fn beside_native(model: Model) -> Request {
    Request {
        model,
        own_kvm: false,
        ..Request::new(Arch::X86_64)
    }
}

/// Measures what a sample with `period` costs the guest, and how far its shares are from the workload's weights.
fn cost(context: &Context<'_>, kind: &str, period: &str) -> Result<Vec<Row>> {
    let command = timed(CYCLES, period, 5000);
    let label = format!("cost{}", kind.replace(':', "-"));
    let designs = emulated(&[Policy::Paused]);
    let runs = context.compare(beside_native(context.model), &label, &designs, &command)?;
    let row = |row: &result::Row, figure, measured, unit| {
        Row::new(format!("{figure}{kind}"), mode(row.design), measured, unit)
    };
    let mut rows = Vec::new();
    for run in &runs {
        let off = Some(hundredths(share_difference(run)));
        rows.push(row(run, "guest_us_per_sample", us_per_sample(run)?, "us"));
        rows.push(row(run, "largest_difference_from_weights", off, "points"));
    }
    Ok(rows)
}

/// Reads the functions' shares in the order of [`WEIGHTS`], in percent of all samples.
fn shares(row: &result::Row) -> Result<[f64; 4]> {
    // perf's report omits functions without a sample.
    let share = |(function, _)| first(row, &format!("share:{function}")).unwrap_or(0.0);
    let shares = WEIGHTS.map(share);
    match shares.iter().all(|&share| share == 0.0) {
        true => Err(row.failed()),
        false => Ok(shares),
    }
}

fn largest_difference(shares: &[f64], others: &[f64]) -> f64 {
    let differences = shares.iter().zip(others).map(|(a, b)| (a - b).abs());
    hundredths(differences.fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences() {
        let (a, b) = ([5.0, 50.0, 30.0, 15.0], [5.4, 49.1, 30.1, 15.4]);
        assert_eq!(largest_difference(&a, &b), 0.9);
    }

    #[test]
    fn published_difference() {
        let values = PUBLISHED.map(|(.., value)| value);
        assert_eq!(largest_difference(&values[..4], &values[4..8]), values[8]);
        for ((figure, ..), (function, _)) in PUBLISHED.iter().zip(WEIGHTS.iter().cycle()).take(8) {
            assert!(figure.ends_with(function), "{figure}");
        }
    }
}
