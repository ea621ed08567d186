//! What a VMM's PMU costs between two moments of its guest, as the record that the lab reads.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use vpmu_kvm::{Backing, Capability, Deadline, Freeze, Offer, Pmu, Policy, Statistics, Vcpu};

use crate::{Kvm, Snapshot};

/// The port of the doorbell. A guest writes [`BEGIN`] here to begin a measurement, [`END`] to end it, and [`SAVE`] to
/// save the machine, each where it is offered. A read gives [`DOORBELL_ID`].
pub const DOORBELL: u16 = 0x5650;
/// The byte that a read of the doorbell gives.
pub const DOORBELL_ID: u8 = b'V';
/// Begins a measurement.
pub const BEGIN: u8 = 1;
/// Ends a measurement.
pub const END: u8 = 2;
/// Saves the machine.
pub const SAVE: u8 = 3;

/// The statistics of a VM's vCPUs, and a span of them.
#[derive(Debug, Default)]
pub struct Measurement {
    vcpus: Mutex<Vec<OneVcpu>>,
    span: Mutex<Span>,
}

#[derive(Debug)]
struct OneVcpu {
    statistics: Arc<Mutex<Statistics>>,
    deadline: Option<Arc<Deadline>>,
}

#[derive(Debug, Default)]
struct Span {
    begin: Option<(Counts, Snapshot)>,
    ended: Option<(Counts, Kvm)>,
}

/// The counts of all vCPUs together.
#[derive(Debug, Default)]
struct Counts {
    statistics: Statistics,
    /// Those of the lazy deadlines, by name; empty where no vCPU has one.
    deadline: BTreeMap<&'static str, u64>,
}

impl Counts {
    fn add(&mut self, vcpu: &OneVcpu) {
        self.statistics.add(&locked(&vcpu.statistics));
        let Some(deadline) = &vcpu.deadline else {
            return;
        };
        let deadline = deadline.statistics();
        let counts = [
            ("writes", deadline.writes),
            ("overtaken", deadline.overtaken),
            ("direct", deadline.direct),
            ("expiries", deadline.expiries),
            ("moved", deadline.moved),
            ("cancelled", deadline.cancelled),
            ("stale", deadline.stale),
            ("injected", deadline.injected),
            ("masked", deadline.masked),
            ("abandoned", deadline.abandoned),
        ];
        for (name, count) in counts {
            *self.deadline.entry(name).or_default() += count;
        }
    }

    /// Returns the counts since `before`, those of the deadlines without the ones that have not happened.
    fn since(mut self, before: &Self) -> Self {
        for (name, count) in &before.deadline {
            let now = self.deadline.entry(name).or_default();
            *now = now.saturating_sub(*count);
        }
        self.deadline.retain(|_, count| *count != 0);
        self.statistics = self.statistics.since(&before.statistics);
        self
    }
}

/// The PMU that the statistics are of.
#[derive(Debug)]
pub struct About<'a> {
    /// The policy for host events. `None`: the guest has no PMU.
    pub policy: Option<Policy>,
    /// The parts that each vCPU is offered.
    pub offer: &'a Offer,
    /// What counts.
    pub backing: Option<Backing>,
    /// The time that counts where a clock does.
    pub freeze: Freeze,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Measurement {
    /// Adds a vCPU, whose statistics stay when the vCPU ends.
    pub fn add(&self, vcpu: &Vcpu) {
        locked(&self.vcpus).push(OneVcpu {
            statistics: vcpu.statistics(),
            deadline: vcpu.deadline(),
        });
    }

    /// Begins a measurement, in place of an earlier one.
    pub fn begin(&self) {
        *locked(&self.span) = Span {
            begin: Some((self.total(), snapshot())),
            ended: None,
        };
    }

    /// Ends the measurement that is under way.
    pub fn end(&self) {
        let mut span = locked(&self.span);
        if let Some((before, begin)) = span.begin.take() {
            let (counts, end) = (self.total().since(&before), snapshot());
            span.ended = Some((counts, Kvm { begin, end }));
        }
    }

    /// Returns whether a measurement is under way.
    pub fn is_under_way(&self) -> bool {
        locked(&self.span).begin.is_some()
    }

    fn total(&self) -> Counts {
        let mut total = Counts::default();
        for vcpu in locked(&self.vcpus).iter() {
            total.add(vcpu);
        }
        total
    }

    /// Returns the cost until now, as a line with its mark.
    pub fn line(&self, about: &About<'_>) -> String {
        format!("{}{}\n", char::from(crate::MARK), self.report(about))
    }

    fn report(&self, about: &About<'_>) -> Value {
        let span = locked(&self.span);
        let span = span.ended.as_ref();
        // Hardware counters count the guest's time whatever was chosen.
        let freeze = (about.backing == Some(Backing::Clock)).then_some(match about.freeze {
            Freeze::Vm => "vm",
            Freeze::Guest => "guest",
        });
        let (model, version, general, fixed) = match about.offer.capability() {
            Some(Capability::Intel(it)) => (
                Some("intel"),
                Some(it.version.number()),
                Some(it.general),
                Some(it.fixed.count_ones()),
            ),
            Some(Capability::Amd(it)) => (Some("amd"), Some(it.version()), Some(it.count()), None),
            None => (None, None, None, None),
        };
        serde_json::json!({"vpmu-vmm": {
            "policy": about.policy.map_or("none", Policy::name),
            "paravirtual": matches!(about.offer.pmu, Some(Pmu::Paravirtual(_))),
            "backing": about.backing.map(Backing::name),
            "freeze": freeze,
            "model": model,
            "pmu_version": version,
            "general": general,
            "fixed": fixed,
            "measured": span.map(|(span, _)| to_json(span)),
            "total": to_json(&self.total()),
            "host": span.map(|(_, host)| host),
        }})
    }
}

/// Returns exits and host operations by name, without those that have not
/// happened.
fn to_json(counts: &Counts) -> Value {
    let statistics = &counts.statistics;
    let exits: BTreeMap<String, u64> = statistics
        .exits
        .iter()
        .filter(|&(_, count)| count != 0)
        .map(|(exit, count)| (exit.to_string(), count))
        .collect();
    let calls = &statistics.host;
    let host = [
        ("create", calls.creates),
        ("set_period", calls.set_periods),
        ("resume", calls.resumes),
        ("pause", calls.pauses),
        ("read", calls.reads),
        ("release", calls.releases),
    ];
    let host: BTreeMap<&str, u64> = host.into_iter().filter(|(_, n)| *n != 0).collect();
    let mut json = serde_json::json!({
        "exits": exits,
        "host_operations": host,
        "lost": calls.lost + calls.unsupported,
        "part_time": calls.part_time,
        "reports": calls.reports,
        "spurious_reports": calls.spurious_reports,
        "deadline": counts.deadline,
    });
    for (name, count) in statistics.figures() {
        match name.split_once('.') {
            None => json[name] = count.into(),
            // Above, with other names.
            Some(("host", _)) => {}
            Some((group, name)) => json[group][name] = count.into(),
        }
    }
    json
}

/// Reads the host kernel's statistics: the exits that KVM handled by itself, and the use of the host's time. The exits' statistics are in debugfs, and are missing where it is not mounted.
fn snapshot() -> Snapshot {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let files = fs::read_dir("/sys/kernel/debug/kvm").into_iter().flatten();
    let exits = files
        .flatten()
        .filter_map(|file| {
            let name = file.file_name().into_string().ok()?;
            if !name.contains("exit") {
                return None;
            }
            let value = fs::read_to_string(file.path()).ok()?;
            Some((name, value.trim().parse().ok()?))
        })
        .collect();
    Snapshot {
        cpu: stat.lines().next().unwrap_or_default().to_owned(),
        exits,
        pmu: BTreeMap::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu_kvm::Exit;

    #[test]
    fn what_has_not_happened_is_left_out() {
        let mut statistics = Statistics::new();
        statistics.count(Exit::MsrRead(0x38e));
        (statistics.pmis, statistics.longest_stuck_ns) = (3, 7);
        statistics.host.reads = 2;
        (statistics.host.lost, statistics.host.unsupported) = (1, 4);
        let mut counts = Counts {
            statistics,
            deadline: [("writes", 5), ("moved", 2)].into(),
        };
        let json = to_json(&counts);
        assert_eq!(json["exits"], serde_json::json!({"msr:read:0x38e": 1}));
        assert_eq!(json["pmis"], 3);
        assert_eq!(json["longest_stuck_ns"], 7);
        assert_eq!(json["host_operations"], serde_json::json!({"read": 2}));
        assert_eq!(json["lost"], 5, "whoever knew");
        assert_eq!(json["pebs"]["records"], 0);
        assert_eq!(json["arming"]["longest_ns"], 0);
        assert_eq!(
            json["deadline"],
            serde_json::json!({"writes": 5, "moved": 2})
        );
        let before = Counts {
            deadline: [("writes", 1), ("moved", 2)].into(),
            ..Counts::default()
        };
        counts = counts.since(&before);
        assert_eq!(counts.deadline, [("writes", 4)].into());
        assert_eq!(counts.statistics.pmis, 3);
    }
}
