//! Measures how long a guest's NMI handler takes when a paused event is left
//! alone, published in 2021 for KVM on Intel: four sampled events, ten runs.
//!
//! The guest's own tracepoint `nmi:nmi_handler` times its PMU handler, so the
//! figure holds every exit that the handler causes.

use super::parts::{handler_mean, with_timed_handlers};
use super::{Bench, Context, Row, beside, emulated, for_each_pmi, hundredths, mode};
use crate::Result;
use crate::report::result::Run;
use crate::spec::design::Policy;

pub(super) const BENCH: Bench = Bench {
    name: "paused",
    page: include_str!("paused.md"),
    has_models: true,
    has_counters: true,
    rows,
};

/// A set of sampled events; the names of its figures end with `suffix`.
struct Part {
    suffix: &'static str,
    events: &'static str,
    runs: u32,
    /// The workload's scale; 1000 gives some 100 samples of each event.
    scale: u32,
}

/// The published four events, three times, and one event by itself.
///
/// Twelve events do not fit the guest's seven counters, so the guest's perf multiplexes them, as in the published runs.
/// Cache misses are replaced. Without a hardware PMU, a clock can only pretend to count instructions and branches, one
/// a cycle, which costs the same operations. The single event shows the cost of one interrupt.
const PARTS: [Part; 2] = [
    Part {
        suffix: "",
        events: "cpu-cycles,instructions,branch-instructions,ref-cycles,\
                 cpu-cycles,instructions,branch-instructions,ref-cycles,\
                 cpu-cycles,instructions,branch-instructions,ref-cycles",
        runs: 10,
        scale: 500,
    },
    Part {
        suffix: ":one_event",
        events: "cpu-cycles",
        // One long run makes the operations of perf's own start negligible.
        runs: 1,
        scale: 5000,
    },
];

const PUBLISHED: [(&str, &str, f64); 3] = [
    ("nmi_handler_ns", "reuse", 37_646.7),
    ("nmi_handler_ns", "paused", 32_929.3),
    ("nmi_handler_gain", "paused", 1.14),
];

impl Part {
    /// Builds the published command, with less to run, all runs in one boot, and a fixed period
    /// instead of a frequency. With a frequency perf takes more samples the slower they are, and the
    /// QEMU that emulates the host fails after some tens of thousands.
    fn command(&self) -> String {
        with_timed_handlers(&format!(
            "echo 25 > /proc/sys/kernel/perf_cpu_time_max_percent && \
             echo 10000 > /proc/sys/kernel/perf_event_max_sample_rate && \
             echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent && \
             for run in $(seq {runs}); do \
             perf record --no-bpf-event -q -c 1000000 -e {events} \
             -o perf.data -- workload --scale {scale} || exit; done",
            runs = self.runs,
            scale = self.scale,
            events = self.events
        ))
    }
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&[Policy::Reuse, Policy::Paused]);
    let (mut handlers, mut operations) = (Vec::new(), Vec::new());
    for (number, part) in (1..).zip(&PARTS) {
        let runs = context.compare(
            context.request(&["--approximate-instructions"]),
            &format!("{number}"),
            &designs,
            &context.with_events(&part.command()),
        )?;
        let mut means = Vec::new();
        for row in &runs {
            let mean = handler_mean(row)?;
            let figure = format!("nmi_handler_ns{}", part.suffix);
            let tenths = mean.map(|mean| (mean * 10.0).round() / 10.0);
            handlers.push(Row::new(figure, mode(row.design), tenths, "ns"));
            means.push(mean);
            operations.extend(host_operations(&row.run, part.suffix));
        }
        if let [Some(reuse), Some(paused)] = means[..] {
            let figure = format!("nmi_handler_gain{}", part.suffix);
            let gain = Some(hundredths(reuse / paused));
            handlers.push(Row::new(figure, Policy::Paused.name(), gain, "times"));
        }
    }
    let rows = handlers.into_iter().chain(operations);
    Ok(rows.map(|row| beside(row, &PUBLISHED)).collect())
}

/// Returns the sum of all operations, and the number of each kind.
fn host_operations(run: &Run, suffix: &str) -> Vec<Row> {
    let mode = mode(run.design());
    let row = |figure: &str, measured| {
        Row::new(format!("{figure}{suffix}"), mode, measured, "operations")
    };
    let mut rows = vec![row("host_ops_per_pmi", run.host_operations_per_pmi)];
    for (kind, &count) in run.host_operations.iter().flatten() {
        let each = for_each_pmi(count as f64, run.pmis);
        rows.push(row(&format!("host_ops_per_pmi:{kind}"), each));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_gain() {
        let [(.., reuse), (.., paused), (.., gain)] = PUBLISHED;
        assert_eq!(hundredths(reuse / paused), gain);
    }

    #[test]
    fn twelve_events_are_more_than_seven_counters() {
        assert_eq!(PARTS[0].events.split(',').count(), 12);
        assert!(PARTS[0].events.split(',').all(|event| !event.contains(' ')));
        assert!(PARTS[0].command().contains("{ n++; sum += "));
    }
}
