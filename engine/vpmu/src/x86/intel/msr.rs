//! The MSRs of the PMU by name. SDM vol. 4, table 2-2 ("IA-32 Architectural MSRs").

use core::fmt;

use crate::counter::{Counter, CounterSet};

/// No PMU here has more general counters: the MSRs IA32_PMC0 to IA32_PMC7 and their aliases are
/// architectural.
pub const MAX_GENERAL: u8 = 8;

/// No PMU here has more fixed counters: 0 to 6 have a meaning.
pub const MAX_FIXED: u8 = 7;

/// The number that fixed counter 0 has in [`CounterSet`](crate::counter::CounterSet)s and for a host; the others follow.
/// General counters begin at 0.
// The middle of a set of 32, so that a conversion from the global registers is a shift.
pub const FIXED: u8 = 16;

const IA32_PMC0: u32 = 0xc1;
const IA32_PERFEVTSEL0: u32 = 0x186;
const IA32_DEBUGCTL: u32 = 0x1d9;
const IA32_FIXED_CTR0: u32 = 0x309;
const IA32_PERF_CAPABILITIES: u32 = 0x345;
const IA32_FIXED_CTR_CTRL: u32 = 0x38d;
const IA32_PERF_GLOBAL_STATUS: u32 = 0x38e;
const IA32_PERF_GLOBAL_CTRL: u32 = 0x38f;
const IA32_PERF_GLOBAL_OVF_CTRL: u32 = 0x390;
const IA32_PERF_GLOBAL_STATUS_SET: u32 = 0x391;
const IA32_PERF_GLOBAL_INUSE: u32 = 0x392;
const IA32_PEBS_ENABLE: u32 = 0x3f1;
const MSR_PEBS_DATA_CFG: u32 = 0x3f2;
const IA32_A_PMC0: u32 = 0x4c1;
const IA32_DS_AREA: u32 = 0x600;

/// Bits of IA32_PERF_GLOBAL_STATUS that are no counter's.
pub mod global_status {
    /// The last-branch records are frozen. From version 4 on.
    pub const LBR_FRZ: u64 = 1 << 58;
    /// The counters are frozen: none counts while this is set. From version 4 on.
    pub const CTR_FRZ: u64 = 1 << 59;
    /// The PEBS buffer in the DS save area is full, up to its threshold.
    pub const OVF_BUF: u64 = 1 << 62;
    /// The state of the performance monitoring hardware has changed.
    pub const COND_CHGD: u64 = 1 << 63;
}

/// Bits of IA32_DEBUGCTL that belong to the PMU.
pub mod debugctl {
    /// Freeze the last branch records on a PMI. Reserved without [`lbr`](crate::x86::lbr).
    pub const FREEZE_LBRS_ON_PMI: u64 = 1 << 11;
    /// Freeze the counters on a PMI.
    pub const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;
    /// Freeze the counters in system management mode, if IA32_PERF_CAPABILITIES says so.
    pub const FREEZE_WHILE_SMM: u64 = 1 << 14;
}

/// An MSR that belongs to the PMU. The index in a register's number may name a counter that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Msr {
    /// IA32_PERFEVTSELx: what general counter x counts.
    PerfEvtSel(u8),
    /// IA32_PMCx: general counter x. Writes have 32 bits, and bit 31 is extended.
    Pmc(u8),
    /// IA32_A_PMCx: general counter x. Writes have the counter's width.
    FullWidthPmc(u8),
    /// IA32_FIXED_CTRx: fixed counter x.
    FixedCtr(u8),
    /// IA32_FIXED_CTR_CTRL: four bits for each fixed counter.
    FixedCtrCtrl,
    /// IA32_PERF_GLOBAL_STATUS: who has overflowed.
    GlobalStatus,
    /// IA32_PERF_GLOBAL_CTRL: who may count.
    GlobalCtrl,
    /// IA32_PERF_GLOBAL_OVF_CTRL, from version 4 on IA32_PERF_GLOBAL_STATUS_RESET: clears bits of
    /// IA32_PERF_GLOBAL_STATUS.
    GlobalOvfCtrl,
    /// IA32_PERF_GLOBAL_STATUS_SET: sets bits of IA32_PERF_GLOBAL_STATUS. From version 4 on.
    GlobalStatusSet,
    /// IA32_PERF_GLOBAL_INUSE: which counters are configured. From version 4 on.
    GlobalInuse,
    /// IA32_PERF_CAPABILITIES.
    PerfCapabilities,
    /// IA32_DEBUGCTL, which the PMU shares with the debug facilities.
    DebugCtl,
    /// IA32_PEBS_ENABLE: whose overflows write records.
    PebsEnable,
    /// MSR_PEBS_DATA_CFG: what is in an adaptive record.
    PebsDataCfg,
    /// IA32_DS_AREA: where the buffer is described.
    DsArea,
}

impl Msr {
    /// Returns the MSR at `address`, or `None` if no MSR of the PMU is there.
    pub const fn decode(address: u32) -> Option<Self> {
        const fn index(address: u32, first: u32, count: u8) -> Option<u8> {
            // An address below the block must not wrap into it.
            match address.checked_sub(first) {
                Some(n) if n < count as u32 => Some(n as u8),
                _ => None,
            }
        }
        // As long as any PMU's blocks are: a counter that this guest lacks is #GP, and no MSR of the VMM's.
        if let Some(n) = index(address, IA32_PERFEVTSEL0, MAX_GENERAL) {
            return Some(Self::PerfEvtSel(n));
        }
        if let Some(n) = index(address, IA32_PMC0, MAX_GENERAL) {
            return Some(Self::Pmc(n));
        }
        if let Some(n) = index(address, IA32_A_PMC0, MAX_GENERAL) {
            return Some(Self::FullWidthPmc(n));
        }
        if let Some(n) = index(address, IA32_FIXED_CTR0, MAX_FIXED) {
            return Some(Self::FixedCtr(n));
        }
        Some(match address {
            IA32_FIXED_CTR_CTRL => Self::FixedCtrCtrl,
            IA32_PERF_GLOBAL_STATUS => Self::GlobalStatus,
            IA32_PERF_GLOBAL_CTRL => Self::GlobalCtrl,
            IA32_PERF_GLOBAL_OVF_CTRL => Self::GlobalOvfCtrl,
            IA32_PERF_GLOBAL_STATUS_SET => Self::GlobalStatusSet,
            IA32_PERF_GLOBAL_INUSE => Self::GlobalInuse,
            IA32_PERF_CAPABILITIES => Self::PerfCapabilities,
            IA32_DEBUGCTL => Self::DebugCtl,
            IA32_PEBS_ENABLE => Self::PebsEnable,
            MSR_PEBS_DATA_CFG => Self::PebsDataCfg,
            IA32_DS_AREA => Self::DsArea,
            _ => return None,
        })
    }

    /// Returns the MSR's address. A number that no MSR has gives an address near those that exist.
    pub const fn address(self) -> u32 {
        match self {
            // Not checked: the number may be of a counter that no PMU has.
            Self::PerfEvtSel(n) => IA32_PERFEVTSEL0 + n as u32,
            Self::Pmc(n) => IA32_PMC0 + n as u32,
            Self::FullWidthPmc(n) => IA32_A_PMC0 + n as u32,
            Self::FixedCtr(n) => IA32_FIXED_CTR0 + n as u32,
            Self::FixedCtrCtrl => IA32_FIXED_CTR_CTRL,
            Self::GlobalStatus => IA32_PERF_GLOBAL_STATUS,
            Self::GlobalCtrl => IA32_PERF_GLOBAL_CTRL,
            Self::GlobalOvfCtrl => IA32_PERF_GLOBAL_OVF_CTRL,
            Self::GlobalStatusSet => IA32_PERF_GLOBAL_STATUS_SET,
            Self::GlobalInuse => IA32_PERF_GLOBAL_INUSE,
            Self::PerfCapabilities => IA32_PERF_CAPABILITIES,
            Self::DebugCtl => IA32_DEBUGCTL,
            Self::PebsEnable => IA32_PEBS_ENABLE,
            Self::PebsDataCfg => MSR_PEBS_DATA_CFG,
            Self::DsArea => IA32_DS_AREA,
        }
    }

    /// Returns whether the MSR exists only with [`pebs`](crate::x86::pebs).
    pub const fn is_of_pebs(self) -> bool {
        matches!(self, Self::PebsEnable | Self::PebsDataCfg | Self::DsArea)
    }

    /// Returns every MSR that can belong to a PMU: what an integration has to intercept. The MSRs
    /// [of PEBS](Self::is_of_pebs) exist only where PEBS is offered.
    pub fn all() -> impl Iterator<Item = Self> {
        let general = (0..MAX_GENERAL)
            .flat_map(|n| [Self::PerfEvtSel(n), Self::Pmc(n), Self::FullWidthPmc(n)]);
        let fixed = (0..MAX_FIXED).map(Self::FixedCtr);
        general.chain(fixed).chain([
            Self::FixedCtrCtrl,
            Self::GlobalStatus,
            Self::GlobalCtrl,
            Self::GlobalOvfCtrl,
            Self::GlobalStatusSet,
            Self::GlobalInuse,
            Self::PerfCapabilities,
            Self::DebugCtl,
            Self::PebsEnable,
            Self::PebsDataCfg,
            Self::DsArea,
        ])
    }
}

/// The SDM's name.
impl fmt::Display for Msr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::PerfEvtSel(n) => return write!(f, "IA32_PERFEVTSEL{n}"),
            Self::Pmc(n) => return write!(f, "IA32_PMC{n}"),
            Self::FullWidthPmc(n) => return write!(f, "IA32_A_PMC{n}"),
            Self::FixedCtr(n) => return write!(f, "IA32_FIXED_CTR{n}"),
            Self::FixedCtrCtrl => "IA32_FIXED_CTR_CTRL",
            Self::GlobalStatus => "IA32_PERF_GLOBAL_STATUS",
            Self::GlobalCtrl => "IA32_PERF_GLOBAL_CTRL",
            Self::GlobalOvfCtrl => "IA32_PERF_GLOBAL_OVF_CTRL",
            Self::GlobalStatusSet => "IA32_PERF_GLOBAL_STATUS_SET",
            Self::GlobalInuse => "IA32_PERF_GLOBAL_INUSE",
            Self::PerfCapabilities => "IA32_PERF_CAPABILITIES",
            Self::DebugCtl => "IA32_DEBUGCTL",
            Self::PebsEnable => "IA32_PEBS_ENABLE",
            Self::PebsDataCfg => "MSR_PEBS_DATA_CFG",
            Self::DsArea => "IA32_DS_AREA",
        };
        f.write_str(name)
    }
}

/// The fixed counter that `counter` of a [`CounterSet`](crate::counter::CounterSet) is; `None`: it
/// is a general one.
pub(super) const fn fixed_index(counter: Counter) -> Option<u8> {
    counter.number().checked_sub(FIXED)
}

/// Returns counters as the global registers show them: general ones from bit 0, fixed ones from bit 32.
pub(in crate::x86) const fn to_global(counters: CounterSet) -> u64 {
    let bits = counters.bits();
    (bits & 0xffff) as u64 | ((bits >> FIXED) as u64) << 32
}

/// The other way round. Bits that are no counter's are dropped.
pub(super) const fn from_global(bits: u64) -> CounterSet {
    CounterSet::from_bits(bits as u32 & 0xffff | ((bits >> 32) as u32 & 0xffff) << FIXED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_are_each_others_inverse() {
        for msr in Msr::all() {
            assert_eq!(Msr::decode(msr.address()), Some(msr));
        }
        let decoded = (0..0x2000).filter_map(Msr::decode).count();
        assert_eq!(decoded, Msr::all().count(), "nothing else is taken");
    }

    #[test]
    fn the_neighbours_are_left_alone() {
        for address in [
            0xc0,
            0xc9,
            0x185,
            0x18e,
            0x198,
            0x308,
            0x310,
            0x38c,
            0x393,
            0x3f0,
            0x3f3,
            0x3f6,
            0x4c0,
            0x4c9,
            0x5ff,
            0x601,
            u32::MAX,
        ] {
            assert_eq!(Msr::decode(address), None, "{address:#x}");
        }
    }

    #[test]
    fn counters_have_their_places_in_the_global_registers() {
        let some = CounterSet::from_bits(1 << 3 | 1 << (FIXED + 2));
        assert_eq!(to_global(some), 1 << 3 | 1 << 34);
        assert_eq!(from_global(1 << 3 | 1 << 34 | 1 << 59 | 1 << 20), some);
    }
}
