//! Measures how well counters of one privilege ring divide a clock's time: how far their sum is from the counter of both,
//! and their shares from what the guest is known to execute.
//!
//! An instruction of the workload is a nanosecond of the guest's, and a cycle, on the machine that counts them.

use super::parts::{QUIET, first};
use super::{Bench, Context, Row, emulated, hundredths};
use crate::Result;
use crate::spec::design::Policy;

pub(super) const BENCH: Bench = Bench {
    name: "rings",
    page: include_str!("rings.md"),
    has_models: true,
    has_counters: false,
    rows,
};

/// The workload's scale: so many times 100,000 instructions in user space.
const SCALE: u32 = 2800;
/// Longer than what makes the guest's kernel throttle perf.
const PERIOD: u32 = 500_000;

fn command() -> String {
    let mixed = format!(
        "echo 'workload --scale {SCALE}; dd if=/dev/zero of=/dev/null bs=1M count=110 2> /dev/null' > mixed && \
         counts() {{ awk -F, -v what=$1 '/^[0-9]/ {{ print what \":\" $3, $1 }}' stat; }}"
    );
    let sampled = |ring: &str| {
        format!(
            "perf record --no-bpf-event -q -c {PERIOD} -e cycles:{ring} -o ring.data sh mixed && \
             perf script -i ring.data -F ip 2> /dev/null | awk 'END {{ print \"samples:{ring}\", NR }}'"
        )
    };
    let (user, kernel) = (sampled("u"), sampled("k"));
    format!(
        "{QUIET}{mixed} && perf stat -x, -o stat -e cycles sh mixed && counts whole && \
         perf stat -x, -o stat -e cycles,cycles:u,cycles:k sh mixed && counts counted && {user} && {kernel}"
    )
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&[Policy::Paused]);
    let runs = context.compare(context.request(&[]), "mixed", &designs, &command())?;
    let mut rows = Vec::new();
    for run in &runs {
        let whole = first(run, "whole:cycles")?;
        let both = first(run, "counted:cycles")?;
        // Of the mixture by itself: it takes longer while it is sampled.
        let known = f64::from(SCALE) * 100_000.0 / whole;
        let counted = [
            first(run, "counted:cycles:u")?,
            first(run, "counted:cycles:k")?,
        ];
        let samples = [first(run, "samples:u")?, first(run, "samples:k")?];
        let sampled = samples.map(|samples| samples * f64::from(PERIOD));
        for (mode, [user, kernel]) in [("counting", counted), ("sampling", sampled)] {
            let sum = 100.0 * ((user + kernel) / both - 1.0).abs();
            let share = 100.0 * (user / (user + kernel) - known).abs();
            let row =
                |figure, measured, unit| Row::new(figure, mode, Some(hundredths(measured)), unit);
            rows.extend([
                row("ring_sum_error_percent", sum, "percent"),
                row("ring_share_error_points", share, "points"),
            ]);
        }
    }
    Ok(rows)
}
