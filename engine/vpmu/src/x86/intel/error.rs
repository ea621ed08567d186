//! Why a [`Capability`](super::Capability) is refused.

use core::fmt;

use super::{MAX_FIXED, MAX_GENERAL, Version};

/// Why there can be no such PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not 1 to 8 general counters.
    General(u8),
    /// Fixed counters above 6, or with gaps before version 5.
    Fixed(u32),
    /// A width that is not 32 to 63 bits.
    Width(u8),
    /// Events that CPUID leaf 0AH has no bit for.
    Events(u32),
    /// Something that IA32_PERF_CAPABILITIES announces, without that MSR.
    Pdcm,
    /// CPUID leaf 23H before version 5.
    Leaf23(Version),
    /// Bits of IA32_DEBUGCTL for someone else that are the PMU's.
    DebugCtl(u64),
    /// PEBS for linear addresses of so many bits, which are not 48 or 57.
    LinearAddress(u8),
    /// Last branch records with a depth or an address width that does not exist, or before version 4.
    Lbr,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("make such a PMU: ")?;
        match self {
            Self::General(n) => write!(f, "{n} general counters are not 1 to {MAX_GENERAL}"),
            Self::Fixed(bits) => write!(
                f,
                "fixed counters {bits:#x} are above {}, or have gaps before version 5",
                MAX_FIXED - 1
            ),
            Self::Width(bits) => write!(f, "a width of {bits} bits is not 32 to 63"),
            Self::Events(bits) => write!(f, "events {bits:#x} are more than CPUID can say"),
            Self::Pdcm => f.write_str("IA32_PERF_CAPABILITIES has to announce it (set pdcm)"),
            Self::Leaf23(version) => {
                write!(f, "CPUID leaf 0x23 came with version 5, not {version:?}")
            }
            Self::LinearAddress(bits) => {
                write!(f, "linear addresses of {bits} bits are not of 48 or 57")
            }
            Self::Lbr => f.write_str(
                "last branch records take depths of 8 to 32, addresses of 48 or 57 bits, and version 4 or later",
            ),
            Self::DebugCtl(bits) => write!(f, "IA32_DEBUGCTL bits {bits:#x} are the PMU's own"),
        }
    }
}

impl core::error::Error for ConfigError {}
