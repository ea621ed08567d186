//! Which of architectural performance monitoring there is.

/// The version of architectural performance monitoring, CPUID.0AH:EAX\[7:0\]. Later ones order
/// higher, and contain the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Version {
    /// Fixed counters and the global registers (SDM 20.2.2).
    V2 = 2,
    /// AnyThread (SDM 20.2.3).
    V3,
    /// IA32_PERF_GLOBAL_STATUS_SET and _RESET, _INUSE, and freezing by a status bit (SDM 20.2.4).
    V4,
    /// A bitmap of fixed counters, domain separation, AnyThread gone (SDM 20.2.5).
    V5,
}

impl Version {
    /// Returns the number in CPUID.
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the version of this number. Later versions contain version 5, and are offered as that. `None`: no PMU,
    /// or version 1, which has no global registers.
    pub const fn from_number(number: u8) -> Option<Self> {
        match number {
            0 | 1 => None,
            2 => Some(Self::V2),
            3 => Some(Self::V3),
            4 => Some(Self::V4),
            _ => Some(Self::V5),
        }
    }
}
