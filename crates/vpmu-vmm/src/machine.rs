//! The state that a machine's threads share: KVM's virtual machine, the ports, and the statistics.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::VmFd;
use vpmu_kvm::{Backing, Capability, Deadline, Offer, Statistics};
use vpmu_record::{Kvm, Snapshot};

use super::PmuOptions;
use super::host::snapshot;
use super::ports::Ports;
use super::stats;
use super::vcpu::Vcpu;

/// The state that the vCPUs' threads share.
pub(super) struct Machine {
    pub(super) vm: VmFd,
    pub(super) stop: AtomicBool,
    ports: Mutex<Ports<io::Stdout>>,
    /// Each vCPU's.
    statistics: Vec<Arc<Mutex<Statistics>>>,
    pub(super) deadlines: Vec<Arc<Deadline>>,
    measure: Mutex<Measure>,
}

#[derive(Default)]
struct Measure {
    begin: Option<(Statistics, Snapshot)>,
    span: Option<(Statistics, Snapshot, Snapshot)>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    pub(super) fn new(vm: VmFd, ports: Ports<io::Stdout>, vcpus: &[Vcpu]) -> Self {
        let parts = || vcpus.iter().map(|vcpu| &vcpu.parts);
        Self {
            vm,
            stop: AtomicBool::new(false),
            ports: Mutex::new(ports),
            statistics: parts().map(vpmu_kvm::Vcpu::statistics).collect(),
            deadlines: parts().filter_map(vpmu_kvm::Vcpu::deadline).collect(),
            measure: Mutex::default(),
        }
    }

    pub(super) fn ports(&self) -> MutexGuard<'_, Ports<io::Stdout>> {
        locked(&self.ports)
    }

    pub(super) fn begin_measuring(&self) {
        *locked(&self.measure) = Measure {
            begin: Some((self.total(), snapshot())),
            span: None,
        };
    }

    pub(super) fn end_measuring(&self) {
        let mut measure = locked(&self.measure);
        if let Some((before, begin)) = measure.begin.take() {
            measure.span = Some((self.total().since(&before), begin, snapshot()));
        }
    }

    /// Returns whether a measurement is under way.
    pub(super) fn measures(&self) -> bool {
        locked(&self.measure).begin.is_some()
    }

    fn total(&self) -> Statistics {
        let mut total = Statistics::default();
        for statistics in &self.statistics {
            total.add(&locked(statistics));
        }
        for deadline in &self.deadlines {
            total.add_deadline(&deadline.statistics());
        }
        total
    }

    /// Returns the machine's cost, as JSON. `offer` and `backing` are each vCPU's.
    pub(super) fn report(
        &self,
        pmu: Option<PmuOptions>,
        offer: &Offer,
        backing: Option<Backing>,
    ) -> serde_json::Value {
        let measure = locked(&self.measure);
        let span = measure.span.as_ref();
        let backing = backing.map(|backing| match backing {
            Backing::Hardware => "hardware",
            Backing::Clock => "clock",
        });
        let policy = pmu.map(|pmu| match pmu.policy {
            vpmu::counter::Policy::Recreate => "recreate",
            vpmu::counter::Policy::Reuse => "reuse",
            vpmu::counter::Policy::ReusePaused => "paused",
        });
        let (model, version, general, fixed) = match offer.capability() {
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
            "paravirtual": pmu.is_some_and(PmuOptions::is_paravirtual),
            "backing": backing,
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
