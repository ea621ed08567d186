//! PMUs of x86 processors, as a guest sees them.
//!
//! Each vendor has a model of its own: [`intel`] is architectural performance monitoring, [`amd`] the core performance
//! counters. A model is its registers. Everything else is one [`Pmu`], which has the registers of either vendor. What a
//! host is to count ([`CounterConfig`]), which events a guest may count ([`EventFilter`]), and how an access ends
//! ([`Outcome`]) is the same for both.

pub mod amd;
mod capability;
mod config;
mod counters;
mod filter;
pub mod intel;
pub mod lbr;
mod msr;
pub mod pebs;
mod pmu;
mod restore;
mod select;

pub use capability::{Capability, PmuConfig, PmuState};
pub use config::{ArchEvent, CounterConfig, EventKind};
pub use filter::{EventFilter, MaskedEvent, TooManyEvents};
pub use pmu::Pmu;
pub use restore::RestoreError;
pub use select::RawPerfEvtSel;

/// Who runs: the guest's kernel (CPL 0) or its user space (any other).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ring {
    /// CPL 0. Real mode is this too.
    Kernel,
    /// CPL 1 to 3. Virtual-8086 mode is this too.
    User,
}

/// Bits of the global status register that are no counter's, at the same places for Intel (SDM vol. 3B, 20.2.4) and
/// AMD.
mod status {
    /// The counters are frozen: none counts while this is set.
    pub(super) const COUNTERS_FROZEN: u64 = 1 << 59;
    /// The last branch records are frozen: none is recorded while this is set.
    pub(super) const BRANCHES_FROZEN: u64 = 1 << 58;
    /// The PEBS buffer in the DS save area is full, up to its threshold. Intel's only.
    pub(super) const BUFFER_OVERFLOW: u64 = 1 << 62;

    /// How the request of a PMI stops all counters (SDM 18.4.7).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Freeze {
        /// The global control register is cleared.
        Gate,
        /// A bit of the global status register is set, and nothing counts while it is.
        Status,
    }
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

/// Returns `address` as a linear address of so many bits: the highest of them is repeated above.
const fn canonical(address: u64, bits: u8) -> u64 {
    // The mask keeps the shift below 64 for any `bits`: a shift by 64 would panic.
    let unused = 64_u32.saturating_sub(bits as u32) & 63;
    (address.cast_signed() << unused >> unused).cast_unsigned()
}

/// What one CPUID leaf answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidLeaf {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}
