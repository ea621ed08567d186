//! The register that says what a general counter counts, as far as both vendors have it.

use super::{CounterConfig, EventKind};

/// The image of IA32_PERFEVTSELx (SDM 20.2.1.1, figures 20-1 and 20-6) or of AMD's PERF_CTL (APM vol. 2,
/// 13.2.1) as a guest wrote it. Any 64-bit value is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawPerfEvtSel(pub u64);

impl RawPerfEvtSel {
    /// Count at CPL 1 to 3.
    pub const USR: u64 = 1 << 16;
    /// Count at CPL 0.
    pub const OS: u64 = 1 << 17;
    /// Count the moments at which the condition becomes true.
    pub const EDGE: u64 = 1 << 18;
    /// Interrupt on overflow.
    pub const INT: u64 = 1 << 20;
    /// The counter is enabled.
    pub const EN: u64 = 1 << 22;
    /// Invert the comparison with the counter mask.
    pub const INV: u64 = 1 << 23;

    /// Returns bits 7:0, the event select; AMD's continues in bits 35:32.
    pub const fn select(self) -> u8 {
        self.0 as u8
    }

    /// Returns bits 15:8, the unit mask.
    pub const fn umask(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Returns bits 31:24, the counter mask.
    pub const fn threshold(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// Returns whether all of `bits` are set.
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// What a counter with this register is to count, if `event` is what it names.
    pub(crate) const fn counts(self, event: EventKind) -> CounterConfig {
        CounterConfig {
            event,
            user: self.has(Self::USR),
            kernel: self.has(Self::OS),
            edge: self.has(Self::EDGE),
            invert: self.has(Self::INV),
            threshold: self.threshold(),
            // Intel's version 5 alone has that: its `config` sets it.
            only_c0: false,
        }
    }
}
