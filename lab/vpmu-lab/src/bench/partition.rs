//! Measures the partitioned PMU against KVM's emulated one, published in 2025 for KVM on Arm with
//! ten counters. The published gzip run was of 64 MB.

use super::{Bench, Context, Row, beside, mode};
use crate::Result;
use crate::report::result::Run;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Pmu};

pub(super) const BENCH: Bench = Bench {
    name: "partition",
    page: include_str!("partition.md"),
    has_models: false,
    has_counters: false,
    rows,
};

/// A figure: its name, its unit, and how it is taken from a run.
type Figure = (&'static str, &'static str, fn(&Run) -> Option<f64>);

/// Commands, and the figures of each. `--no-bpf-event` keeps perf from waiting for a helper thread that wakes up once a
/// second. With that thread, every run would take some whole number of seconds more.
const PARTS: [(&str, &[Figure]); 2] = [
    (
        "perf record --no-bpf-event -F 1000 -e cycles,cycles:u,cycles:k,cycles,\
         cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,\
         cycles:u,cycles:k -o perf.data -- gzip -c random.bin > /dev/null",
        &[
            ("perf_run_s", "s", |run| Some(run.real_s)),
            ("perf_run_sys_s", "s", |run| Some(run.sys_s)),
            ("samples", "samples", |run| Some(run.samples? as f64)),
            ("exits_per_pmi", "exits", |run| run.exits_per_pmi),
        ],
    ),
    (
        "perf record --no-bpf-event -F 4000 -e cycles,cycles:u,cycles:k,cycles,\
         cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,cycles:u,cycles:k,cycles,\
         cycles:u,cycles:k -o perf.data -- stress-ng --quiet --cpu 0 --timeout 2",
        &[("host_share", "share", |run| run.host_share)],
    ),
];

const PUBLISHED: [(&str, &str, f64); 6] = [
    ("perf_run_s", "kvm", 4.143),
    ("perf_run_s", "partitioned", 3.139),
    ("perf_run_sys_s", "kvm", 0.159),
    ("perf_run_sys_s", "partitioned", 0.110),
    ("host_share", "kvm", 0.3496),
    ("host_share", "partitioned", 0.0097),
];

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = Arch::Aarch64.designs();
    let designs: Vec<Design> = designs.iter().copied().map(Design::from).collect();
    let mut rows = Vec::new();
    for (number, (command, figures)) in (1..).zip(PARTS) {
        let part = number.to_string();
        let request = Request::new(Arch::Aarch64);
        let runs = context.compare(request, &part, &designs, command)?;
        let runs = runs
            .into_iter()
            .map(|row| (mode(row.design), Some(row.run)));
        let kept = runs_with_host_counters(context, &part, command)?;
        let runs: Vec<_> = runs.chain(kept).collect();
        for figure in figures {
            rows.extend(
                runs.iter()
                    .map(|(mode, run)| row(figure, mode, run.as_ref())),
            );
        }
    }
    Ok(rows)
}

fn row((figure, unit, of): &Figure, mode: &str, run: Option<&Run>) -> Row {
    beside(Row::new(*figure, mode, run.and_then(of), *unit), &PUBLISHED)
}

/// Modes of the partitioned PMU in which the monitor keeps counters, with their number.
const WITH_HOST_COUNTERS: [(&str, u32); 2] = [("partitioned+1host", 1), ("partitioned+2host", 2)];

/// Runs `command` with the counters of each of [`WITH_HOST_COUNTERS`] kept; `None` on a machine that does not keep them
/// apart from the guest's, where everything traps and nothing of the partition is left to measure.
fn runs_with_host_counters(
    context: &Context<'_>,
    part: &str,
    command: &str,
) -> Result<Vec<(&'static str, Option<Run>)>> {
    let run = |part: &str, host_counters, command: &str| {
        let request = Request {
            host_counters,
            ..Request::new(Arch::Aarch64)
        };
        let rows = context.compare(request, part, &[Pmu::Partitioned.into()], command)?;
        Ok(rows.into_iter().next().map(|row| row.run))
    };
    let probed: Option<Run> = run(&format!("{part}-probe"), 1, "true")?;
    let isolates = probed.is_some_and(|run| isolates(&run));
    let runs = WITH_HOST_COUNTERS.iter().map(|&(mode, host_counters)| {
        let part = format!("{part}-{host_counters}host");
        let run = isolates.then(|| run(&part, host_counters, command));
        Ok((mode, run.transpose()?.flatten()))
    });
    runs.collect()
}

/// Tells whether the monitor found that the machine keeps its counters apart from those of the guest of `run`.
pub(super) fn isolates(run: &Run) -> bool {
    let monitor = run.monitor.as_ref();
    let isolation = monitor.and_then(|monitor| monitor.more.get("isolation"));
    isolation.is_some_and(|isolation| isolation["partition"] == true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::command::Command;
    use crate::spec::{Guest, Way};
    use vpmu_measure::Record;

    #[test]
    fn rows_have_what_was_published() {
        let guest = Guest {
            design: Pmu::Kvm.into(),
            way: Way::Native,
        };
        let request = Request {
            command: Command::from_words(&["x".to_owned()]),
            ..Request::new(Arch::Aarch64)
        };
        let meter = br#"{"meter":{"status":0,"signal":null,"real_ns":2500000000,"user_us":1,"sys_us":1,"pmis":0}}"#;
        let run = Run::from_records(None, &request, &guest, &[Record::parse(meter).unwrap()]);
        let run = run.unwrap();
        let rows = PARTS[0]
            .1
            .iter()
            .map(|figure| row(figure, "kvm", Some(&run)));
        let rows: Vec<Row> = rows.collect();
        assert_eq!((&*rows[0].figure, &*rows[0].mode), ("perf_run_s", "kvm"));
        assert_eq!(
            (rows[0].measured, rows[0].published),
            (Some(2.5), Some(4.143))
        );
        assert_eq!(rows[3].measured, None);
    }
}
