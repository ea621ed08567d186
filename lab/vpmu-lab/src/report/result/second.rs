//! The figures of a guest beside the one that is measured.

use serde::{Deserialize, Serialize};

use super::{Found, lost_samples};
use vpmu_measure::Record;

/// The figures of the command of a second guest. The exits and the host's share of both guests are the first one's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Second {
    /// The command, as a line for the shell.
    pub command: String,
    /// The command's exit status, 128 + signal when it was killed.
    pub status: i32,
    /// Event counters that the guest's kernel found.
    pub guest_counters: Option<u32>,
    /// Guest clock, seconds. The clock goes on while the other guest has its turn.
    pub real_s: f64,
    /// Guest clock, seconds.
    pub user_s: f64,
    /// Guest clock, seconds.
    pub sys_s: f64,
    /// Samples in the `perf.data` that the command left behind.
    pub samples: Option<u64>,
    /// Samples that perf knows it lost.
    pub lost_samples: Option<u64>,
    /// PMU interrupts that the guest took during the command.
    pub pmis: Option<u64>,
}

impl Second {
    /// Makes figures of the guest's records; `None` without a record of `meter`.
    pub fn from_records(command: &str, records: &[Record]) -> Option<Self> {
        let found = Found::in_records(records);
        let meter = found.meter?;
        let guest_counters = found.guest.and_then(vpmu_measure::Guest::event_counters);
        Some(Self {
            command: command.to_owned(),
            status: meter.status,
            guest_counters,
            real_s: meter.real_ns as f64 / 1e9,
            user_s: meter.user_us as f64 / 1e6,
            sys_s: meter.sys_us as f64 / 1e6,
            samples: found.perf.as_ref().map(|perf| perf.samples),
            lost_samples: found.perf.as_ref().and_then(lost_samples),
            // As of the first guest: without a PMU, null.
            pmis: meter.pmis.filter(|_| guest_counters.is_some()),
        })
    }
}
