//! What guests, the KVM host and the monitor report on the console: one line
//! each, the byte 0x1e and a JSON object with one key.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Begins every record.
pub const MARK: u8 = 0x1e;

/// One line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Record {
    /// Where the guest is.
    Vpmu(Phase),
    /// About the guest, before the command.
    Guest(Guest),
    /// About the command, from `meter`.
    Meter(Meter),
    /// About the `perf.data` that the command left behind.
    Perf(Perf),
    /// About the KVM host.
    Host(Host),
    /// The KVM host's accounts.
    Kvm(Box<Kvm>),
    /// What the KVM host counted by tracepoints.
    Trace(Trace),
    /// The monitor's statistics.
    VpmuMonitor(Box<Monitor>),
    /// The x86 VMM's statistics.
    VpmuVmm(Box<Vmm>),
}

/// A point in a guest's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// The command begins.
    Command,
    /// What follows is the command's output.
    Output,
    /// The command's output is over.
    End,
}

/// About the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// Its kernel's release.
    pub kernel: String,
    /// What the kernel said of its counters: `7 (0,8000003f)`, empty when it
    /// has none.
    pub counters: String,
    /// On x86, what it said of its general-purpose counters; empty when it has
    /// none.
    #[serde(default)]
    pub general: String,
}

/// About the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meter {
    /// Its exit status; 128 + signal when killed.
    pub status: i32,
    /// What killed it.
    pub signal: Option<i32>,
    /// Guest clock, nanoseconds.
    pub real_ns: u64,
    /// User time with children, microseconds.
    pub user_us: u64,
    /// Kernel time with children, microseconds.
    pub sys_us: u64,
    /// PMU interrupts that the guest took meanwhile.
    pub pmis: Option<u64>,
}

/// What `perf report --stats` says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Perf {
    /// Samples.
    pub samples: u64,
    /// Records about lost ones.
    pub lost_records: u64,
    /// Lost samples.
    pub lost_samples: u64,
    /// How often the kernel throttled an event.
    pub throttled: u64,
    /// Samples a second and event that the kernel allowed in the end.
    pub max_sample_rate: u64,
}

/// About the KVM host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The version line of its VMM.
    pub vmm: String,
    /// Its exit status.
    pub status: i32,
    /// The host gave up on a guest that turned in a circle with its
    /// interrupts off, or waited for one that was lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stuck: bool,
}

/// The KVM host's accounts around the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kvm {
    /// Just before.
    pub begin: Snapshot,
    /// Just after.
    pub end: Snapshot,
}

/// The KVM host's accounts at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The first line of `/proc/stat`, hundredths of a second.
    pub cpu: String,
    /// `/sys/kernel/debug/kvm/*exit*`.
    pub exits: BTreeMap<String, u64>,
}

/// What the KVM host counted by tracepoints while the guest measured: for each
/// tracepoint, how often with which key. `woken` says, of the wake-ups of halted
/// vCPUs, which interrupt was injected next.
pub type Trace = BTreeMap<String, BTreeMap<String, u64>>;

/// The monitor's statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Monitor {
    /// Counters of the guest, without the cycle counter.
    pub guest_counters: Option<u32>,
    /// Counters that the monitor keeps.
    pub host_counters: Option<u32>,
    /// Between the two doorbells; `None` when they were not rung.
    pub measured: Option<Span>,
    /// From guest entry to power-off.
    pub total: Span,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The x86 VMM's statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Vmm {
    /// What becomes of a host event that the guest does not use.
    pub policy: String,
    /// What the guest's counters count with.
    pub backing: Option<String>,
    /// General-purpose counters of the guest.
    pub general: Option<u32>,
    /// Between the two doorbells; `None` when they were not rung.
    pub measured: Option<VmmSpan>,
    /// From guest entry to power-off.
    pub total: VmmSpan,
    /// The host's accounts at the two doorbells.
    #[serde(default)]
    pub host: Option<Kvm>,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The x86 VMM's account of a span of time. Kinds that did not happen are not
/// listed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmmSpan {
    /// PMU interrupts delivered.
    pub pmis: u64,
    /// Exits to the VMM, by kind: `msr:write:0x38f`, `rdpmc`.
    pub exits: BTreeMap<String, u64>,
    /// What was asked of the host's events, by kind: `create`, `pause`.
    #[serde(default)]
    pub host_operations: BTreeMap<String, u64>,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

/// The monitor's account of a span of time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Its length, of the architected timer.
    pub ticks: u64,
    /// How much of it was spent at EL2, all processors together.
    pub el2_ticks: u64,
    /// PMU interrupts; `None` where they do not pass through the monitor.
    pub pmis: Option<u64>,
    /// How often each kind of exit was taken.
    pub exits: BTreeMap<String, u64>,
    /// The time each kind took, ticks.
    #[serde(default)]
    pub exit_ticks: BTreeMap<String, u64>,
    /// Everything else it says.
    #[serde(flatten)]
    pub more: BTreeMap<String, serde_json::Value>,
}

impl Record {
    /// Reads a record's line, without its mark and end of line.
    pub fn parse(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
    }
}

impl Kvm {
    /// All exits between the two, KVM's own and those to its VMM.
    pub fn exits(&self) -> Option<u64> {
        let all = |snapshot: &Snapshot| snapshot.exits.get("exits").copied();
        Some(all(&self.end)?.saturating_sub(all(&self.begin)?))
    }
}

impl Guest {
    /// The event counters, without the cycle counter; `None` when the kernel
    /// did not say.
    pub fn event_counters(&self) -> Option<u32> {
        if let Ok(general) = self.general.parse() {
            return Some(general);
        }
        let (count, mask) = self
            .counters
            .split_once(' ')
            .unwrap_or((&self.counters, ""));
        let count: u32 = count.parse().ok()?;
        let low = mask
            .trim_matches(['(', ')'])
            .rsplit(',')
            .next()
            .and_then(|word| u32::from_str_radix(word, 16).ok());
        match low {
            Some(low) => Some((low & 0x7fff_ffff).count_ones()),
            None => count.checked_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_and_meter() {
        assert_eq!(
            Record::parse(br#"{"vpmu":"command"}"#),
            Some(Record::Vpmu(Phase::Command))
        );
        let line = br#"{"meter":{"status":137,"signal":9,"real_ns":1,"user_us":2,"sys_us":3,"pmis":null,"interrupts":5}}"#;
        let Some(Record::Meter(meter)) = Record::parse(line) else {
            panic!("not a meter record");
        };
        assert_eq!(
            (meter.status, meter.signal, meter.pmis),
            (137, Some(9), None)
        );
        assert_eq!(Record::parse(br#"{"other":1}"#), None);
        assert_eq!(Record::parse(b"{"), None);
    }

    #[test]
    fn monitor() {
        let line = br#"{"vpmu-monitor":{"design":"partitioned","implemented":6,"guest_counters":6,"host_counters":0,
            "isolation":{"partition":false},"traps":["PMEVTYPERn_EL0:w"],
            "measured":{"ticks":100,"el2_ticks":1,"frequency":62500000,"el2_instructions":null,"pmis":2,
            "exits":{"irq:pmu":2},"exit_ticks":{"irq:pmu":1}},
            "total":{"ticks":100,"el2_ticks":1,"frequency":62500000,"el2_instructions":null,"pmis":2,"exits":{}},
            "switch_register_accesses":0,"lost":{}}}"#;
        let Some(Record::VpmuMonitor(monitor)) = Record::parse(line) else {
            panic!("not a monitor record");
        };
        assert_eq!(monitor.guest_counters, Some(6));
        assert_eq!(monitor.measured.unwrap().exits["irq:pmu"], 2);
        assert_eq!(monitor.more["design"], "partitioned");
    }

    #[test]
    fn counters() {
        let guest = |counters: &str| Guest {
            kernel: String::new(),
            counters: counters.to_owned(),
            general: String::new(),
        };
        assert_eq!(guest("7 (0,8000003f)").event_counters(), Some(6));
        assert_eq!(guest("5 (0,8000000f)").event_counters(), Some(4));
        assert_eq!(guest("1 (0,80000000)").event_counters(), Some(0));
        assert_eq!(guest("7").event_counters(), Some(6));
        assert_eq!(guest("").event_counters(), None);
        let x86 = Guest {
            general: "4".to_owned(),
            ..guest("")
        };
        assert_eq!(x86.event_counters(), Some(4));
    }
}
