//! The designs a command can be run under.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How the PMU reaches the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

impl Pmu {
    /// All designs, in the order of a table.
    pub const ALL: [Self; 11] = [
        Self::Native,
        Self::Kvm,
        Self::Mediated,
        Self::Emulated,
        Self::Partitioned,
        Self::Direct,
        Self::Untrapped,
        Self::Paravirt,
        Self::Exec,
        Self::Qemu,
        Self::Vmm,
    ];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Kvm => "kvm",
            Self::Mediated => "mediated",
            Self::Emulated => "emulated",
            Self::Partitioned => "partitioned",
            Self::Direct => "direct",
            Self::Untrapped => "untrapped",
            Self::Paravirt => "paravirt",
            Self::Exec => "exec",
            Self::Qemu => "qemu",
            Self::Vmm => "vmm",
        }
    }

    /// Tells whether the guest's PMU is known to be this project's.
    pub fn has_our_pmu(self) -> bool {
        self.is_ours() || matches!(self, Self::Exec | Self::Qemu)
    }

    /// Tells whether this project's own hypervisor is below the guest.
    pub fn is_ours(self) -> bool {
        match self {
            Self::Native | Self::Kvm | Self::Mediated | Self::Exec | Self::Qemu | Self::Vmm => {
                false
            }
            Self::Emulated
            | Self::Partitioned
            | Self::Direct
            | Self::Untrapped
            | Self::Paravirt => true,
        }
    }
}

impl fmt::Display for Pmu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Pmu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "no such design; there are")
    }
}

/// The treatment of the host's event behind a guest's counter while the guest does not count with
/// that counter (`docs/how/event-life-cycle.md`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

impl Policy {
    /// All policies, the most expensive first.
    pub const ALL: [Self; 3] = [Self::Recreate, Self::Reuse, Self::Paused];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Recreate => "recreate",
            Self::Reuse => "reuse",
            Self::Paused => "paused",
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "no such policy; there are")
    }
}

/// The vendor of the PMU, and so of the processor, that this project's x86 VMM offers its guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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

impl Model {
    /// All models.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Intel, Self::Amd, Self::AmdV2];

    /// Returns the name on the command line, also of the VMM.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Intel => "intel",
            Self::Amd => "amd",
            Self::AmdV2 => "amd-v2",
        }
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "no such model; there are")
    }
}

/// The last branch records that this project's x86 VMM offers its guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lbr {
    /// None.
    #[default]
    Off,
    /// As many as the model has.
    On,
    /// 8.
    Eight,
    /// 16.
    Sixteen,
    /// 32.
    ThirtyTwo,
}

impl Lbr {
    /// All choices.
    pub const ALL: [Self; 5] = [
        Self::Off,
        Self::On,
        Self::Eight,
        Self::Sixteen,
        Self::ThirtyTwo,
    ];

    /// Returns the name on the command line, also of the VMM.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Eight => "8",
            Self::Sixteen => "16",
            Self::ThirtyTwo => "32",
        }
    }
}

impl FromStr for Lbr {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "there are")
    }
}

/// The way in which this project's x86 VMM makes its guest's PEBS records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pebs {
    /// The guest has no PEBS.
    #[default]
    Off,
    /// By an exit at each overflow.
    Exit,
    /// The host's kernel samples the guest into its ring buffer where it can.
    Buffer,
    /// As `Buffer` on hosts that can do that, as `Exit` elsewhere.
    Auto,
}

impl Pebs {
    /// All choices.
    pub const ALL: [Self; 4] = [Self::Off, Self::Exit, Self::Buffer, Self::Auto];

    /// Returns the name on the command line, also of the VMM.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Exit => "exit",
            Self::Buffer => "ring",
            Self::Auto => "auto",
        }
    }
}

impl FromStr for Pebs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "there are")
    }
}

/// What counts for a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backing {
    /// The processor's counters.
    Hardware,
    /// The time of the vCPU's thread.
    Clock,
}

impl Backing {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Hardware, Self::Clock];

    /// Returns the name on the command line, also of the VMM and in its statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Clock => "clock",
        }
    }

    /// Returns what counts, in words.
    pub fn counter(self) -> &'static str {
        match self {
            Self::Hardware => "the processor's counters",
            Self::Clock => "a clock",
        }
    }
}

impl FromStr for Backing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "there are")
    }
}

/// The time that counts for the guest of this project's x86 VMM where a clock does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Freeze {
    /// The guest's, and the host's for the guest.
    #[default]
    Vm,
    /// The guest's alone.
    Guest,
}

impl Freeze {
    /// All choices.
    pub const ALL: [Self; 2] = [Self::Vm, Self::Guest];

    /// Returns the name on the command line, also of the VMM.
    pub fn name(self) -> &'static str {
        match self {
            Self::Vm => "vm",
            Self::Guest => "guest",
        }
    }
}

impl FromStr for Freeze {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        by_name(Self::ALL, Self::name, text, "there are")
    }
}

/// Returns the choice of this name, or a complaint that ends with all names.
fn by_name<T: Copy, const N: usize>(
    all: [T; N],
    name: impl Fn(T) -> &'static str,
    text: &str,
    complaint: &str,
) -> Result<T, String> {
    let named = all.into_iter().find(|&choice| name(choice) == text);
    named.ok_or_else(|| format!("{complaint} {}", all.map(name).join(", ")))
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
    use super::*;

    #[test]
    fn names_round_trip() {
        for pmu in Pmu::ALL {
            assert_eq!(pmu.name().parse(), Ok(pmu));
            assert_eq!(serde_json::to_string(&pmu).unwrap(), format!("\"{pmu}\""));
        }
        assert!(
            "paravirtual"
                .parse::<Pmu>()
                .unwrap_err()
                .contains("partitioned")
        );
    }
}
