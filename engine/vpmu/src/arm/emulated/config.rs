//! What an emulated PMU is, as opposed to what it holds.

use core::fmt;

use crate::arm::{EventFilter, MAX_EVENT_COUNTERS, PmuVersion, pmcr};
use crate::counter::Policy;

/// What a guest reads of its emulated PMU's identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmulatedConfig {
    /// Event counters, 0 to 31: PMCR_EL0.N. The cycle counter comes on top.
    pub counters: u8,
    /// The version in the guest's ID_AA64DFR0_EL1.
    pub version: PmuVersion,
    /// Whether the guest's ID_AA64PFR0_EL1 says that EL3 exists. It gives the filter bits NSK and
    /// NSU a meaning; without it they are RES0.
    pub el3: bool,
    /// Whether the guest's ID_AA64PFR0_EL1 says that EL0 may use AArch32. Without it PMCR_EL0.LC is RES1: the cycle
    /// counter overflows at 2^64, and D has no effect.
    pub aarch32: bool,
    /// PMCR_EL0.{IMP, IDCODE}.
    pub identity: Identity,
    /// PMCEID0_EL0 and PMCEID1_EL0: the common events the host can count. The engine adds
    /// SW_INCR and CHAIN, which it does itself, and takes out what `filter` denies.
    // From the embedder: which events a machine counts, the engine cannot find out.
    pub events: [u64; 2],
    /// PMMIR_EL1, seen from PMUv3p4 on.
    pub pmmir: u64,
    /// Which events the guest may count.
    pub filter: EventFilter,
    /// What is asked of the host when.
    pub policy: Policy,
}

impl EmulatedConfig {
    /// The configuration of a PMU that is not made yet: no event counter, and no event.
    pub(super) const VACANT: Self = Self {
        counters: 0,
        version: PmuVersion::V3,
        el3: false,
        aarch32: false,
        identity: Identity {
            implementer: 0,
            code: 0,
        },
        events: [0; 2],
        pmmir: 0,
        filter: EventFilter::deny_all(),
        policy: Policy::Recreate,
    };

    /// PMCR_EL0.LC where it is RES1.
    pub(super) const fn res1_pmcr(&self) -> u64 {
        (!self.aarch32 as u64) << pmcr::LC.trailing_zeros()
    }

    /// Returns why there can be no such PMU.
    pub(super) const fn check(&self) -> Result<(), ConfigError> {
        // Number 31 is the cycle counter's in every register with a bit for each counter.
        if self.counters > MAX_EVENT_COUNTERS {
            return Err(ConfigError::Counters(self.counters));
        }
        Ok(())
    }
}

/// Who made the PMU, as PMCR_EL0 says it. Zero is a good answer: software then reads MIDR_EL1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// PMCR_EL0.IMP.
    pub implementer: u8,
    /// PMCR_EL0.IDCODE.
    pub code: u8,
}

impl Identity {
    /// Returns the identity that a PMCR_EL0 holds, so that a guest can be shown the machine's.
    pub const fn from_pmcr(value: u64) -> Self {
        let identity = value >> pmcr::IDENTITY_SHIFT;
        Self {
            implementer: (identity >> 8) as u8,
            // The casts drop the bits above, which are other fields.
            code: identity as u8,
        }
    }

    pub(super) const fn to_pmcr(self) -> u64 {
        ((self.implementer as u64) << 8 | self.code as u64) << pmcr::IDENTITY_SHIFT
    }
}

/// Why there can be no such PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// More than 31 event counters were asked for.
    Counters(u8),
    /// More event counters than there are physical ones for the guest.
    Unbacked {
        /// What was asked for.
        counters: u8,
        /// What the plan gives the guest.
        physical: u8,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Counters(n) => write!(
                f,
                "make a PMU with {n} event counters: the architecture ends at {MAX_EVENT_COUNTERS}"
            ),
            Self::Unbacked { counters, physical } => write!(
                f,
                "make a PMU with {counters} event counters on {physical} physical ones"
            ),
        }
    }
}

impl core::error::Error for ConfigError {}
