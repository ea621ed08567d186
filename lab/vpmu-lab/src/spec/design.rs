//! The designs a command can be run under.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::Display;

choices! {
    /// How the PMU reaches the command.
    #[derive(Serialize, Deserialize, Display)]
    #[serde(rename_all = "lowercase")]
    pub enum Pmu {
        /// No virtual machine: the kernel directly on the machine, at EL2.
        Native,
        /// Stock Linux KVM with stock QEMU: the peer.
        Kvm,
        /// The same, of a Linux whose KVM hands the processor's PMU over to the guest.
        Mediated,
        /// This project's monitor (aarch64) or VMM (x86_64), every register access
        /// trapped.
        Emulated,
        /// This project's monitor, the counters split by `MDCR_EL2.HPMN`.
        Partitioned,
        /// As `Partitioned`, and physical interrupts go to the guest.
        Direct,
        /// This project's monitor, all counters the guest's, no trap: the limit.
        Untrapped,
        /// This project's VMM, and a driver in the guest that shares a page with it.
        Paravirt,
        /// Stock QEMU under `vpmu exec`: this project's PMU in a VMM that nobody changes.
        Exec,
        /// QEMU with a patch that has it embed this project's PMU (packaging/qemu/vpmu.patch).
        Qemu,
        /// The user's own VMM, as it is.
        Vmm,
    }

    /// The treatment of the host's event behind a guest's counter while the guest does not count with
    /// that counter (`docs/how/event-life-cycle.md`).
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Policy {
        /// The event is closed and opened again.
        Recreate,
        /// The event is kept, and set anew.
        Reuse,
        /// The event is kept, and left alone once it is off and drained.
        #[default]
        Paused,
    }

    /// The vendor of the PMU, and so of the processor, that this project's x86 VMM offers its guest.
    #[derive(Default)]
    pub enum Model {
        /// The vendor of the machine that the guest runs on.
        #[default]
        Auto,
        /// Intel's.
        Intel,
        /// AMD's core extension.
        Amd,
        /// AMD's PerfMonV2.
        AmdV2,
    }

    /// The last branch records that this project's x86 VMM offers its guest.
    #[derive(Default)]
    pub enum Lbr {
        /// None.
        #[default]
        Off,
        /// As many as the model has.
        On,
        /// 8.
        #[strum(serialize = "8")]
        Eight,
        /// 16.
        #[strum(serialize = "16")]
        Sixteen,
        /// 32.
        #[strum(serialize = "32")]
        ThirtyTwo,
    }

    /// The way in which this project's x86 VMM makes its guest's PEBS records.
    #[derive(Default)]
    pub enum Pebs {
        /// The guest has no PEBS.
        #[default]
        Off,
        /// By an exit at each overflow.
        Exit,
        /// The host's kernel samples the guest into its ring buffer where it can.
        #[strum(serialize = "ring")]
        Buffer,
        /// As `Buffer` on hosts that can do that, as `Exit` elsewhere.
        Auto,
    }

    /// What counts for a guest.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Backing {
        /// The processor's counters.
        Hardware,
        /// The time of the vCPU's thread.
        Clock,
    }

    /// The time that counts for the guest of this project's x86 VMM where a clock does.
    #[derive(Default)]
    pub enum Freeze {
        /// The guest's, and the host's for the guest.
        #[default]
        Vm,
        /// The guest's alone.
        Guest,
    }
}

impl Pmu {
    /// Tells whether the guest's PMU is known to be this project's.
    pub fn has_our_pmu(self) -> bool {
        self.is_ours() || matches!(self, Self::Exec | Self::Qemu)
    }

    /// Tells whether this project's own hypervisor is below the guest.
    pub fn is_ours(self) -> bool {
        use Pmu::{Direct, Emulated, Paravirt, Partitioned, Untrapped};
        matches!(self, Emulated | Partitioned | Direct | Untrapped | Paravirt)
    }
}

impl Backing {
    /// Returns what counts, in words.
    pub fn counter(self) -> &'static str {
        match self {
            Self::Hardware => "the processor's counters",
            Self::Clock => "a clock",
        }
    }
}

/// One row of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Design {
    /// How the PMU reaches the command.
    pub pmu: Pmu,
    /// The policy, where that is a choice.
    pub policy: Option<Policy>,
}

impl From<Pmu> for Design {
    fn from(pmu: Pmu) -> Self {
        Self { pmu, policy: None }
    }
}

/// Writes `emulated`, or `emulated-reuse` where there is a choice.
impl fmt::Display for Design {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.policy {
            Some(policy) => f.pad(&format!("{}-{}", self.pmu, policy.name())),
            None => f.pad(self.pmu.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use strum::VariantNames;

    use super::*;

    #[test]
    fn names_round_trip() {
        for name in Pmu::VARIANTS {
            let pmu: Pmu = name.parse().unwrap();
            assert_eq!(pmu.name(), *name);
            assert_eq!(serde_json::to_string(&pmu).unwrap(), format!("\"{pmu}\""));
        }
        assert_eq!(Model::VARIANTS, ["auto", "intel", "amd", "amd-v2"]);
        assert_eq!(Lbr::VARIANTS, ["off", "on", "8", "16", "32"]);
        assert_eq!(Pebs::VARIANTS, ["off", "exit", "ring", "auto"]);
    }
}
