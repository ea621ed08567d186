//! The MSRs of the PMU by name: the PPRs' lists of MSRs; APM vol. 2, appendix A.

use super::MAX_COUNTERS;
use crate::x86::msr::msrs;

const LEGACY: u8 = 4;

msrs! {
    /// An MSR that belongs to the PMU. The number of one that is there several times may be of a counter that does
    /// not exist. The old names reach the same counters on every interface.
    Msr
    [each]
    // Four controls, then four counters: the pairs came with the core extension.
    /// PERF_LEGACY_CTL: another name of [`Ctl`](Self::Ctl) 0 to 3.
    LegacyCtl = "PERF_LEGACY_CTL", 0xc001_0000 + 1 * LEGACY;
    /// PERF_LEGACY_CTR: another name of [`Ctr`](Self::Ctr) 0 to 3.
    LegacyCtr = "PERF_LEGACY_CTR", 0xc001_0004 + 1 * LEGACY;
    /// PERF_CTL: what a counter counts. From the core extension on.
    Ctl = "PERF_CTL", 0xc001_0200 + 2 * MAX_COUNTERS;
    /// PERF_CTR: a counter. From the core extension on.
    Ctr = "PERF_CTR", 0xc001_0201 + 2 * MAX_COUNTERS;
    [single]
    /// PerfCntrGlobalStatus: who has overflowed. PerfMonV2, as all that follow.
    GlobalStatus = "PerfCntrGlobalStatus", 0xc000_0300;
    /// PerfCntrGlobalCtl: who may count.
    GlobalCtl = "PerfCntrGlobalCtl", 0xc000_0301;
    /// PerfCntrGlobalStatusClr: clears bits of PerfCntrGlobalStatus.
    GlobalStatusClr = "PerfCntrGlobalStatusClr", 0xc000_0302;
    /// PerfCntrGlobalStatusSet: sets bits of PerfCntrGlobalStatus.
    GlobalStatusSet = "PerfCntrGlobalStatusSet", 0xc000_0303;
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
