//! What hypervisors, and the programs in their guests, report of a measurement.
//!
//! A [`Record`] goes from a guest, the KVM host or a hypervisor to the console: one line, the byte
//! 0x1e and a JSON object with one key. A [`HostJob`] goes the other way, as a file of the KVM
//! host's image.
//!
//! The crate is `no_std`, because the programs in guests are freestanding. With the feature `vmm` it also has
//! `Measurement`, what a VMM's PMU costs between two moments of its guest: `vpmu-vmm` and `vpmu exec` share it, because
//! their guests ring the same doorbell and their figures are compared. The monitor alone prints its record by hand: it has
//! no heap while a guest runs.

#![cfg_attr(not(any(test, feature = "vmm")), no_std)]

extern crate alloc;

mod hypervisor;
mod job;
mod kvm;
#[cfg(all(feature = "vmm", target_os = "linux", target_arch = "x86_64"))]
mod measure;

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;

use serde::{Deserialize, Serialize};

pub use hypervisor::{HostProfile, HostSample, Monitor, Span, Vmm, VmmSpan};
pub use job::{Disturb, HostJob, HostVmm};
pub use kvm::{Host, Kvm, Snapshot, Trace};
#[cfg(all(feature = "vmm", target_os = "linux", target_arch = "x86_64"))]
pub use measure::{About, BEGIN, DOORBELL, DOORBELL_ID, END, Measurement, SAVE};

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
    /// The profile in that `perf.data`, where one was asked for.
    Profile(Profile),
    /// About the KVM host.
    Host(Host),
    /// The KVM host's statistics.
    Kvm(Box<Kvm>),
    /// The KVM host's counts of tracepoints.
    Trace(Trace),
    /// The monitor's statistics.
    VpmuMonitor(Box<Monitor>),
    /// A part of the profile that the monitor takes of its guest.
    HostProfile(Box<HostProfile>),
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
    /// PMIs that the guest took meanwhile; `None` when no PMU driver counts them.
    pub pmis: Option<u64>,
    /// All interrupts that the guest took meanwhile; `None` when the kernel does not list them.
    #[serde(default)]
    pub interrupts: Option<u64>,
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

/// A profile as folded stacks, the form that flame graphs are made of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Samples by stack. A stack names its frames from the outermost on, with `;` between them.
    pub folded: BTreeMap<String, u64>,
}

impl Record {
    /// The record as a line, with its mark and the end of the line.
    pub fn line(&self) -> String {
        let json = serde_json::to_string(self).expect("every map's keys are strings");
        format!("{}{json}\n", char::from(MARK))
    }

    /// Reads a record's line, without its mark and end of line.
    pub fn parse(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line).ok()
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
