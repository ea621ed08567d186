//! The figures of one run, and the file that `--json` writes.
//!
//! A figure that a design cannot know is `null`, never a made-up zero. The
//! file holds nothing that depends on wall-clock time, so two runs of the same
//! deterministic comparison write the same bytes.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use second::Second;

use super::profile::Profile;
use super::stats::{Found, Stats, round, serves_pmu};
use crate::Error;
use crate::host::qemu::Version;
use crate::spec::arch::Arch;
use crate::spec::design::{Backing, Design, Pmu, Policy};
use crate::spec::{Guest, Request};
use vpmu_measure::{Monitor, Perf, Record, Trace, Vmm};

/// The file that `--json` writes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// Changes when a field changes its meaning.
    pub schema: u32,
    /// The figures of each design.
    pub runs: Vec<Run>,
}

/// The result of one design.
#[derive(Debug)]
pub struct Row {
    /// The design.
    pub design: Design,
    /// The figures.
    pub run: Run,
    /// The output of the command.
    pub output: Vec<u8>,
    /// Wall-clock time of the whole.
    pub wall: Duration,
}

impl Row {
    /// Returns the error of a command whose output is not what was expected.
    pub fn failed(&self) -> Error {
        Error::Other(format!(
            "the command ended with status {} under {}:\n{}",
            self.run.status,
            self.design,
            String::from_utf8_lossy(&self.output)
        ))
    }
}

/// The figures of one command under one design. Times and counts of several runs
/// are means, counts to the nearest whole number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The guest's architecture.
    pub arch: Arch,
    /// The design.
    pub pmu: Pmu,
    /// The treatment of a host event that the guest does not use, where there is a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// The number of the guest's processors.
    pub vcpus: u32,
    /// QEMU's model of the processor, where the user has named one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// The version of the QEMU that ran the machine, and whose it is.
    #[serde(default)]
    pub qemu: Option<String>,
    /// What counted for the guest; `None` where nothing did, or nobody knows.
    #[serde(default)]
    pub backing: Option<Backing>,
    /// Event counters that the guest's kernel found.
    pub guest_counters: Option<u32>,
    /// Event counters that the hypervisor kept.
    pub host_counters: Option<u32>,
    /// The command, as a line for the shell.
    pub command: String,
    /// Number of runs of the command.
    pub runs: u32,
    /// The command's exit status, 128 + signal when it was killed.
    pub status: i32,
    /// Guest clock, seconds.
    pub real_s: f64,
    /// Guest clock, seconds.
    pub user_s: f64,
    /// Guest clock, seconds.
    pub sys_s: f64,
    /// Samples in the `perf.data` that the command left behind.
    pub samples: Option<u64>,
    /// Samples that perf knows it lost.
    pub lost_samples: Option<u64>,
    /// Number of times that the guest's kernel throttled an event.
    pub throttled: Option<u64>,
    /// Samples a second and event that the guest's kernel allowed in the end. The kernel lowers
    /// this limit where samples take too long.
    pub max_sample_rate: Option<u64>,
    /// PMU interrupts that the guest took during the command.
    pub pmis: Option<u64>,
    /// Exits to the hypervisor during the command, by kind.
    pub exits: Option<BTreeMap<String, u64>>,
    /// All exits for each PMI.
    pub exits_per_pmi: Option<f64>,
    /// Exits that serve the guest's PMU, for each PMI: the PMU's overflow interrupts and its
    /// registers. `None` where the hypervisor does not count these exits separately.
    pub pmu_exits_per_pmi: Option<f64>,
    /// Part of the machine's time spent in the hypervisor during the command.
    pub host_share: Option<f64>,
    /// The part that each kind of exit took.
    pub exit_share: Option<BTreeMap<String, f64>>,
    /// Operations on host events during the command, by kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_operations: Option<BTreeMap<String, u64>>,
    /// All operations on host events for each PMI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_operations_per_pmi: Option<f64>,
    /// Whether repeated runs give the same figures.
    pub deterministic: bool,
    /// All of the monitor's statistics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor: Option<Monitor>,
    /// All of the VMM's statistics.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmm: Option<Vmm>,
    /// The figures of the guest beside this one, where there was one that ran a command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<Second>,
    /// The hypervisor's profile of the command, where one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_profile: Option<Profile>,
    /// The guest's own profile of the command, where one was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_profile: Option<Profile>,
    /// The KVM host's counts of tracepoints, for each part that the command marked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub traces: Vec<Trace>,
}

impl Results {
    /// Makes a file of the current schema.
    pub fn new(runs: Vec<Run>) -> Self {
        Self { schema: 1, runs }
    }
}

impl Run {
    /// Makes figures of the `records` of a guest that this QEMU ran as the request asks; `None` without a command, or
    /// without a record of `meter`.
    pub fn from_records(
        qemu: Option<&Version>,
        request: &Request,
        guest: &Guest,
        records: &[Record],
    ) -> Option<Self> {
        let (command, machine) = (request.command.as_ref()?, &request.machine);
        let mut found = Found::in_records(records);
        let alone = found.vmm.cloned().map(|vmm| Vmm {
            host: vmm.host.filter(|_| !guest.is_direct()),
            ..vmm
        });
        found.vmm = alone.as_ref();
        let meter = found.meter?;
        let pmu = guest.design.pmu;
        let stats = Stats::of(pmu, machine.vcpus, &found);
        let guest_counters = found.guest.and_then(vpmu_measure::Guest::event_counters);
        // A guest without a PMU takes no PMIs. The figure is null, not zero.
        let pmis = match pmu {
            // The guest's kernel counts PMIs in the handler of a PMU that it does not have.
            Pmu::Paravirt => found
                .vmm
                .and_then(|vmm| vmm.measured.as_ref())
                .map(|span| span.pmis),
            _ => meter.pmis,
        };
        let pmis = pmis.filter(|_| guest_counters.is_some());
        let runs = u64::from(request.runs.max(1));
        let mean = |count: u64| (count + runs / 2) / runs;
        let seconds = |count: u64, unit: f64| count as f64 / unit / runs as f64;
        let all = |counts: &Option<BTreeMap<String, u64>>| Some(counts.as_ref()?.values().sum());
        let per_pmi = |count: Option<u64>| {
            let (count, pmis) = count.zip(pmis)?;
            (pmis > 0).then(|| round(count as f64 / pmis as f64))
        };
        let means = |counts: Option<BTreeMap<String, u64>>| {
            counts.map(|counts| {
                let kinds = counts.into_iter();
                kinds.map(|(kind, count)| (kind, mean(count))).collect()
            })
        };
        // In this machine's own KVM, nobody counts the exits that do not reach the VMM.
        let exits_per_pmi = per_pmi(all(&stats.exits)).filter(|_| !guest.is_direct());
        let pmu_exits_per_pmi = per_pmi(match pmu {
            // KVM does not count them apart. The patched QEMU tells their number.
            Pmu::Qemu => stats.pmu_exits,
            _ if pmu.has_our_pmu() => stats.exits.as_ref().map(serving_pmu),
            _ => None,
        });
        let host_operations_per_pmi = per_pmi(all(&stats.host_operations));
        Some(Self {
            arch: machine.arch,
            pmu,
            policy: guest.design.policy,
            vcpus: machine.vcpus,
            cpu: machine.cpu.clone(),
            qemu: qemu.map(Version::to_string),
            backing: backing(pmu, guest_counters.is_some(), &found),
            guest_counters,
            host_counters: found.monitor.and_then(|monitor| monitor.host_counters),
            command: command.as_line().to_owned(),
            runs: request.runs,
            status: meter.status,
            real_s: seconds(meter.real_ns, 1e9),
            user_s: seconds(meter.user_us, 1e6),
            sys_s: seconds(meter.sys_us, 1e6),
            samples: found.perf.as_ref().map(|perf| mean(perf.samples)),
            // Rounded up: what is lost in a few runs is not nothing.
            lost_samples: (found.perf.as_ref().and_then(lost_samples))
                .map(|count| count.div_ceil(runs)),
            throttled: (found.perf.as_ref()).map(|perf| perf.throttled.div_ceil(runs)),
            max_sample_rate: found.perf.as_ref().map(|perf| perf.max_sample_rate),
            pmis: pmis.map(mean),
            exits: means(stats.exits),
            exits_per_pmi,
            pmu_exits_per_pmi,
            host_share: stats.host_share.filter(|_| guest.has_fair_shares(machine)),
            exit_share: stats.exit_share,
            host_operations: means(stats.host_operations),
            host_operations_per_pmi,
            deterministic: guest.is_counted(machine),
            monitor: found.monitor.cloned(),
            vmm: found.vmm.cloned(),
            second: None,
            host_profile: None,
            guest_profile: found.profile,
            traces: found.traces.into_iter().cloned().collect(),
        })
    }

    /// Returns the exits that serve the guest's PMU, where the design is this project's.
    pub fn pmu_exits(&self) -> Option<u64> {
        self.exits.as_ref().map(serving_pmu)
    }

    /// Returns the design's name in a table.
    pub fn design(&self) -> Design {
        Design {
            pmu: self.pmu,
            policy: self.policy,
        }
    }

    /// Returns user and kernel time together, seconds.
    pub fn busy_s(&self) -> f64 {
        self.user_s + self.sys_s
    }
}

/// Returns what counted for a guest that has a PMU, or has none.
fn backing(pmu: Pmu, has_pmu: bool, found: &Found<'_>) -> Option<Backing> {
    match found.vmm {
        Some(vmm) => vmm.backing.as_deref()?.parse().ok(),
        None if matches!(pmu, Pmu::Qemu | Pmu::Vmm) => None,
        None => has_pmu.then_some(Backing::Hardware),
    }
}

/// Returns the number of those exits that serve the guest's PMU.
fn serving_pmu(exits: &BTreeMap<String, u64>) -> u64 {
    let serving = exits.iter().filter(|(kind, _)| serves_pmu(kind));
    serving.map(|(_, count)| count).sum()
}

/// Returns the number of lost samples. `None` when perf wrote only that samples were lost.
fn lost_samples(perf: &Perf) -> Option<u64> {
    (perf.lost_samples > 0 || perf.lost_records == 0).then_some(perf.lost_samples)
}

mod second;
#[cfg(test)]
mod tests;
