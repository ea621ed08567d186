//! Measures the saving of a lazy TSC deadline, published in 2023 for KVM on Intel with netperf's
//! TCP_RR over loopback.
//!
//! A stock KVM host in the emulated machine runs vpmu-vmm with a stock Debian 12 kernel and the
//! module `guest/lazy_deadline`. The module's mode is the only difference between runs. In mode
//! `plain` it makes the stock driver's writes, and measures.
//!
//! The host counts, with KVM's tracepoints ([`stats`]); the module measures
//! the latency from a deadline to its handler.

mod read;
mod stats;

use stats::Stats;

use super::{Bench, Context, Row};
use crate::Result;
use crate::host::parallel;
use crate::image::module::{Kernel, Modules};
use crate::report::result::Run;
use crate::spec::Request;
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Pmu};

pub(super) const BENCH: Bench = Bench {
    name: "deadline",
    page: include_str!("page.md"),
    has_models: false,
    has_counters: false,
    rows,
};

/// The sides that decide about writes of the timer, by the module's names of them.
const MODES: [&str; 3] = [PLAIN, "paravirtual", "guest-only"];
const PLAIN: &str = "plain";

/// The guest's work during a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Workload {
    /// The end of the figures' names.
    suffix: &'static str,
    command: &'static str,
}

impl Workload {
    const ALL: [Self; 4] = [REQUEST_RESPONSE, PIPE, IDLE, SLEEP];

    const fn new(suffix: &'static str, command: &'static str) -> Self {
        Self { suffix, command }
    }
}

/// TCP request/response between two vCPUs with reads that block, as published.
const REQUEST_RESPONSE: Workload = Workload::new("", "/root/ping_pong 1500 0 1");
const PIPE: Workload = Workload::new(":pipe", "perf bench sched pipe -l 800");
const IDLE: Workload = Workload::new(":idle", "sleep 10");
/// A vCPU sleeps a millisecond, again and again. The workload gives deadlines that cannot be
/// saved, and the latency of many deadlines. The other vCPU does nothing, as the host's one
/// processor has no time for both at once.
const SLEEP: Workload = Workload::new(":sleep", "/root/sleepers 1000 1000 1");

/// The workloads of each boot. More in one boot would run into QEMU's repeated
/// interrupt (docs/figures/qemu.md). The published workload, which has few interrupts,
/// runs in several boots.
const BOOTS: [&[Workload]; 4] = [
    &[REQUEST_RESPONSE],
    &[PIPE, IDLE, SLEEP],
    &[REQUEST_RESPONSE],
    &[REQUEST_RESPONSE],
];

/// One boot of the machine.
#[derive(Debug, Clone, Copy)]
struct Cell {
    mode: &'static str,
    boot: usize,
}

impl Cell {
    fn workloads(self) -> &'static [Workload] {
        BOOTS[self.boot]
    }

    fn name(self) -> String {
        format!("{}-{}", self.mode, self.boot)
    }
}

fn rows(context: &Context<'_>) -> Result<Vec<Row>> {
    let module = Modules::prepare(Kernel::Bookworm, context.session)?;
    let cells: Vec<Cell> = (0..BOOTS.len())
        .flat_map(|boot| MODES.map(|mode| Cell { mode, boot }))
        .collect();
    let all = parallel::map(&cells, parallel::processors(), |&cell| {
        boot(context, &module, cell)
    });
    let all: Vec<Measured> = all.into_iter().collect::<Result<_>>()?;
    Ok(figures(&all.concat()))
}

/// Adds each workload's figures of each mode, and those of the lazy modes in relation to plain.
/// A workload that was not measured has no figures.
fn figures(all: &[(&'static str, Workload, Stats)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for workload in Workload::ALL {
        let of = |mode: &str| {
            all.iter()
                .filter(|(of, what, _)| *of == mode && *what == workload)
                .fold(Stats::default(), |sum, (.., stats)| sum.and(stats))
        };
        let sums = MODES.map(|mode| (mode, of(mode)));
        let measured = || sums.iter().filter(|(_, stats)| stats.has_boots());
        for (mode, stats) in measured() {
            rows.extend(stats.rows(mode, workload.suffix));
        }
        if let Some((_, plain)) = measured().find(|(mode, _)| *mode == PLAIN) {
            for (mode, stats) in measured().filter(|(mode, _)| *mode != PLAIN) {
                rows.extend(stats.against(plain, mode, workload.suffix));
            }
        }
    }
    rows
}

/// The counts of one boot, for each workload.
type Measured = Vec<(&'static str, Workload, Stats)>;

fn boot(context: &Context<'_>, module: &Modules, cell: Cell) -> Result<Measured> {
    let mut request = Request {
        vmm_args: ["--no-pmu", "--lazy-deadline"].map(str::to_owned).into(),
        kernel: Some(module.kernel()),
        append: Some(Modules::DEADLINE_COMMAND_LINE.to_owned()),
        add: module.files(),
        marked: true,
        ..Request::new(Arch::X86_64)
    };
    request.machine.vcpus = 2;
    request.machine.memory = 512;
    let design = Design::from(Pmu::Emulated);
    let _task = context.session.progress.task(&cell.name());
    let rows = context.compare(request, &cell.name(), &[design], &script(cell))?;
    measured(cell, &rows[0].run, &rows[0].output).ok_or_else(|| rows[0].failed())
}

/// Writes the guest's script. It resets the module's counters just before the host's
/// and reads them just after the host's. It leaves the host some time after each part.
fn script(cell: Cell) -> String {
    let mode = cell.mode;
    let mut script = format!(
        "exec 2>&1\n\
         mount -t debugfs debugfs /sys/kernel/debug && ip link set lo up || exit\n\
         echo 1 > /sys/devices/system/cpu/cpu1/online || exit\n\
         insmod /root/lazy_deadline.ko mode={mode} break_even=0 || exit\n\
         cd /sys/kernel/debug/lazy_deadline && /root/ping_pong {} > /dev/null || exit\n",
        // Otherwise two boots of the same work would be the same to the instruction.
        50 + cell.boot
    );
    for workload in cell.workloads() {
        let command = workload.command;
        script += &format!(
            "sleep 2; echo > reset\n\
             meter --doorbell --output /tmp/said -- {command} > /tmp/meter || exit\n\
             cat counters > /tmp/counters\n\
             echo {PART}\n\
             cat /tmp/said\n\
             tail -n +2 /tmp/counters | sed 's/^/counters /'\n\
             tail -n +2 latency | sed 's/^/latency /'\n\
             tail -n +2 histogram | sed 's/^/bucket /'\n"
        );
    }
    script + "cd / && rmmod lazy_deadline\n"
}

/// The line before each workload's output.
const PART: &str = "== part";

/// Reads a boot's counts; `None` when a part is missing.
fn measured(cell: Cell, run: &Run, output: &[u8]) -> Option<Measured> {
    let text = String::from_utf8_lossy(output);
    let parts: Vec<&str> = text.split(PART).skip(1).collect();
    let workloads = cell.workloads();
    let complete = run.status == 0 && [parts.len(), run.traces.len()] == [workloads.len(); 2];
    complete
        .then(|| workloads.iter().zip(&parts).zip(&run.traces))?
        .map(|((&workload, part), trace)| Some((cell.mode, workload, Stats::of(trace, part)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_script_is_valid_shell() {
        for boot in 0..BOOTS.len() {
            let mode = PLAIN;
            let status = std::process::Command::new("sh")
                .args(["-n", "-c", &script(Cell { mode, boot })])
                .status()
                .unwrap();
            assert!(status.success());
        }
    }

    #[test]
    fn boots_have_names() {
        let cell = |boot| Cell { mode: PLAIN, boot };
        assert!(script(cell(0)).contains("mode=plain"));
        assert_eq!(cell(2).name(), "plain-2");
    }

    #[test]
    fn each_workload_runs() {
        for workload in Workload::ALL {
            assert!(BOOTS.iter().any(|boot| boot.contains(&workload)));
        }
    }
}
