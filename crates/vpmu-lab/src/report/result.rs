//! The figures of one run, and the file that `--json` writes.
//!
//! A figure that a design cannot know is `null`, never a made-up zero. The
//! file holds nothing that depends on wall-clock time, so two runs of the same
//! deterministic comparison write the same bytes.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;

use super::stats::{Stats, serves_pmu};
use crate::Result;
use crate::host::files::write_whole;
use crate::report::record::{Guest, Kvm, Meter, Monitor, Perf, Record, Trace, Vmm};
use crate::spec::arch::Arch;
use crate::spec::design::{Design, Pmu, Policy};

/// What `--json` writes.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// Changes when a field changes its meaning.
    pub schema: u32,
    /// One for each design.
    pub runs: Vec<Run>,
}

/// What came of one design.
#[derive(Debug)]
pub struct Row {
    /// The design.
    pub design: Design,
    /// The figures.
    pub run: Run,
    /// What the command printed.
    pub output: Vec<u8>,
    /// Wall-clock time of the whole.
    pub wall: Duration,
    /// Wall-clock time until the command began.
    pub boot_wall: Duration,
}

/// What was run.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    /// Of the guest.
    pub arch: Arch,
    /// What is below it.
    pub design: Design,
    /// Processors of the guest.
    pub vcpus: u32,
    /// How often the command ran.
    pub runs: u32,
    /// Whether the same run gives the same figures.
    pub deterministic: bool,
    /// Whether this machine's own KVM ran the guest, beside whatever else it
    /// does: what the machine statss is then not the guest's alone.
    pub direct: bool,
    /// As a line for the shell.
    pub command: &'a str,
}

/// The figures of one command under one design. Of several runs, times and
/// counts are means, counts to the nearest whole number.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// Of the guest.
    pub arch: Arch,
    /// The design.
    pub pmu: Pmu,
    /// What becomes of a host event that the guest does not use, where there
    /// is a choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
    /// Processors of the guest.
    pub vcpus: u32,
    /// Event counters that the guest's kernel found.
    pub guest_counters: Option<u32>,
    /// Event counters that the hypervisor kept.
    pub host_counters: Option<u32>,
    /// As a line for the shell.
    pub command: String,
    /// How often it ran.
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
    /// How often the guest's kernel throttled an event.
    pub throttled: Option<u64>,
    /// Samples a second and event that the guest's kernel allowed in the end;
    /// it lowers this where samples take too long.
    pub max_sample_rate: Option<u64>,
    /// PMU interrupts that the guest took during the command.
    pub pmis: Option<u64>,
    /// Exits to the hypervisor during the command, by kind.
    pub exits: Option<BTreeMap<String, u64>>,
    /// All of them, whatever for, for each PMU interrupt.
    pub exits_per_pmi: Option<f64>,
    /// Those that serve the guest's PMU, for each PMU interrupt: its overflow
    /// interrupts and its registers. `None` where the hypervisor does not
    /// count them apart.
    pub pmu_exits_per_pmi: Option<f64>,
    /// Part of the machine's time spent in the hypervisor during the command.
    pub host_share: Option<f64>,
    /// The part that each kind of exit took.
    pub exit_share: Option<BTreeMap<String, f64>>,
    /// Operations on host events during the command, by kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_operations: Option<BTreeMap<String, u64>>,
    /// All of them, for each PMU interrupt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_operations_per_pmi: Option<f64>,
    /// Whether the same run gives the same figures.
    pub deterministic: bool,
    /// Everything the monitor said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor: Option<Monitor>,
    /// Everything the VMM said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vmm: Option<Vmm>,
    /// What the KVM host counted by tracepoints, one for each part that the
    /// command marked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub traces: Vec<Trace>,
}

impl Results {
    /// The current schema.
    pub fn new(runs: Vec<Run>) -> Self {
        Self { schema: 1, runs }
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(self).expect("results are plain data");
        text.push(b'\n');
        write_whole(path, &text)
    }
}

impl Run {
    /// Puts the records of a guest together; `None` without one of `meter`.
    pub fn from_records(settings: &Settings<'_>, records: &[Record]) -> Option<Self> {
        let mut found = Found::in_records(records);
        let alone = found.vmm.cloned().map(|vmm| Vmm {
            host: vmm.host.filter(|_| !settings.direct),
            ..vmm
        });
        found.vmm = alone.as_ref();
        let meter = found.meter?;
        let pmu = settings.design.pmu;
        let stats = Stats::of(pmu, settings.vcpus, &found);
        let guest_counters = found.guest.and_then(Guest::event_counters);
        // Without a PMU no interrupts of it are to be had: that is no zero.
        let pmis = meter.pmis.filter(|_| guest_counters.is_some());
        let runs = u64::from(settings.runs.max(1));
        let mean = |count: u64| (count + runs / 2) / runs;
        let seconds = |count: u64, unit: f64| count as f64 / unit / runs as f64;
        let per_pmi = |counts: &Option<BTreeMap<String, u64>>| {
            let (counts, pmis) = counts.as_ref().zip(pmis)?;
            (pmis > 0).then(|| round(counts.values().sum::<u64>() as f64 / pmis as f64))
        };
        let means = |counts: Option<BTreeMap<String, u64>>| {
            counts.map(|counts| {
                let kinds = counts.into_iter();
                kinds.map(|(kind, count)| (kind, mean(count))).collect()
            })
        };
        // Those that KVM handles by itself are not known then.
        let exits_per_pmi = per_pmi(&stats.exits).filter(|_| !settings.direct);
        let pmu_exits = pmu
            .is_ours()
            .then(|| stats.exits.clone())
            .flatten()
            .map(|mut exits| {
                exits.retain(|kind, _| serves_pmu(kind));
                exits
            });
        let pmu_exits_per_pmi = per_pmi(&pmu_exits);
        let host_operations_per_pmi = per_pmi(&stats.host_operations);
        Some(Self {
            arch: settings.arch,
            pmu,
            policy: settings.design.policy,
            vcpus: settings.vcpus,
            guest_counters,
            host_counters: found.monitor.and_then(|monitor| monitor.host_counters),
            command: settings.command.to_owned(),
            runs: settings.runs,
            status: meter.status,
            real_s: seconds(meter.real_ns, 1e9),
            user_s: seconds(meter.user_us, 1e6),
            sys_s: seconds(meter.sys_us, 1e6),
            samples: found.perf.as_ref().map(|perf| mean(perf.samples)),
            lost_samples: found.perf.as_ref().and_then(lost_samples).map(mean),
            throttled: found.perf.as_ref().map(|perf| mean(perf.throttled)),
            max_sample_rate: found.perf.as_ref().map(|perf| perf.max_sample_rate),
            pmis: pmis.map(mean),
            exits: means(stats.exits),
            exits_per_pmi,
            pmu_exits_per_pmi,
            host_share: stats
                .host_share
                .filter(|_| has_fair_shares(settings.arch, pmu, settings.deterministic)),
            exit_share: stats.exit_share,
            host_operations: means(stats.host_operations),
            host_operations_per_pmi,
            deterministic: settings.deterministic,
            monitor: found.monitor.cloned(),
            vmm: found.vmm.cloned(),
            traces: found.traces.into_iter().cloned().collect(),
        })
    }

    /// What the design is called in a table.
    pub fn design(&self) -> Design {
        Design {
            pmu: self.pmu,
            policy: self.policy,
        }
    }

    /// User and kernel time together, seconds.
    pub fn busy_s(&self) -> f64 {
        self.user_s + self.sys_s
    }
}

/// Whether a KVM host's statss tell its share fairly.
///
/// It ticks as often as its guest, and so looks at the same moment of the
/// guest's tick each time, unless its clock is made a little fast. Under stock
/// QEMU for x86 with counted instructions it must not be: there a guest without
/// a PMU samples by timers, and a host's tick that comes while the guest's
/// kernel handles one makes QEMU 10.0 deliver that interrupt twice.
pub(crate) fn has_fair_shares(arch: Arch, pmu: Pmu, deterministic: bool) -> bool {
    !(arch == Arch::X86_64 && pmu == Pmu::Kvm && deterministic)
}

/// Known when perf wrote how many; not when it only wrote that there were some.
fn lost_samples(perf: &Perf) -> Option<u64> {
    (perf.lost_samples > 0 || perf.lost_records == 0).then_some(perf.lost_samples)
}

#[derive(Default)]
pub(super) struct Found<'a> {
    guest: Option<&'a Guest>,
    meter: Option<&'a Meter>,
    /// All perf.data together.
    perf: Option<Perf>,
    pub(super) kvm: Option<&'a Kvm>,
    pub(super) monitor: Option<&'a Monitor>,
    pub(super) vmm: Option<&'a Vmm>,
    traces: Vec<&'a Trace>,
}

impl<'a> Found<'a> {
    fn in_records(records: &'a [Record]) -> Self {
        let mut found = Self::default();
        for record in records {
            match record {
                Record::Guest(guest) => found.guest = Some(guest),
                Record::Meter(meter) => found.meter = Some(meter),
                Record::Perf(perf) => {
                    let sum = found.perf.get_or_insert(Perf {
                        max_sample_rate: perf.max_sample_rate,
                        ..Perf::default()
                    });
                    sum.samples += perf.samples;
                    sum.lost_records += perf.lost_records;
                    sum.lost_samples += perf.lost_samples;
                    sum.throttled += perf.throttled;
                }
                Record::Kvm(kvm) => found.kvm = Some(kvm),
                Record::VpmuMonitor(monitor) => found.monitor = Some(monitor),
                Record::VpmuVmm(vmm) => found.vmm = Some(vmm),
                Record::Trace(trace) => found.traces.push(trace),
                Record::Vpmu(_) | Record::Host(_) => {}
            }
        }
        found
    }
}

/// Six digits behind the point: more would be noise of the division.
pub(super) fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(lines: &[&str]) -> Vec<Record> {
        lines
            .iter()
            .map(|line| Record::parse(line.as_bytes()).unwrap())
            .collect()
    }

    const METER: &str = r#"{"meter":{"status":0,"signal":null,"real_ns":2500000000,"user_us":700000,"sys_us":500000,"pmis":100}}"#;
    const GUEST: &str = r#"{"guest":{"kernel":"6.12","counters":"7 (0,8000003f)"}}"#;

    fn run(pmu: Pmu, lines: &[&str]) -> Run {
        run_of(1, pmu, lines)
    }

    fn run_of(runs: u32, pmu: Pmu, lines: &[&str]) -> Run {
        let settings = Settings {
            arch: Arch::Aarch64,
            design: pmu.into(),
            vcpus: 1,
            runs,
            deterministic: true,
            direct: false,
            command: "true",
        };
        Run::from_records(&settings, &records(lines)).unwrap()
    }

    #[test]
    fn native_knows_no_exits() {
        let run = run(Pmu::Native, &[GUEST, METER]);
        assert_eq!((run.real_s, run.guest_counters), (2.5, Some(6)));
        assert_eq!((run.samples, run.host_share), (None, None));
        let json = serde_json::to_value(Results::new(vec![run])).unwrap();
        assert_eq!(json["schema"], 1);
        let fields = json["runs"][0].as_object().unwrap();
        for name in [
            "arch",
            "pmu",
            "vcpus",
            "guest_counters",
            "host_counters",
            "command",
            "status",
            "real_s",
            "user_s",
            "sys_s",
            "samples",
            "lost_samples",
            "pmis",
            "exits",
            "exits_per_pmi",
            "pmu_exits_per_pmi",
            "host_share",
            "deterministic",
        ] {
            assert!(fields.contains_key(name), "{name}");
        }
        assert!(fields["exits"].is_null() && fields["lost_samples"].is_null());
    }

    #[test]
    fn kvm_statss() {
        let kvm = r#"{"kvm":{
            "begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":1000,"hvc_exit_stat":1,"signal_exits":5}},
            "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":1860,"hvc_exit_stat":11,"signal_exits":9}}}}"#;
        let run = run(Pmu::Kvm, &[GUEST, METER, kvm]);
        let exits = run.exits.unwrap();
        assert_eq!((exits["hvc"], exits["other"]), (10, 850));
        assert_eq!(run.exits_per_pmi, Some(8.6));
        assert_eq!(run.pmu_exits_per_pmi, None, "KVM does not count them apart");
        // 200 in all: 50 idle, 50 in the guest.
        assert_eq!(run.host_share, Some(0.5));
    }

    #[test]
    fn monitor_statss() {
        let monitor = r#"{"vpmu-monitor":{"guest_counters":4,"host_counters":2,
            "measured":{"ticks":1000,"el2_ticks":100,"pmis":100,"exits":{"irq:pmu":100,"hvc":20},"exit_ticks":{"irq:pmu":90}},
            "total":{"ticks":9000,"el2_ticks":900,"pmis":100,"exits":{}}}}"#;
        let run = run(Pmu::Partitioned, &[GUEST, METER, monitor]);
        assert_eq!(run.host_counters, Some(2));
        assert_eq!(run.exits_per_pmi, Some(1.2));
        assert_eq!(run.pmu_exits_per_pmi, Some(1.0));
        assert_eq!(run.host_share, Some(0.1));
        assert_eq!(run.exit_share.unwrap()["irq:pmu"], 0.09);
    }

    #[test]
    fn vmm_statss() {
        let vmm = r#"{"vpmu-vmm":{"policy":"reuse","backing":"clock","pmu_version":2,"general":4,"fixed":3,
            "measured":{"pmis":10,"exits":{"msr:write:0x38f":20,"kick":10},"host_operations":{"pause":10,"set_period":10}},
            "total":{"pmis":12,"exits":{},"host_operations":{}},
            "host":{"begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":100}},
                    "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":200}}}}}"#;
        let guest = r#"{"guest":{"kernel":"6.12","counters":"","general":"4"}}"#;
        let meter = METER.replace(r#""pmis":100"#, r#""pmis":10"#);
        let run = run(Pmu::Emulated, &[guest, &meter, vmm]);
        let exits = run.exits.unwrap();
        assert_eq!((exits["msr:write:0x38f"], exits["kvm"]), (20, 70));
        assert_eq!(run.exits_per_pmi, Some(10.0));
        assert_eq!(run.pmu_exits_per_pmi, Some(3.0));
        assert_eq!(run.host_operations_per_pmi, Some(2.0));
        assert_eq!(run.host_share, Some(0.5));

        // Beside others, what their host statss is not this guest's.
        let settings = Settings {
            arch: Arch::X86_64,
            design: Pmu::Emulated.into(),
            vcpus: 1,
            runs: 1,
            deterministic: false,
            direct: true,
            command: "true",
        };
        let run = Run::from_records(&settings, &records(&[guest, &meter, vmm])).unwrap();
        assert_eq!(
            (run.exits.unwrap().get("kvm"), run.host_share),
            (None, None)
        );
        assert_eq!(
            (run.exits_per_pmi, run.pmu_exits_per_pmi),
            (None, Some(3.0))
        );
    }

    #[test]
    fn unfair_shares_are_not_told() {
        let kvm = r#"{"kvm":{
            "begin":{"cpu":"cpu  100 0 50 10 0 0 0 0 90 0","exits":{"exits":1}},
            "end":{"cpu":"cpu  200 0 100 60 0 0 0 0 140 0","exits":{"exits":2}}}}"#;
        let share = |arch, deterministic| {
            let settings = Settings {
                arch,
                design: Pmu::Kvm.into(),
                vcpus: 1,
                runs: 1,
                deterministic,
                direct: false,
                command: "true",
            };
            let run = Run::from_records(&settings, &records(&[METER, kvm])).unwrap();
            run.host_share
        };
        assert_eq!(share(Arch::X86_64, true), None);
        assert_eq!(share(Arch::X86_64, false), Some(0.5));
        assert_eq!(share(Arch::Aarch64, true), Some(0.5));
    }

    #[test]
    fn no_pmu_no_interrupts() {
        let run = run(Pmu::Native, &[METER]);
        assert_eq!((run.guest_counters, run.pmis), (None, None));
    }

    #[test]
    fn lost_samples_are_known_or_not() {
        let perf = |lost_records, lost_samples| {
            super::lost_samples(&Perf {
                samples: 1,
                lost_records,
                lost_samples,
                throttled: 0,
                max_sample_rate: 100_000,
            })
        };
        assert_eq!(perf(0, 0), Some(0));
        assert_eq!(perf(2, 7), Some(7));
        assert_eq!(perf(2, 0), None);
    }

    #[test]
    fn several_runs_are_means() {
        let perf = r#"{"perf":{"samples":50,"lost_records":0,"lost_samples":0,"throttled":0,"max_sample_rate":100000}}"#;
        let run = run_of(2, Pmu::Native, &[GUEST, METER, perf, perf]);
        assert_eq!((run.real_s, run.user_s), (1.25, 0.35));
        assert_eq!((run.samples, run.pmis), (Some(50), Some(50)));
    }
}
