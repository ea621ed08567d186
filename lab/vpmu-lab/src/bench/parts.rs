//! What the benches of sampling share: parts with a command each, and the figures of its guests.

use crate::Result;
use crate::report::figures::Row;
use crate::report::result;

/// The beginning of each command that samples. It stops throttling, so that all designs take all requested
/// samples: a limit that 10,000 samples a second reach would stop and start the event.
pub(super) const QUIET: &str = "echo 25 > /proc/sys/kernel/perf_cpu_time_max_percent && \
    echo 100000 > /proc/sys/kernel/perf_event_max_sample_rate && \
    echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent && ";

/// Records cycles; the period or frequency follows.
pub(super) const CYCLES: &str = "perf record --no-bpf-event -q -e cycles -o perf.data";

/// A part: its name, its command, and the figures of each design's guest.
pub(super) struct Part {
    pub(super) name: &'static str,
    pub(super) command: String,
    pub(super) figures: fn(&result::Row) -> Result<Vec<Figure>>,
}

pub(super) struct Figure {
    pub(super) name: String,
    /// The figure's mode, where that is not the design's own.
    pub(super) mode: Option<&'static str>,
    pub(super) value: Option<f64>,
    pub(super) unit: &'static str,
}

pub(super) fn part(
    name: &'static str,
    command: impl Into<String>,
    figures: fn(&result::Row) -> Result<Vec<Figure>>,
) -> Part {
    let command = command.into();
    Part {
        name,
        command,
        figures,
    }
}

impl Figure {
    /// Returns the row of a figure that nobody has published, with `suffix` behind its name.
    pub(super) fn row(self, suffix: &str, mode: &'static str) -> Row {
        let figure = format!("{}{suffix}", self.name);
        Row::new(figure, self.mode.unwrap_or(mode), self.value, self.unit)
    }
}

pub(super) fn figure(name: impl Into<String>, value: Option<f64>, unit: &'static str) -> Figure {
    Figure {
        name: name.into(),
        mode: None,
        value: value.map(round),
        unit,
    }
}

/// Prints each function's share of the workload's samples in `perf.data`.
pub(super) const SHARES: &str = "perf report -i perf.data --stdio --comms workload --percentage relative \
    --sort symbol -F overhead,sym -t , 2>/dev/null | \
    awk -F, '/^ *[0-9]/ { split($2, word, \" \"); print \"share:\" word[2], $1 + 0 }'; ";

/// Returns a command that times the workload under `record` twice: with a period that never ends, and with `period`. It
/// prints the guest times in ns, the number of the workload's samples, and each function's share.
pub(super) fn timed(record: &str, period: &str, scale: u32) -> String {
    let program = format!("workload --scale {scale}");
    timed_program(record, period, "workload", &program) + SHARES
}

/// Times a program called `name` as [`timed`] does the workload, without shares. The clock is inside the recording:
/// the begin and end of `perf record` take longer than all samples, and not always as long: where a sample hit the kernel,
/// build IDs take a third of a second more.
pub(super) fn timed_program(record: &str, period: &str, name: &str, program: &str) -> String {
    // `perf stat` around the program has some samples, too, outside the time measured.
    format!(
        "{QUIET}timed() {{ {record} $1 -- perf stat -x, -o time -e duration_time {program} && \
         awk -F, -v name=$2 '/duration_time/ {{ print name, $1 }}' time; }}; \
         timed '-c 1000000000000' without && timed '{period}' with && \
         perf report -i perf.data --stdio --comms {name} --no-branch-stack --no-children -g none --sort comm \
         -F sample,comm -t , 2>/dev/null | awk -F, '/^ *[0-9]+ *,{name}/ {{ print \"samples\", $1 + 0 }}'; "
    )
}

/// Returns the guest time of a sample of the workload in us, by the output of [`timed_program`]; `None` without a sample.
pub(super) fn us_per_sample(row: &result::Row) -> Result<Option<f64>> {
    let [without, with, samples] = ["without", "with", "samples"].map(|word| first(row, word));
    let (without, with, samples) = (without?, with?, samples?);
    Ok((samples > 0.0).then(|| (with - without) / samples / 1e3))
}

/// Returns the figure of [`us_per_sample`].
pub(super) fn sample_cost(row: &result::Row) -> Result<Figure> {
    Ok(figure("guest_us_per_sample", us_per_sample(row)?, "us"))
}

/// Shares of the workload's functions, in percent.
pub(super) const WEIGHTS: [(&str, f64); 4] =
    [("main", 5.0), ("foo", 50.0), ("bar", 30.0), ("qux", 15.0)];

/// Returns the largest difference of a function's share, by the output of [`SHARES`], from its weight.
pub(super) fn share_difference(row: &result::Row) -> f64 {
    off_weights(|function| first(row, &format!("share:{function}")).unwrap_or(0.0))
}

/// Returns the figure of [`share_difference`].
pub(super) fn share_error(row: &result::Row) -> Figure {
    let off = Some(share_difference(row));
    figure("largest_share_difference_points", off, "points")
}

/// Returns the largest difference of a function's `share` from its weight.
pub(super) fn off_weights(share: impl Fn(&str) -> f64) -> f64 {
    let differences = WEIGHTS.map(|(function, weight)| (share(function) - weight).abs());
    differences.into_iter().fold(0.0, f64::max)
}

/// Returns the first number behind the line that begins with `word`.
pub(super) fn first(row: &result::Row, word: &str) -> Result<f64> {
    let number = numbers(&row.output, word).and_then(|numbers| numbers.first().copied());
    number.ok_or_else(|| row.failed())
}

/// Returns `command` with a clock around each of the guest's NMI handlers that serve its PMU, for [`handler_mean`].
pub(super) fn with_timed_handlers(command: &str) -> String {
    format!(
        "cd /sys/kernel/tracing && echo 16384 > buffer_size_kb && echo 1 > events/nmi/nmi_handler/enable && \
         cd /root && {command}; echo 0 > /sys/kernel/tracing/events/nmi/nmi_handler/enable; \
         awk '/(vpmu_pmu_nmi|perf_event_nmi_handler)/ && match($0, /delta_ns: [0-9]+/) \
         {{ n++; sum += substr($0, RSTART + 10, RLENGTH - 10) }} \
         END {{ print \"handlers\", n + 0, sum + 0 }}' /sys/kernel/tracing/trace"
    )
}

/// Returns the mean time of the guest's NMI handlers in ns, by the output of [`with_timed_handlers`]; `None` when none has
/// run.
pub(super) fn handler_mean(row: &result::Row) -> Result<Option<f64>> {
    match numbers(&row.output, "handlers").as_deref() {
        Some(&[count, sum]) => Ok((count > 0.0).then(|| sum / count)),
        _ => Err(row.failed()),
    }
}

/// Returns the numbers in the line of a command's output that begins with `word`.
pub(super) fn numbers(output: &[u8], word: &str) -> Option<Vec<f64>> {
    let text = String::from_utf8_lossy(output);
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(word)?.strip_prefix(' '))?;
    line.split_whitespace()
        .map(|word| word.parse().ok())
        .collect()
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench) fn assert_valid_shell(parts: &[Part]) {
        for part in parts {
            let status = std::process::Command::new("sh")
                .args(["-n", "-c", &part.command])
                .status()
                .unwrap();
            assert!(status.success(), "{}", part.name);
        }
    }

    #[test]
    fn numbers_of_a_line() {
        let output = b"x 1\nnmi 10 2.5\nnmi_other 3\n";
        assert_eq!(numbers(output, "nmi"), Some(vec![10.0, 2.5]));
        assert_eq!(numbers(output, "nm"), None);
        assert_eq!(numbers(b"nmi x\n", "nmi"), None);
    }

    #[test]
    fn the_weights_are_the_workloads() {
        let sum: f64 = WEIGHTS.iter().map(|(_, weight)| weight).sum();
        assert_eq!(sum, 100.0);
    }
}
