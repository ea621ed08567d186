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
mod file;
mod host;
mod vcpu;
mod vm;

use serde::{Deserialize, Serialize};
use vpmu::counter::Policy;

pub(super) use clock::Clock;
#[cfg(fuzzing)]
pub(super) use file::forge;
pub(super) use file::{Reader, check_place, write};
pub(super) use host::check as check_host;
pub(super) use vcpu::VcpuState;
pub(super) use vm::VmState;

use vpmu_kvm::{Backing, Capability, Freeze, Model, Offer, Options, Pmu, RdpmcState};

use super::hardware::{MEMORY, MOST_VCPUS};
use super::ports::PortsState;
use super::{PmuOptions, Rdpmc};

/// The state of a machine without its memory.
#[derive(Serialize, Deserialize)]
pub(super) struct MachineState {
    /// Bytes of memory.
    pub(super) memory: u64,
    /// How the guest's PMU is backed. `None`: the guest has none.
    pub(super) backing: Option<Backed>,
    /// The places in the guest's memory by which RDPMC comes to the VMM, where its kernel was not rewritten at load.
    pub(super) rdpmc: Option<RdpmcState>,
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
        let offer = self.offer();
        let is_plausible = |vcpu: &VcpuState| vcpu.is_plausible() && vcpu.parts.offer() == offer;
        match self.vcpus.iter().all(is_plausible) {
            true => Ok(()),
            false => Err("the state of a vCPU"),
        }
    }

    /// Returns the parts that the guest was offered, which are the same on each vCPU.
    pub(super) fn offer(&self) -> Offer {
        let first = self.vcpus.first();
        first.map_or_else(Offer::default, |vcpu| vcpu.parts.offer())
    }

    /// Returns the model of the guest's PMU and its backing, if the guest has one.
    pub(super) fn pmu_options(&self) -> Option<PmuOptions> {
        let backing = self.backing.unwrap_or_default();
        Some(PmuOptions {
            model: match self.offer().pmu? {
                Pmu::Architectural(Capability::Intel(pmu)) => Model::Intel {
                    version: pmu.version,
                    pebs: pmu.pebs.is_some(),
                },
                Pmu::Architectural(Capability::Amd(pmu)) => Model::Amd(pmu.interface),
                Pmu::Paravirtual(_) => Model::Paravirtual,
            },
            options: Options {
                backing: backing.clock.then_some(Backing::Clock),
                approximate_instructions: backing.approximate_instructions,
                policy: backing.policy,
                freeze: match backing.freezes {
                    true => Freeze::Guest,
                    false => Freeze::Vm,
                },
                lbr: self.offer().lbr(),
                // The guest does not see the rest: how its records are collected, in which hosts differ, how it is followed,
                // and whether records may be late, which is for whoever restores it to accept.
                ..Options::default()
            },
            rdpmc: match self.rdpmc {
                None => Rdpmc::Load,
                Some(_) => Rdpmc::Run,
            },
        })
    }
}

/// The backing of a PMU.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Backed {
    pub(super) policy: Policy,
    pub(super) clock: bool,
    pub(super) approximate_instructions: bool,
    /// Whether the guest's counters stand still while the host works.
    pub(super) freezes: bool,
}

impl From<&PmuOptions> for Backed {
    fn from(pmu: &PmuOptions) -> Self {
        Self {
            policy: pmu.options.policy,
            clock: pmu.options.backing == Some(Backing::Clock),
            approximate_instructions: pmu.options.approximate_instructions,
            freezes: pmu.options.freeze == Freeze::Guest,
        }
    }
}
