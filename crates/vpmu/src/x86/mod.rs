//! Intel's architectural performance monitoring, versions 2 to 5, as a guest sees it.
//!
//! # Why it is driven this way
//!
//! Architectural performance monitoring (Intel SDM vol. 3B, section 20.2, chapter "Performance
//! Monitoring"; section 18.2 in older editions) is a set of MSRs: general counters that count what
//! their IA32_PERFEVTSELx says, fixed counters that always count the same event, and global
//! registers that gate them all and collect their overflow bits. Which of it a processor has is in
//! CPUID leaf 0AH. A guest asks that leaf, and a later version always contains the earlier ones, so
//! here one value, [`Capability`], decides everything: which MSRs exist, which of their bits are
//! reserved, what CPUID says.
//!
//! Linux's handler for one sample touches six MSRs and executes one RDPMC, and each of these leaves
//! the guest. What the exits cost cannot be changed here; what the host does because of them can.
//! [`Pmu`] therefore tells [`HostEvents`](crate::counter::HostEvents) only what really changed, and
//! that decides, under a [`Policy`](crate::counter::Policy), which calls are left to make.
//!
//! # The interrupt
//!
//! The engine computes a level, [`Pmu::line`]: an overflow bit is set, its counter asks for an
//! interrupt, and the counter is enabled globally. It latches nothing. A local APIC wants edges:
//! [`PmiEdge`] makes them. Setting the mask bit of LVTPC with the delivery, as Intel's processors do
//! (section 11.5.1), is the business of whoever has the local APIC.
//!
//! # What is not offered
//!
//! Last-branch records, PEBS, performance metrics and the uncore: their bits are reserved, so a
//! guest that looks finds a processor without them.

mod accesses;
mod capability;
mod config;
mod counters;
mod filter;
mod msr;
mod pmi;
mod pmu;
mod save;
mod state;

use crate::counter::CounterSet;

pub use capability::{Capability, ConfigError, CpuidLeaf, Version, perf_capabilities};
pub use config::{ArchEvent, CounterConfig, EventKind, RawPerfEvtSel, fixed_ctrl};
pub use filter::{EventFilter, MaskedEvent, TooManyEvents};
pub use msr::{Msr, debugctl, global_status};
pub use pmi::PmiEdge;
pub use pmu::{Pmu, PmuConfig};
pub use state::{PmuState, RestoreError};

/// No PMU here has more general counters: the MSRs IA32_PMC0 to IA32_PMC7 and their aliases are
/// architectural.
pub const MAX_GENERAL: u8 = 8;

/// No PMU here has more fixed counters: 0 to 6 have a meaning.
pub const MAX_FIXED: u8 = 7;

/// The number that fixed counter 0 has in [`CounterSet`]s and for a host; the others follow.
/// General counters begin at 0.
pub const FIXED: u8 = 16;

/// Who runs: the guest's kernel (CPL 0) or its user space (any other).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// CPL 0. Real mode is this too.
    Kernel,
    /// CPL 1 to 3. Virtual-8086 mode is this too.
    User,
}

/// How an access ended, and so what the caller does next. The engine never injects anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the access is complete only when the caller has acted on its outcome"]
pub enum Outcome {
    /// Not an MSR of this PMU: the caller goes on as for any MSR it does not know.
    NotHandled,
    /// A read is complete: put the low half into EAX and the high half into EDX, clear the high
    /// halves of RAX and RDX, and step over the instruction.
    Value(u64),
    /// A write is complete: step over the instruction.
    Done,
    /// Inject #GP(0), and do not step over the instruction.
    GeneralProtection,
}

/// Counters as the global registers show them: general ones from bit 0, fixed ones from bit 32.
const fn to_global(counters: CounterSet) -> u64 {
    let bits = counters.bits();
    (bits & 0xffff) as u64 | ((bits >> FIXED) as u64) << 32
}

/// The other way round. Bits that are no counter's are dropped.
const fn from_global(bits: u64) -> CounterSet {
    CounterSet::from_bits(bits as u32 & 0xffff | ((bits >> 32) as u32 & 0xffff) << FIXED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_have_their_places_in_the_global_registers() {
        let some = CounterSet::from_bits(1 << 3 | 1 << (FIXED + 2));
        assert_eq!(to_global(some), 1 << 3 | 1 << 34);
        assert_eq!(from_global(1 << 3 | 1 << 34 | 1 << 59 | 1 << 20), some);
    }
}
