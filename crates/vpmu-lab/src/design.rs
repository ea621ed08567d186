//! The designs a command can be run under.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// How the PMU reaches the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pmu {
    /// No virtual machine: the kernel directly on the machine, at EL2.
    Native,
    /// Stock Linux KVM with stock QEMU: the peer.
    Kvm,
    /// This project's monitor, every register access trapped.
    Emulated,
    /// This project's monitor, the counters split by `MDCR_EL2.HPMN`.
    Partitioned,
    /// This project's monitor, all counters the guest's, no trap: the limit.
    Untrapped,
}

impl Pmu {
    /// All of them, in the order of a table.
    pub const ALL: [Self; 5] = [
        Self::Native,
        Self::Kvm,
        Self::Emulated,
        Self::Partitioned,
        Self::Untrapped,
    ];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Kvm => "kvm",
            Self::Emulated => "emulated",
            Self::Partitioned => "partitioned",
            Self::Untrapped => "untrapped",
        }
    }

    /// Whether this project's monitor is below the guest.
    pub fn has_monitor(self) -> bool {
        matches!(self, Self::Emulated | Self::Partitioned | Self::Untrapped)
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
        Self::ALL
            .into_iter()
            .find(|pmu| pmu.name() == text)
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::name).join(", ");
                format!("no such design; there are {names}")
            })
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
            "paravirt"
                .parse::<Pmu>()
                .unwrap_err()
                .contains("partitioned")
        );
    }
}
