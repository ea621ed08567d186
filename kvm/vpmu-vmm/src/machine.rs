//! The state that a machine's threads share: KVM's virtual machine, the ports, and the statistics.

use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_ioctls::VmFd;
use vpmu_kvm::Deadline;
use vpmu_measure::Measurement;

use super::ports::Ports;

/// The state that the vCPUs' threads share.
pub(super) struct Machine {
    pub(super) vm: VmFd,
    pub(super) stop: AtomicBool,
    ports: Mutex<Ports<io::Stdout>>,
    pub(super) measurement: Measurement,
    pub(super) deadlines: Vec<Arc<Deadline>>,
}

impl Machine {
    /// `parts`: those of all vCPUs.
    pub(super) fn new<'a>(
        vm: VmFd,
        ports: Ports<io::Stdout>,
        parts: impl Iterator<Item = &'a vpmu_kvm::Vcpu> + Clone,
    ) -> Self {
        let measurement = Measurement::default();
        parts.clone().for_each(|parts| measurement.add(parts));
        Self {
            vm,
            stop: AtomicBool::new(false),
            ports: Mutex::new(ports),
            measurement,
            deadlines: parts.filter_map(vpmu_kvm::Vcpu::deadline).collect(),
        }
    }

    pub(super) fn ports(&self) -> MutexGuard<'_, Ports<io::Stdout>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
