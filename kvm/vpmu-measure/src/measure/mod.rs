//! What a VMM's PMU costs between two moments of its guest, as the record that the lab reads.

mod host;
mod stats;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu_kvm::{Backing, Capability, Deadline, Freeze, Offer, Pmu, Policy, Statistics, Vcpu};

use crate::{Kvm, Snapshot};
use host::snapshot;

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
    begin: Option<(Statistics, Snapshot)>,
    ended: Option<(Statistics, Snapshot, Snapshot)>,
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
            span.ended = Some((self.total().since(&before), begin, snapshot()));
        }
    }

    /// Returns whether a measurement is under way.
    pub fn is_under_way(&self) -> bool {
        locked(&self.span).begin.is_some()
    }

    fn total(&self) -> Statistics {
        let mut total = Statistics::default();
        for vcpu in locked(&self.vcpus).iter() {
            total.add(&locked(&vcpu.statistics));
            if let Some(deadline) = &vcpu.deadline {
                total.add_deadline(&deadline.statistics());
            }
        }
        total
    }

    /// Returns the cost until now, as a line with its mark.
    pub fn line(&self, about: &About<'_>) -> String {
        format!("{}{}\n", char::from(crate::MARK), self.report(about))
    }

    fn report(&self, about: &About<'_>) -> serde_json::Value {
        let span = locked(&self.span);
        let span = span.ended.as_ref();
        let backing = about.backing.map(|backing| match backing {
            Backing::Hardware => "hardware",
            Backing::Clock => "clock",
        });
        // Hardware counters count the guest's time whatever was chosen.
        let freeze = (about.backing == Some(Backing::Clock)).then_some(match about.freeze {
            Freeze::Vm => "vm",
            Freeze::Guest => "guest",
        });
        let policy = about.policy.map(|policy| match policy {
            Policy::Recreate => "recreate",
            Policy::Reuse => "reuse",
            Policy::ReusePaused => "paused",
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
            "policy": policy.unwrap_or("none"),
            "paravirtual": matches!(about.offer.pmu, Some(Pmu::Paravirtual(_))),
            "backing": backing,
            "freeze": freeze,
            "model": model,
            "pmu_version": version,
            "general": general,
            "fixed": fixed,
            "measured": span.map(|(span, ..)| stats::to_json(span)),
            "total": stats::to_json(&self.total()),
            "host": span.map(|(_, begin, end)| Kvm {
                begin: begin.clone(),
                end: end.clone(),
            }),
        }})
    }
}
