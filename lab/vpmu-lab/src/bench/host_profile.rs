//! The host samples a guest that samples itself, on arm64 with the counters divided.

use super::partition::isolates;
use super::parts::{Figure, QUIET, SHARES, WEIGHTS, figure, first};
use super::{Bench, Context, Row, mode};
use crate::report::profile::own;
use crate::report::result;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Pmu};
use crate::{Error, Result};

pub(super) const BENCH: Bench = Bench {
    name: "host-profile",
    page: include_str!("host_profile.md"),
    has_models: false,
    has_counters: false,
    rows,
};

/// Samples of the host's, a second.
const RATE: &str = "1000";
/// One host counter samples, the other counts the monitor's instructions.
const HOST_COUNTERS: u32 = 2;

/// The guest's period has no divisor in common with the workload's unit of 100,000 instructions. The clock is inside the
/// recording, whose begin and end are no part of the program's time.
fn command() -> String {
    format!(
        "{QUIET}perf record --no-bpf-event -q -e cycles -c 1003331 -o perf.data -- \
         perf stat -x, -o time -e duration_time workload --scale 20000 && \
         awk -F, '/duration_time/ {{ print \"time\", $1 }}' time; \
         perf report --stats -i perf.data 2>/dev/null | awk '$1 == \"SAMPLE\" {{ print \"samples\", $3; exit }}'; {SHARES}"
    )
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let run = |part, profile: Option<&str>| {
        let request = Request {
            host_counters: HOST_COUNTERS,
            host_profile: profile.and_then(|rate| rate.parse().ok()),
            ..Request::new(Arch::Aarch64)
        };
        context.compare(request, part, &[Design::from(Pmu::Partitioned)], &command())
    };
    let (without, with) = (run("without", None)?, run("with", Some(RATE))?);
    let (without, with) = (&without[0], &with[0]);
    // Where the machine does not keep the counters apart, nothing of the partition is left to measure.
    let is_known = isolates(&with.run);
    let rows = measured(without, with)?.map(|mut figure| {
        figure.value = figure.value.filter(|_| is_known);
        figure.row("", mode(with.design))
    });
    Ok(rows.into())
}

/// Compares the run with the host's profile to that without.
fn measured(without: &result::Row, with: &result::Row) -> Result<[Figure; 5]> {
    let ratio = |word| Ok::<_, Error>(first(with, word)? / first(without, word)?);
    let profile = with.run.host_profile.as_ref();
    let samples = profile.map(|profile| profile.folded.values().sum::<u64>() as f64);
    let more = instructions(with).zip(instructions(without));
    let more = more.map(|(with, without)| with - without);
    let each = more.zip(samples.filter(|&samples| samples > 0.0));
    let each = each.map(|(more, samples)| more / samples);
    Ok([
        figure(
            "largest_share_difference_points",
            difference(with),
            "points",
        ),
        figure("guest_time_ratio", Some(ratio("time")?), "ratio"),
        figure("guest_samples_ratio", Some(ratio("samples")?), "ratio"),
        figure("host_samples", samples, "samples"),
        figure("el2_instructions_per_sample", each, "instructions"),
    ])
}

/// Returns the instructions that the monitor executed while the command ran.
fn instructions(row: &result::Row) -> Option<f64> {
    let measured = row.run.monitor.as_ref()?.measured.as_ref()?;
    measured.more.get("el2_instructions")?.as_f64()
}

/// Returns the largest difference between a function's share in the host's profile and in the guest's own, in points.
/// `None`: the host has no sample of the program.
fn difference(row: &result::Row) -> Option<f64> {
    let profile = row.run.host_profile.as_ref()?;
    let own = own(profile);
    let of = |function: &str| own.get(function).map_or(0.0, |&samples| samples as f64);
    let all: f64 = WEIGHTS.iter().map(|(function, _)| of(function)).sum();
    let differences = WEIGHTS.map(|(function, _)| {
        let guest = first(row, &format!("share:{function}")).unwrap_or(0.0);
        (100.0 * of(function) / all - guest).abs()
    });
    (all > 0.0).then(|| differences.into_iter().fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_valid_shell() {
        let status = std::process::Command::new("sh")
            .args(["-n", "-c", &command()])
            .status()
            .unwrap();
        assert!(status.success());
    }
}
