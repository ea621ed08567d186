//! What a counter is set to count: the raw event type register, and what it means.

use super::PmuVersion;
use crate::counter::Counter;

/// The cycle counter. Its number is its bit in PMCNTEN, PMINTEN and PMOVS.
pub const CYCLE_COUNTER: Counter = Counter::at::<31>();

/// No PMU has more event counters: 31 names the cycle counter.
pub const MAX_EVENT_COUNTERS: u8 = 31;

/// Event 0x0000: counts writes of PMSWINC_EL0.
pub const SW_INCR: u16 = 0x0000;
/// Event 0x0011: what the cycle counter counts.
pub const CPU_CYCLES: u16 = 0x0011;
/// Event 0x001e: an odd counter counts the overflows of the even one below it.
pub const CHAIN: u16 = 0x001e;

/// Fields of PMCR_EL0.
pub mod pmcr {
    use super::PmuVersion;

    /// All counters are enabled as PMCNTEN says; 0: none counts.
    pub const E: u64 = 1 << 0;
    /// Write 1: event counters become zero. Reads as 0.
    pub const P: u64 = 1 << 1;
    /// Write 1: the cycle counter becomes zero. Reads as 0.
    pub const C: u64 = 1 << 2;
    /// The cycle counter counts every 64th cycle, unless LC is set.
    pub const D: u64 = 1 << 3;
    /// Export of events.
    pub const X: u64 = 1 << 4;
    /// The cycle counter stands still where event counting is prohibited.
    pub const DP: u64 = 1 << 5;
    /// The cycle counter overflows at 2^64; 0: at 2^32.
    pub const LC: u64 = 1 << 6;
    /// Event counters overflow at 2^64; 0: at 2^32. From PMUv3p5 on.
    pub const LP: u64 = 1 << 7;
    /// Where the number of event counters (5 bits) begins.
    pub const N_SHIFT: u32 = 11;
    /// The number of event counters.
    pub const N_MASK: u64 = 0x1f << N_SHIFT;
    /// Where IDCODE (8 bits) and, above it, IMP (8 bits) begin.
    pub const IDENTITY_SHIFT: u32 = 16;

    /// The bits that keep what is written.
    pub(in crate::arm) const fn kept(version: PmuVersion) -> u64 {
        E | D | X | DP | LC | lp(version)
    }

    /// LP, where it exists.
    pub(in crate::arm) const fn lp(version: PmuVersion) -> u64 {
        match version {
            PmuVersion::V3p5 => LP,
            _ => 0,
        }
    }
}

/// Fields of PMUSERENR_EL0, each a permission for EL0.
pub mod pmuserenr {
    /// Everything that EL0 can be allowed.
    pub const EN: u64 = 1 << 0;
    /// Write PMSWINC_EL0.
    pub const SW: u64 = 1 << 1;
    /// Read PMCCNTR_EL0.
    pub const CR: u64 = 1 << 2;
    /// Read event counters, and read and write PMSELR_EL0.
    pub const ER: u64 = 1 << 3;
    /// All bits that exist.
    // UEN and the bits above it belong to later extensions, which no guest is offered.
    pub const MASK: u64 = EN | SW | CR | ER;
}

/// The image of PMEVTYPERn_EL0, or of PMCCFILTR_EL0 which has the same filter bits, as a guest
/// wrote it. Any 64-bit value is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawPmevtyper(pub u64);

impl RawPmevtyper {
    /// Do not count at EL1.
    pub const P: u64 = 1 << 31;
    /// Do not count at EL0.
    pub const U: u64 = 1 << 30;
    /// Non-secure EL1 is counted where this equals P. Only with EL3.
    pub const NSK: u64 = 1 << 29;
    /// Non-secure EL0 is counted where this equals U. Only with EL3.
    pub const NSU: u64 = 1 << 28;
    /// Count at Non-secure EL2.
    pub const NSH: u64 = 1 << 27;
    /// Secure EL3 is counted where this equals P. Only with EL3.
    pub const M: u64 = 1 << 26;
    /// Count for all threads of the core.
    pub const MT: u64 = 1 << 25;
    /// Secure EL2 is counted where this differs from NSH.
    pub const SH: u64 = 1 << 24;

    /// Returns the event number, as `version` sees it.
    pub const fn event(self, version: PmuVersion) -> u16 {
        self.0 as u16 & version.event_mask()
    }

    /// Returns what stays of a guest's write to PMEVTYPERn_EL0: the event number and the filters for EL1 and EL0.
    /// Everything that could count outside the guest (EL2, EL3, other threads) or that belongs to an extension the
    /// guest is not offered becomes zero, as RES0 bits do.
    ///
    /// `el3`: whether the guest finds (ID_AA64PFR0_EL1.EL3) that EL3 exists, which gives NSK and
    /// NSU a meaning.
    pub const fn for_guest(self, version: PmuVersion, el3: bool) -> Self {
        Self(self.0 & (Self::guest_filters(el3) | version.event_mask() as u64))
    }

    /// Returns what stays of a guest's write to PMCCFILTR_EL0: as [`for_guest`](Self::for_guest), without an event
    /// number.
    pub const fn for_guest_cycles(self, el3: bool) -> Self {
        Self(self.0 & Self::guest_filters(el3))
    }

    const fn guest_filters(el3: bool) -> u64 {
        Self::P | Self::U | if el3 { Self::NSK | Self::NSU } else { 0 }
    }

    const fn has(self, bit: u64) -> bool {
        self.0 & bit != 0
    }

    /// Returns what an event counter with this type is to count in a Non-secure guest.
    pub const fn config(self, version: PmuVersion) -> CounterConfig {
        self.with_event(EventKind::Event(self.event(version)))
    }

    /// Returns what the cycle counter with this filter is to count in a Non-secure guest.
    pub const fn cycles_config(self) -> CounterConfig {
        self.with_event(EventKind::Cycles)
    }

    const fn with_event(self, event: EventKind) -> CounterConfig {
        // A guest is Non-secure: U and P speak of Secure state, and NSU and NSK turn them round where they differ.
        // Without EL3 the bits NSK and NSU are zero, and the rule is the same.
        CounterConfig {
            event,
            el0: self.has(Self::U) == self.has(Self::NSU),
            el1: self.has(Self::P) == self.has(Self::NSK),
        }
    }
}

/// What a host counter is to count. It counts only while the guest runs, at the levels named here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CounterConfig {
    /// Which event.
    pub event: EventKind,
    /// Count while the guest is at EL0.
    pub el0: bool,
    /// Count while the guest is at EL1.
    pub el1: bool,
}

/// An event a host can count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// Not from 0 on: `None` of it is zero then.
#[repr(u8)]
pub enum EventKind {
    /// Processor cycles, for the guest's cycle counter.
    Cycles = 1,
    /// An event by its number.
    Event(u16) = 2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_follow_p_and_u_and_their_non_secure_twins() {
        let levels = |bits: u64| {
            let config = RawPmevtyper(bits).cycles_config();
            (config.el0, config.el1)
        };
        assert_eq!(levels(0), (true, true));
        assert_eq!(levels(RawPmevtyper::P), (true, false));
        assert_eq!(levels(RawPmevtyper::U), (false, true));
        assert_eq!(levels(RawPmevtyper::P | RawPmevtyper::NSK), (true, true));
        assert_eq!(levels(RawPmevtyper::NSU), (false, true));
    }

    #[test]
    fn nothing_counts_outside_the_guest() {
        let kept = RawPmevtyper(u64::MAX).for_guest(PmuVersion::V3p5, true).0;
        assert_eq!(kept, 0xf000_ffff);
        let kept = RawPmevtyper(u64::MAX).for_guest(PmuVersion::V3, false).0;
        assert_eq!(kept, 0xc000_03ff);
        assert_eq!(
            RawPmevtyper(u64::MAX).for_guest_cycles(false).0,
            0xc000_0000
        );
    }
}
