//! How long a guest's NMI handler takes when a paused event is left alone,
//! published in 2021 for KVM on Intel: four sampled events, ten runs.
//!
//! The guest's own tracepoint `nmi:nmi_handler` times its PMU handler, so the
//! figure holds every exit that the handler causes.

use super::{Bench, Context, Row, emulated, mode, numbers};
use crate::arch::Arch;
use crate::design::Policy;
use crate::{Error, Result};

pub(super) const BENCH: Bench = Bench {
    name: "paused",
    about: "a guest's NMI handler, when a host event that is off is left alone (x86_64)",
    rows,
};

/// As published, with less to run, and a fixed period instead of a frequency:
/// with one, perf takes more samples the slower they are, and the QEMU that
/// emulates the host does not stand tens of thousands of them. Where a host has nothing that counts instructions, the
/// approximation by its clock costs the same operations.
const COMMAND: &str = "\
cd /sys/kernel/tracing && echo 16384 > buffer_size_kb && \
echo 25 > /proc/sys/kernel/perf_cpu_time_max_percent && \
echo 10000 > /proc/sys/kernel/perf_event_max_sample_rate && \
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent && \
echo 1 > events/nmi/nmi_handler/enable && cd /root && \
for run in $(seq 10); do \
perf record --no-bpf-event -q -c 1000000 -e cpu-cycles -e instructions -e branch-instructions -e ref-cycles \
-o perf.data -- workload --scale 500 || exit; done; \
echo 0 > /sys/kernel/tracing/events/nmi/nmi_handler/enable; \
awk '/perf_event_nmi_handler/ && match($0, /delta_ns: [0-9]+/) \
{ n++; sum += substr($0, RSTART + 10, RLENGTH - 10) } END { print \"handlers\", n + 0, sum + 0 }' \
/sys/kernel/tracing/trace";

const PUBLISHED: [(Policy, f64); 2] = [(Policy::Reuse, 37_646.7), (Policy::Paused, 32_929.3)];

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let designs = emulated(&PUBLISHED.map(|(policy, _)| policy));
    let runs = context.compare(
        "1",
        Arch::X86_64,
        &designs,
        &["--approximate-instructions"],
        COMMAND,
    )?;
    let mut handlers = Vec::new();
    let mut operations = Vec::new();
    for (row, (_, published)) in runs.iter().zip(PUBLISHED) {
        let Some([count, sum]) = numbers(&row.output, "handlers").as_deref().and_then(pair) else {
            return Err(Error::CommandFailed {
                design: row.design,
                status: row.run.status,
                output: String::from_utf8_lossy(&row.output).into_owned(),
            });
        };
        handlers.push(Row {
            figure: "nmi_handler_ns".to_owned(),
            mode: mode(row.design),
            measured: (count > 0.0).then(|| (sum / count * 10.0).round() / 10.0),
            published: Some(published),
            unit: "ns",
        });
        operations.push(Row {
            figure: "host_ops_per_pmi".to_owned(),
            mode: mode(row.design),
            measured: row.run.host_operations_per_pmi,
            published: None,
            unit: "operations",
        });
    }
    handlers.extend(operations);
    Ok(handlers)
}

fn pair(numbers: &[f64]) -> Option<[f64; 2]> {
    numbers.try_into().ok()
}
