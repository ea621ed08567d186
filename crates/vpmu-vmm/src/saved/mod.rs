//! A machine at rest, as a file: one process saves it, and another continues it.
//!
//! The file has everything that a guest could notice: memory, processors, interrupt controllers, clocks, ports, and the
//! PMU's registers with all that the host has counted for them. Time stands still for the guest while it is saved: TSC
//! and KVM's clock continue where they were. The statistics do not belong to the guest, so they begin anew in the next
//! process. A measurement that was under way ends with the save and begins again there.
//!
//! KVM's state must be read and written in a certain order. The order is QEMU's and Firecracker's,
//! and `vcpu.rs` gives the reasons.

mod clock;
mod error;
mod file;
mod host;
mod vcpu;
mod vm;

use serde::{Deserialize, Serialize};
use vpmu::counter::Policy;

pub(super) use clock::Clock;
pub use error::Error;
#[cfg(fuzzing)]
pub(super) use file::forge;
pub(super) use file::{Reader, check_place, write};
pub(super) use host::check as check_host;
pub(super) use vcpu::VcpuState;
pub(super) use vm::VmState;

use vpmu_kvm::{Capability, Model, Pebs};

use super::PmuOptions;
use super::hardware::{MEMORY, MOST_VCPUS};
use super::ports::PortsState;

/// The state of a machine without its memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MachineState {
    /// Bytes of memory.
    pub(super) memory: u64,
    pub(super) pmu: Option<Pmu>,
    /// Whether the guest has begun to measure, and not ended.
    pub(super) measuring: bool,
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) vm: VmState,
    pub(super) clock: Clock,
    pub(super) ports: PortsState,
}

impl MachineState {
    /// Refuses states that no machine of this program could have saved. Checksums find accidents; a forged file's
    /// checksums are right.
    fn check(&self) -> Result<(), &'static str> {
        if !MEMORY.contains(&self.memory) || !self.memory.is_multiple_of(4096) {
            return Err("the size of its memory");
        }
        if !(1..=MOST_VCPUS.into()).contains(&self.vcpus.len()) {
            return Err("the number of its vCPUs");
        }
        match self.vcpus.iter().all(VcpuState::is_plausible) {
            true => Ok(()),
            false => Err("the state of a vCPU"),
        }
    }

    /// Returns how the guest's PMU was backed, if the guest has one.
    pub(super) fn pmu_options(&self) -> Option<PmuOptions> {
        let paravirtual = self.vcpus.iter().find_map(|vcpu| vcpu.paravirtual.as_ref());
        match paravirtual {
            None => self.pmu.map(|pmu| pmu.options()),
            Some(state) => Some(PmuOptions {
                model: Model::Auto,
                perfmon: None,
                policy: Policy::default(),
                approximate_instructions: state.approximate_instructions(),
                pebs: Pebs::Off,
                paravirtual: true,
            }),
        }
    }

    /// Returns whether the guest has been offered a lazy deadline.
    pub(super) fn lazy_deadline(&self) -> bool {
        self.vcpus.iter().any(|vcpu| vcpu.deadline.is_some())
    }
}

/// The PMU that the guest has been told of, and its backing.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Pmu {
    pub(super) capability: Capability,
    pub(super) policy: Policy,
    pub(super) approximate_instructions: bool,
}

impl Pmu {
    pub(super) fn options(&self) -> PmuOptions {
        PmuOptions {
            model: match self.capability {
                Capability::Intel(_) => Model::Intel,
                Capability::Amd(_) => Model::Amd,
            },
            perfmon: match self.capability {
                Capability::Intel(pmu) => Some(pmu.version),
                Capability::Amd(_) => None,
            },
            policy: self.policy,
            approximate_instructions: self.approximate_instructions,
            // The guest does not see how its records are collected, and hosts differ in what they can.
            pebs: match self.capability {
                Capability::Intel(pmu) if pmu.pebs.is_some() => Pebs::Auto,
                _ => Pebs::Off,
            },
            paravirtual: false,
        }
    }
}
