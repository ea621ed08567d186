//! Measures the exits that the paravirtual PMU saves for a sample and for a context switch,
//! compared with the trapped design on the same kernel.

use super::parts::{
    CYCLES, Figure, Part, QUIET, figure, first, handler_mean, part, sample_cost, share_error,
    timed, with_timed_handlers,
};
use super::{Bench, Context, Row, beside};
use crate::Result;
use crate::report::result;
use crate::spec::design::{Design, Pmu, Policy};

pub(super) const BENCH: Bench = Bench {
    name: "paravirt",
    has_models: false,
    has_counters: false,
    page: include_str!("paravirt.md"),
    rows,
};

const PIPE: &str = "us() { name=$1; shift; \"$@\" perf bench sched pipe -l 2000 2>&1 | \
     awk -v name=$name '/usecs\\/op/ { print name, $1 }'; }; \
     us none env; us four perf stat -e cycles,cycles,cycles,cycles; \
     us alone perf stat --no-inherit -e cycles,cycles,cycles,cycles; \
     us dummy perf stat -e dummy,dummy,dummy,dummy; \
     us dummy_alone perf stat --no-inherit -e dummy,dummy,dummy,dummy";

fn parts() -> Vec<Part> {
    let pipe = |events: &str| {
        format!(
            "before=$(awk '$1 == \"ctxt\" {{ print $2 }}' /proc/stat); \
             perf stat --no-inherit -e {events} perf bench sched pipe -l 2000 || exit; \
             echo switches $(($(awk '$1 == \"ctxt\" {{ print $2 }}' /proc/stat) - before))"
        )
    };
    let fixed = format!("{QUIET}{CYCLES} -c 100000 -- workload --scale 5000");
    let frequency = format!("{QUIET}{CYCLES} -F 1000 -- workload --scale 10000");
    vec![
        part("unused", "workload --scale 1000", |row| {
            let count = |count: Option<u64>| count.map(|count| count as f64);
            let operations = row.run.host_operations.as_ref();
            let operations = operations.map(|kinds| kinds.values().sum());
            Ok(vec![
                figure("exits_unused", count(row.run.pmu_exits()), "exits"),
                figure("host_ops_unused", count(operations), "operations"),
            ])
        }),
        part("fixed", fixed, |row| {
            let operations = row.run.host_operations_per_pmi;
            Ok(vec![
                figure("exits_per_pmi", row.run.pmu_exits_per_pmi, "exits"),
                figure("host_ops_per_pmi", operations, "operations"),
            ])
        }),
        part("frequency", frequency, |row| {
            let exits = row.run.pmu_exits_per_pmi;
            Ok(vec![figure("exits_per_pmi:frequency", exits, "exits")])
        }),
        part("time", time(), of_time),
        part("switch-1", pipe("cycles"), |row| per_switch(row, 1)),
        part("switch-4", pipe("cycles,cycles,cycles,cycles"), |row| {
            per_switch(row, 4)
        }),
        part("pipe", PIPE, of_pipe),
    ]
}

/// Returns a command with two records, one of them without samples, and one record whose handlers
/// are timed.
fn time() -> String {
    let timed = timed(CYCLES, "-c 100000", 5000);
    timed + &with_timed_handlers(&format!("{CYCLES} -c 1000000 -- workload --scale 5000"))
}

fn of_time(row: &result::Row) -> Result<Vec<Figure>> {
    Ok(vec![
        sample_cost(row)?,
        figure("nmi_handler_ns", handler_mean(row)?, "ns"),
        share_error(row),
    ])
}

fn of_pipe(row: &result::Row) -> Result<Vec<Figure>> {
    let mut figures = vec![
        figure("sched_pipe_us", Some(first(row, "four")?), "us"),
        figure("sched_pipe_us:no_inherit", Some(first(row, "alone")?), "us"),
    ];
    // Without perf, and with events that no PMU counts, both designs have the same guest.
    if row.design.pmu == Pmu::Paravirt {
        for (name, mode, word) in [
            ("sched_pipe_us", "none", "none"),
            ("sched_pipe_us", "dummy", "dummy"),
            ("sched_pipe_us:no_inherit", "dummy", "dummy_alone"),
        ] {
            figures.push(Figure {
                mode: Some(mode),
                ..figure(name, Some(first(row, word)?), "us")
            });
        }
    }
    Ok(figures)
}

fn per_switch(row: &result::Row, events: u32) -> Result<Vec<Figure>> {
    let switches = first(row, "switches")?;
    let exits = row.run.pmu_exits().map(|exits| exits as f64 / switches);
    let name = format!("exits_per_switch:{events}");
    Ok(vec![figure(name, exits, "exits")])
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let trapped = Design {
        pmu: Pmu::Emulated,
        policy: Some(Policy::Paused),
    };
    let request = context.request(&["--approximate-instructions"]);
    let designs = [trapped, Pmu::Paravirt.into()];
    let mode = |row: &result::Row| match row.design.pmu {
        Pmu::Paravirt => "paravirt",
        _ => "trapped",
    };
    let rows = context.measure(&request, &designs, &parts(), ("", ""), mode)?;
    let rows = rows.into_iter().map(|row| beside(row, &PUBLISHED));
    Ok(rows.collect())
}

/// The published exits to the VMM for an interrupt: 8.5 for MSRs, 1.3 for RDPMC, 1 for the NMI.
const PUBLISHED: [(&str, &str, f64); 1] = [("exits_per_pmi", "trapped", 10.8)];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_valid_shell() {
        crate::bench::parts::tests::assert_valid_shell(&parts());
    }
}
