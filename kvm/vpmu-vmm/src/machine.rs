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
    pub(super) ports: Mutex<Ports<io::Stdout>>,
    pub(super) measurement: Measurement,
    pub(super) deadlines: Vec<Arc<Deadline>>,
}

impl Machine {
    pub(super) fn ports(&self) -> MutexGuard<'_, Ports<io::Stdout>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
