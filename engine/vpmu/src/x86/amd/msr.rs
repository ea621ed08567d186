//! The MSRs of the PMU by name: the PPRs' lists of MSRs; APM vol. 2, appendix A.

use core::fmt;

use super::MAX_COUNTERS;

const LEGACY: u8 = 4;
const PERF_LEGACY_CTL0: u32 = 0xc001_0000;
const PERF_LEGACY_CTR0: u32 = 0xc001_0004;
const PERF_CTL0: u32 = 0xc001_0200;
const GLOBAL_STATUS: u32 = 0xc000_0300;
const GLOBAL_CTL: u32 = 0xc000_0301;
const GLOBAL_STATUS_CLR: u32 = 0xc000_0302;
const GLOBAL_STATUS_SET: u32 = 0xc000_0303;

/// An MSR that belongs to the PMU. The number of one that is there several times may be of a counter that does
/// not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Msr {
    /// PERF_LEGACY_CTL: another name of [`Ctl`](Self::Ctl) 0 to 3.
    LegacyCtl(u8),
    /// PERF_LEGACY_CTR: another name of [`Ctr`](Self::Ctr) 0 to 3.
    LegacyCtr(u8),
    /// PERF_CTL: what a counter counts. From the core extension on.
    Ctl(u8),
    /// PERF_CTR: a counter. From the core extension on.
    Ctr(u8),
    /// PerfCntrGlobalStatus: who has overflowed. PerfMonV2, as all that follow.
    GlobalStatus,
    /// PerfCntrGlobalCtl: who may count.
    GlobalCtl,
    /// PerfCntrGlobalStatusClr: clears bits of PerfCntrGlobalStatus.
    GlobalStatusClr,
    /// PerfCntrGlobalStatusSet: sets bits of PerfCntrGlobalStatus.
    GlobalStatusSet,
}

impl Msr {
    /// Returns the MSR at `address`, or `None` if no MSR of the PMU is there.
    pub const fn decode(address: u32) -> Option<Self> {
        const END: u32 = PERF_CTL0 + 2 * MAX_COUNTERS as u32 - 1;
        Some(match address {
            PERF_LEGACY_CTL0..PERF_LEGACY_CTR0 => {
                Self::LegacyCtl((address - PERF_LEGACY_CTL0) as u8)
            }
            // Four controls, then four counters: the pairs came with the core extension.
            PERF_LEGACY_CTR0..0xc001_0008 => Self::LegacyCtr((address - PERF_LEGACY_CTR0) as u8),
            // A counter's two registers are neighbours.
            PERF_CTL0..=END => {
                let n = ((address - PERF_CTL0) / 2) as u8;
                if address & 1 == 0 {
                    Self::Ctl(n)
                } else {
                    Self::Ctr(n)
                }
            }
            GLOBAL_STATUS => Self::GlobalStatus,
            GLOBAL_CTL => Self::GlobalCtl,
            GLOBAL_STATUS_CLR => Self::GlobalStatusClr,
            GLOBAL_STATUS_SET => Self::GlobalStatusSet,
            _ => return None,
        })
    }

    /// Returns the MSR's address. A number that no MSR has gives an address near those that exist.
    pub const fn address(self) -> u32 {
        match self {
            Self::LegacyCtl(n) => PERF_LEGACY_CTL0 + n as u32,
            Self::LegacyCtr(n) => PERF_LEGACY_CTR0 + n as u32,
            Self::Ctl(n) => PERF_CTL0 + 2 * n as u32,
            Self::Ctr(n) => PERF_CTL0 + 2 * n as u32 + 1,
            Self::GlobalStatus => GLOBAL_STATUS,
            Self::GlobalCtl => GLOBAL_CTL,
            Self::GlobalStatusClr => GLOBAL_STATUS_CLR,
            Self::GlobalStatusSet => GLOBAL_STATUS_SET,
        }
    }

    /// Returns every MSR that can belong to a PMU: what an integration has to intercept.
    pub fn all() -> impl Iterator<Item = Self> {
        // The old names reach the same counters on every interface, so all of them are intercepted.
        let legacy = (0..LEGACY).flat_map(|n| [Self::LegacyCtl(n), Self::LegacyCtr(n)]);
        let core = (0..MAX_COUNTERS).flat_map(|n| [Self::Ctl(n), Self::Ctr(n)]);
        legacy.chain(core).chain([
            Self::GlobalStatus,
            Self::GlobalCtl,
            Self::GlobalStatusClr,
            Self::GlobalStatusSet,
        ])
    }
}

/// The PPRs' name.
impl fmt::Display for Msr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::LegacyCtl(n) => return write!(f, "PERF_LEGACY_CTL{n}"),
            Self::LegacyCtr(n) => return write!(f, "PERF_LEGACY_CTR{n}"),
            Self::Ctl(n) => return write!(f, "PERF_CTL{n}"),
            Self::Ctr(n) => return write!(f, "PERF_CTR{n}"),
            Self::GlobalStatus => "PerfCntrGlobalStatus",
            Self::GlobalCtl => "PerfCntrGlobalCtl",
            Self::GlobalStatusClr => "PerfCntrGlobalStatusClr",
            Self::GlobalStatusSet => "PerfCntrGlobalStatusSet",
        };
        f.write_str(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_each_others_inverse() {
        for msr in Msr::all() {
            assert_eq!(Msr::decode(msr.address()), Some(msr));
        }
        let near = (0xc000_0000..0xc000_2000).chain(0xc001_0000..0xc001_2000);
        let decoded = near.filter_map(Msr::decode).count();
        assert_eq!(decoded, Msr::all().count(), "nothing else is taken");
    }
}
