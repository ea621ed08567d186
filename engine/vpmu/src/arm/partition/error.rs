//! Why a partition cannot be had.

use core::fmt;

use crate::arm::{MAX_EVENT_COUNTERS, PmuVersion};

/// Why a CPU cannot be partitioned as asked. All are faults of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanError {
    /// No CPU has so many event counters.
    Implemented {
        /// What was given as PMCR_EL0.N.
        implemented: u8,
    },
    /// The host wants more counters than there are.
    HostCounters {
        /// How many it wants.
        host_counters: u8,
        /// How many there are.
        implemented: u8,
    },
    /// The host wants all counters, and this CPU cannot leave the guest none.
    NoGuestCounter {
        /// How many there are.
        implemented: u8,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Implemented { implemented } => write!(
                f,
                "plan the PMU partition: PMCR_EL0.N = {implemented} given, but there are at most \
                 {MAX_EVENT_COUNTERS} event counters"
            ),
            Self::HostCounters {
                host_counters,
                implemented,
            } => write!(
                f,
                "plan the PMU partition: {host_counters} host counters wanted, but this CPU has \
                 {implemented} (PMCR_EL0.N); ask for fewer"
            ),
            Self::NoGuestCounter { implemented } => write!(
                f,
                "plan the PMU partition: all {implemented} event counters wanted by the host, but \
                 MDCR_EL2.HPMN = 0 needs FEAT_HPMN0, which this CPU lacks; leave the guest one"
            ),
        }
    }
}

impl core::error::Error for PlanError {}

/// Why a vCPU's PMU cannot go on with another CPU's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MigrateError {
    /// Its registers are still in the hardware of the old CPU: the caller forgot to `put`.
    Loaded,
    // Fewer counters are no error: those that are missing are `Lost`. A guest must not find more than it has found before.
    /// The guest has seen fewer event counters. The other CPU's plan must leave it no more, by a larger number of host
    /// counters.
    Counters {
        /// How many the guest has.
        guest: u8,
        /// How many the plan gives.
        offered: u8,
    },
    /// The guest has another PMU version.
    Version {
        /// What the guest has.
        guest: PmuVersion,
        /// What the plan gives.
        offered: PmuVersion,
    },
}

impl fmt::Display for MigrateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded => {
                f.write_str("migrate a PMU: still loaded on its old CPU; put it there first")
            }
            Self::Counters { guest, offered } => write!(
                f,
                "migrate a PMU with {guest} event counters to a CPU whose plan gives {offered}; \
                 plan that CPU with more host counters"
            ),
            Self::Version { guest, offered } => {
                write!(f, "migrate a PMU of {guest:?} to a CPU of {offered:?}")
            }
        }
    }
}

impl core::error::Error for MigrateError {}
