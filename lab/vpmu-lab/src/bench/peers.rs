//! Compares this project's x86 PMUs with native and with those of KVM, on the counters of one emulated processor.

use super::parts::{
    CYCLES, Figure, Part, QUIET, SHARES, figure, first, part, sample_cost, share_error, timed,
};
use super::{Bench, Context, Row};
use crate::report::result;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Backing, Design, Model, Pebs, Pmu, Policy};
use crate::{Result, usage};

pub(super) const BENCH: Bench = Bench {
    name: "peers",
    has_models: false,
    has_counters: true,
    page: include_str!("peers.md"),
    rows,
};

/// A PMU: its name, its design, and what its guest asks for.
struct Mode {
    name: &'static str,
    pmu: Pmu,
    model: Model,
    backing: Option<Backing>,
    pebs: Pebs,
}

const fn mode(name: &'static str, pmu: Pmu) -> Mode {
    Mode {
        name,
        pmu,
        model: Model::Auto,
        backing: None,
        pebs: Pebs::Off,
    }
}

const fn ours(name: &'static str, model: Model) -> Mode {
    Mode {
        model,
        backing: Some(Backing::Hardware),
        ..mode(name, Pmu::Emulated)
    }
}

const MODES: [Mode; 8] = [
    mode("native", Pmu::Native),
    mode("kvm", Pmu::Kvm),
    mode("mediated", Pmu::Mediated),
    ours("emulated", Model::Amd),
    ours("emulated-v2", Model::AmdV2),
    Mode {
        backing: Some(Backing::Clock),
        ..ours("emulated-clock", Model::Amd)
    },
    Mode {
        backing: Some(Backing::Hardware),
        ..mode("paravirt", Pmu::Paravirt)
    },
    Mode {
        pebs: Pebs::Buffer,
        ..ours("pebs-ring", Model::Intel)
    },
];

/// Fewer interrupts say nothing of the exits of one: a guest with PEBS takes one for two thousand samples.
const ENOUGH_PMIS: u64 = 100;
/// 1.6 times the workload's unit, so that samples meet each part of it.
const SHARE_PERIOD: u32 = 169_559;
/// More than there are counters.
const MULTIPLEXED: usize = 12;

impl Mode {
    fn parts(&self) -> [Part; 2] {
        let precise = self.pebs != Pebs::Off;
        let record = match precise {
            true => CYCLES.replace("cycles", "cycles:pp"),
            false => CYCLES.to_owned(),
        };
        let events = ["cycles:u"; MULTIPLEXED].join(",");
        let fixed = format!("{record} -c 100000 -- workload --scale 3000");
        [
            // With a stock guest's limits: where a sample takes too long, its kernel throttles perf.
            part("fixed", fixed, |row| {
                let samples = row.run.samples.map(|samples| samples as f64);
                let enough = row.run.pmis.is_some_and(|pmis| pmis >= ENOUGH_PMIS);
                let exits = row.run.exits_per_pmi.filter(|_| enough);
                Ok(vec![
                    figure("samples", samples, "samples"),
                    figure("exits_per_pmi", exits, "exits"),
                ])
            }),
            part(
                "time",
                format!(
                    "{QUIET}{record} -c {SHARE_PERIOD} -- workload --scale 3000 && {SHARES}{}us() {{ name=$1; shift; \"$@\" perf bench sched pipe -l 1000 2>&1 | \
                     awk -v name=$name '/usecs\\/op/ {{ print name, $1 }}'; }}; \
                     us one perf stat -e cycles; us four perf stat -e cycles,cycles,cycles,cycles; \
                     counts() {{ perf stat -x, -o stat -e $1 workload --scale 3000; awk -F, '/cycles/ {{ print $1 }}' stat; }}; \
                     alone=$(counts cycles:u); counts {events} | awk -v alone=$alone \
                     '{{ off = $1 / alone - 1; if (off < 0) off = -off; if (off > most) most = off }} \
                     END {{ if (NR == {MULTIPLEXED}) print \"multiplexed\", 100 * most }}'",
                    timed(&record, "-c 100000", 1000)
                ),
                of_time,
            ),
        ]
    }

    fn rows(&self, context: &Context<'_>) -> Result<Vec<Row>> {
        let skid = (self.pebs != Pebs::Off).then(|| "--pebs-skid".to_owned());
        let request = Request {
            model: self.model,
            backing: self.backing,
            pebs: self.pebs,
            vmm_args: skid.into_iter().collect(),
            // Beside KVM's own PMUs, of which each is another guest of the same machine.
            own_kvm: false,
            ..Request::new(Arch::X86_64)
        };
        let design = Design {
            pmu: self.pmu,
            policy: (self.pmu == Pmu::Emulated).then(Policy::default),
        };
        let label = format!("{}-", self.name);
        context.measure(&request, &[design], &self.parts(), (&label, ""), |_| {
            self.name
        })
    }
}

fn of_time(row: &result::Row) -> Result<Vec<Figure>> {
    let multiplexed = Some(first(row, "multiplexed")?);
    Ok(vec![
        sample_cost(row)?,
        figure("sched_pipe_us", Some(first(row, "one")?), "us"),
        figure("sched_pipe_us:4", Some(first(row, "four")?), "us"),
        figure("multiplexed_error_percent", multiplexed, "percent"),
        share_error(row),
    ])
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    if !context.qemu.has_x86_pmu() {
        return usage(
            "bench peers needs a processor with counters, which this QEMU does not emulate: script/qemu builds one that \
             does, and --qemu or VPMU_QEMU takes its folder",
        );
    }
    let mut rows = Vec::new();
    for mode in &MODES {
        rows.extend(mode.rows(context)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_valid_shell() {
        for mode in &MODES {
            crate::bench::parts::tests::assert_valid_shell(&mode.parts());
        }
    }
}
