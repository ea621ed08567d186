//! The MSRs of the PMU by name. SDM vol. 4, table 2-2 ("IA-32 Architectural MSRs").

use crate::counter::{Counter, CounterSet};
use crate::x86::msr::msrs;

/// No PMU here has more general counters: the MSRs IA32_PMC0 to IA32_PMC7 and their aliases are
/// architectural.
pub const MAX_GENERAL: u8 = 8;

/// No PMU here has more fixed counters: 0 to 6 have a meaning.
pub const MAX_FIXED: u8 = 7;

/// The number that fixed counter 0 has in [`CounterSet`](crate::counter::CounterSet)s and for a host; the others follow.
/// General counters begin at 0.
// The middle of a set of 32, so that a conversion from the global registers is a shift.
pub const FIXED: u8 = 16;

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

msrs! {
    /// An MSR that belongs to the PMU. The index in a register's number may name a counter that does not exist. Those
    /// [of PEBS](Self::is_of_pebs) exist only where PEBS is offered.
    Msr
    [each]
    /// IA32_PERFEVTSELx: what general counter x counts.
    PerfEvtSel = "IA32_PERFEVTSEL", 0x186 + 1 * MAX_GENERAL;
    /// IA32_PMCx: general counter x. Writes have 32 bits, and bit 31 is extended.
    Pmc = "IA32_PMC", 0xc1 + 1 * MAX_GENERAL;
    /// IA32_A_PMCx: general counter x. Writes have the counter's width.
    FullWidthPmc = "IA32_A_PMC", 0x4c1 + 1 * MAX_GENERAL;
    /// IA32_FIXED_CTRx: fixed counter x.
    FixedCtr = "IA32_FIXED_CTR", 0x309 + 1 * MAX_FIXED;
    [single]
    /// IA32_FIXED_CTR_CTRL: four bits for each fixed counter.
    FixedCtrCtrl = "IA32_FIXED_CTR_CTRL", 0x38d;
    /// IA32_PERF_GLOBAL_STATUS: who has overflowed.
    GlobalStatus = "IA32_PERF_GLOBAL_STATUS", 0x38e;
    /// IA32_PERF_GLOBAL_CTRL: who may count.
    GlobalCtrl = "IA32_PERF_GLOBAL_CTRL", 0x38f;
    /// IA32_PERF_GLOBAL_OVF_CTRL, from version 4 on IA32_PERF_GLOBAL_STATUS_RESET: clears bits of
    /// IA32_PERF_GLOBAL_STATUS.
    GlobalOvfCtrl = "IA32_PERF_GLOBAL_OVF_CTRL", 0x390;
    /// IA32_PERF_GLOBAL_STATUS_SET: sets bits of IA32_PERF_GLOBAL_STATUS. From version 4 on.
    GlobalStatusSet = "IA32_PERF_GLOBAL_STATUS_SET", 0x391;
    /// IA32_PERF_GLOBAL_INUSE: which counters are configured. From version 4 on.
    GlobalInuse = "IA32_PERF_GLOBAL_INUSE", 0x392;
    /// IA32_PERF_CAPABILITIES.
    PerfCapabilities = "IA32_PERF_CAPABILITIES", 0x345;
    /// IA32_DEBUGCTL, which the PMU shares with the debug facilities.
    DebugCtl = "IA32_DEBUGCTL", 0x1d9;
    /// IA32_PEBS_ENABLE: whose overflows write records.
    PebsEnable = "IA32_PEBS_ENABLE", 0x3f1;
    /// MSR_PEBS_DATA_CFG: what is in an adaptive record.
    PebsDataCfg = "MSR_PEBS_DATA_CFG", 0x3f2;
    /// IA32_DS_AREA: where the buffer is described.
    DsArea = "IA32_DS_AREA", 0x600;
}

impl Msr {
    /// Returns whether the MSR exists only with [`pebs`](crate::x86::pebs).
    pub const fn is_of_pebs(self) -> bool {
        matches!(self, Self::PebsEnable | Self::PebsDataCfg | Self::DsArea)
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
