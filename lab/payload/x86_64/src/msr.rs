//! The MSRs of the PMU as CPUID describes them: the existing ones, their values
//! out of reset, and their writable bits. SDM vol. 4, table 2-2; vol. 3B, 20.2.
//!
//! This table follows the manual, not the engine, because it tests the engine.
//! Host tests compare the two.

/// IA32_PMC0.
pub const PMC: u32 = 0xc1;
/// IA32_PERFEVTSEL0.
pub const PERFEVTSEL: u32 = 0x186;
/// IA32_DEBUGCTL.
pub const DEBUGCTL: u32 = 0x1d9;
/// IA32_FIXED_CTR0.
pub const FIXED_CTR: u32 = 0x309;
/// IA32_PERF_CAPABILITIES.
pub const PERF_CAPABILITIES: u32 = 0x345;
/// IA32_FIXED_CTR_CTRL.
pub const FIXED_CTR_CTRL: u32 = 0x38d;
/// IA32_PERF_GLOBAL_STATUS.
pub const GLOBAL_STATUS: u32 = 0x38e;
/// IA32_PERF_GLOBAL_CTRL.
pub const GLOBAL_CTRL: u32 = 0x38f;
/// IA32_PERF_GLOBAL_OVF_CTRL.
pub const GLOBAL_OVF_CTRL: u32 = 0x390;
/// IA32_PERF_GLOBAL_STATUS_SET.
pub const GLOBAL_STATUS_SET: u32 = 0x391;
/// IA32_PERF_GLOBAL_INUSE.
pub const GLOBAL_INUSE: u32 = 0x392;
/// IA32_PEBS_ENABLE.
pub const PEBS_ENABLE: u32 = 0x3f1;
/// MSR_PEBS_DATA_CFG.
pub const PEBS_DATA_CFG: u32 = 0x3f2;
/// IA32_A_PMC0.
pub const A_PMC: u32 = 0x4c1;
/// IA32_DS_AREA.
pub const DS_AREA: u32 = 0x600;

/// General counters that have addresses, in any version.
pub const GENERAL_ADDRESSES: u32 = 8;
/// Fixed counters that have addresses, in any version.
pub const FIXED_ADDRESSES: u32 = 7;

/// IA32_PERF_CAPABILITIES.FW_WRITE.
pub const FW_WRITE: u64 = 1 << 13;
/// IA32_PERF_CAPABILITIES.PEBS_BASELINE.
const PEBS_BASELINE: u64 = 1 << 14;
/// Adaptive_Record of IA32_PERFEVTSELx.
pub const ADAPTIVE: u64 = 1 << 34;
/// IA32_DEBUGCTL.LBR and BTF: bits of the same register that are not the PMU's, and that KVM refuses
/// nobody.
const LBR_AND_BTF: u64 = 0b11;
/// IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI.
pub const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;

/// CTR_FRZ of IA32_PERF_GLOBAL_STATUS and its companions: a PMI has stopped all counters (vol. 3B, 20.2.4.1).
pub const CTR_FRZ: u64 = 1 << 59;

/// The PMU's description in CPUID and IA32_PERF_CAPABILITIES.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capability {
    /// CPUID.0AH:EAX\[7:0\].
    pub version: u32,
    /// General counters.
    pub general: u32,
    /// Width of the general counters in bits.
    pub general_width: u32,
    /// Fixed counters, bit n for counter n.
    pub fixed: u32,
    /// Width of the fixed counters in bits.
    pub fixed_width: u32,
    /// Architectural events that general counters count: bit n is clear in
    /// CPUID.0AH:EBX, and EAX\[31:24\] says that the bit has a meaning.
    pub events: u32,
    /// CPUID.01H:ECX.PDCM.
    pub pdcm: bool,
    /// IA32_PERF_CAPABILITIES, 0 without PDCM.
    pub perf_capabilities: u64,
}

impl Capability {
    /// Makes the description from CPUID leaf 0AH (EAX, EBX, ECX, EDX), PDCM and
    /// IA32_PERF_CAPABILITIES. SDM vol. 2A, CPUID; vol. 3B, 20.2.
    pub const fn new([eax, ebx, ecx, edx]: [u32; 4], pdcm: bool, perf_capabilities: u64) -> Self {
        let version = eax & 0xff;
        let known = (1_u64 << (eax >> 24)) as u32;
        let mut fixed = (1 << (edx & 0x1f)) - 1;
        if version >= 5 {
            fixed |= ecx;
        }
        Self {
            version,
            general: eax >> 8 & 0xff,
            general_width: eax >> 16 & 0xff,
            fixed,
            fixed_width: edx >> 5 & 0xff,
            events: !ebx & known.wrapping_sub(1),
            pdcm,
            perf_capabilities,
        }
    }

    /// Returns whether general counters have aliases that take their whole
    /// width.
    pub const fn full_width(&self) -> bool {
        self.perf_capabilities & FW_WRITE != 0
    }

    /// Returns whether every counter can write records (vol. 3B, 20.9).
    pub const fn has_pebs(&self) -> bool {
        self.perf_capabilities & PEBS_BASELINE != 0
    }

    /// Returns the bits that a general counter has.
    pub const fn general_mask(&self) -> u64 {
        (1 << self.general_width) - 1
    }

    /// Returns the bits that a fixed counter has.
    pub const fn fixed_mask(&self) -> u64 {
        (1 << self.fixed_width) - 1
    }

    /// Returns every counter's bit in IA32_PERF_GLOBAL_CTRL and _STATUS.
    pub const fn counters(&self) -> u64 {
        ((1 << self.general) - 1) | (self.fixed as u64) << 32
    }

    const fn has_any_thread(&self) -> bool {
        self.version == 3 || self.version == 4
    }

    fn fixed_ctr_ctrl(&self) -> u64 {
        let adaptive = u64::from(self.has_pebs()) << 32;
        let field = adaptive | if self.has_any_thread() { 0xf } else { 0xb };
        (0..FIXED_ADDRESSES)
            .filter(|n| self.fixed >> n & 1 != 0)
            .fold(0, |bits, n| bits | field << (4 * n))
    }
}

/// The behaviour of one MSR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// The MSR's address.
    pub address: u32,
    /// The MSR's name, without "IA32_".
    pub name: &'static str,
    /// The number of its counter, where there are several.
    pub index: u32,
    /// The value out of reset; `None`: reading the MSR is #GP.
    pub reset: Option<u64>,
    /// Bits that can be written; `None`: any write is #GP.
    pub writable: Option<u64>,
    /// Whether a read returns what was written while nothing counts.
    pub keeps: bool,
}

impl Row {
    /// Returns whether a write of `value` is #GP.
    pub const fn refuses(&self, value: u64) -> bool {
        match self.writable {
            Some(writable) => value & !writable != 0,
            None => true,
        }
    }
}

/// Returns every address that a PMU of any version may have, as a PMU with
/// `capability` has it.
pub fn rows(capability: Capability) -> impl Iterator<Item = Row> {
    let c = capability;
    let select = if c.has_any_thread() {
        0xffff_ffff
    } else {
        0xffdf_ffff
    };
    let select = select | if c.has_pebs() { ADAPTIVE } else { 0 };
    let general = (0..GENERAL_ADDRESSES).flat_map(move |n| {
        let exists = n < c.general;
        let row = |address, name| Row {
            address: address + n,
            name,
            index: n,
            reset: exists.then_some(0),
            writable: None,
            keeps: true,
        };
        [
            Row {
                writable: exists.then_some(select),
                ..row(PERFEVTSEL, "PERFEVTSEL")
            },
            // The MSR ignores the upper half of a written value.
            Row {
                writable: exists.then_some(!0),
                keeps: false,
                ..row(PMC, "PMC")
            },
            Row {
                reset: (exists && c.full_width()).then_some(0),
                writable: (exists && c.full_width()).then_some(c.general_mask()),
                ..row(A_PMC, "A_PMC")
            },
        ]
    });
    let fixed = (0..FIXED_ADDRESSES).map(move |n| {
        let exists = c.fixed >> n & 1 != 0;
        Row {
            address: FIXED_CTR + n,
            name: "FIXED_CTR",
            index: n,
            reset: exists.then_some(0),
            writable: exists.then_some(c.fixed_mask()),
            keeps: true,
        }
    });
    // Without PEBS, these MSRs do not belong to the PMU, whoever answers for
    // them.
    let pebs = pebs(c).into_iter().filter(move |_| c.has_pebs());
    general.chain(fixed).chain(single(c)).chain(pebs)
}

/// Returns the MSRs of a PMU whose counters write records: vol. 3B, 20.9.
fn pebs(c: Capability) -> [Row; 3] {
    let row = |address, name, writable| Row {
        address,
        name,
        index: 0,
        reset: Some(0),
        writable: Some(writable),
        keeps: true,
    };
    [
        row(PEBS_ENABLE, "PEBS_ENABLE", c.counters()),
        // The groups are memory, general registers, XMM and last branches, of
        // which a record has up to 32.
        row(PEBS_DATA_CFG, "PEBS_DATA_CFG", 0x1f00_000f),
        // These are the canonical addresses of a lower half.
        row(DS_AREA, "DS_AREA", (1 << 47) - 1),
    ]
}

/// Returns the MSRs that exist once.
fn single(c: Capability) -> [Row; 8] {
    let v4 = c.version >= 4;
    // The other bit is LBR_FRZ. Without LBR nothing sets it.
    let freeze = if v4 { CTR_FRZ | 1 << 58 } else { 0 };
    let row = |address, name, reset, writable| Row {
        address,
        name,
        index: 0,
        reset,
        writable,
        keeps: true,
    };
    let reads_zero = |row| Row {
        keeps: false,
        ..row
    };
    [
        row(
            FIXED_CTR_CTRL,
            "FIXED_CTR_CTRL",
            Some(0),
            Some(c.fixed_ctr_ctrl()),
        ),
        row(GLOBAL_STATUS, "PERF_GLOBAL_STATUS", Some(0), None),
        // Vol. 3A, table 10-1: general counters are enabled out of reset.
        row(
            GLOBAL_CTRL,
            "PERF_GLOBAL_CTRL",
            Some((1 << c.general) - 1),
            Some(c.counters()),
        ),
        // Any version can clear OvfBuf and CondChgd.
        reads_zero(row(
            GLOBAL_OVF_CTRL,
            "PERF_GLOBAL_OVF_CTRL",
            Some(0),
            Some(c.counters() | freeze | 0b11 << 62),
        )),
        reads_zero(row(
            GLOBAL_STATUS_SET,
            "PERF_GLOBAL_STATUS_SET",
            v4.then_some(0),
            v4.then_some(c.counters() | CTR_FRZ | 1 << 62),
        )),
        row(GLOBAL_INUSE, "PERF_GLOBAL_INUSE", v4.then_some(0), None),
        row(
            PERF_CAPABILITIES,
            "PERF_CAPABILITIES",
            c.pdcm.then_some(c.perf_capabilities),
            None,
        ),
        row(
            DEBUGCTL,
            "DEBUGCTL",
            Some(0),
            Some(LBR_AND_BTF | FREEZE_PERFMON_ON_PMI),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::x86::intel;
    use vpmu::x86::intel::{Msr, Version};

    fn engine(version: Version, pebs: bool) -> (intel::Capability, Capability) {
        let theirs = intel::Capability {
            fixed: if version == Version::V5 {
                0b1101
            } else {
                0b111
            },
            events: 0b101,
            other_debugctl: LBR_AND_BTF,
            pebs: pebs.then(Default::default),
            ..intel::Capability::new(version)
        };
        let leaf = theirs.leaf_0a();
        let ours = Capability::new(
            [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx],
            theirs.leaf_01_ecx() >> 15 & 1 != 0,
            theirs.perf_capabilities(),
        );
        (theirs, ours)
    }

    const VERSIONS: [Version; 4] = [Version::V2, Version::V3, Version::V4, Version::V5];

    #[test]
    fn cpuid_is_read_as_the_engine_means_it() {
        for version in VERSIONS {
            let (theirs, ours) = engine(version, true);
            assert!(ours.has_pebs());
            assert_eq!(ours.version, u32::from(version.number()));
            assert_eq!(ours.general, theirs.general.into());
            assert_eq!(ours.general_width, theirs.general_width.into());
            assert_eq!(ours.fixed, theirs.fixed);
            assert_eq!(ours.fixed_width, theirs.fixed_width.into());
            assert_eq!(ours.events, theirs.events);
            assert!(ours.full_width() && ours.pdcm);
        }
    }

    #[test]
    fn every_msr_of_the_engine_has_a_row_with_the_same_reserved_bits() {
        let offers = VERSIONS.map(|version| [(version, false), (version, true)]);
        for (version, pebs) in offers.into_iter().flatten() {
            let (theirs, ours) = engine(version, pebs);
            let all = Msr::all().filter(|msr| pebs || !msr.is_of_pebs());
            assert_eq!(rows(ours).count(), all.count());
            for row in rows(ours) {
                let msr = Msr::decode(row.address).expect("an MSR of the PMU");
                let context = format!("{version:?} {msr}");
                let (_, name) = context.rsplit_once(' ').expect("two words");
                let (_, name) = name.split_once('_').expect("IA32_ or MSR_");
                assert!(name.starts_with(row.name), "{context}");
                let general = |n| u32::from(n) < ours.general;
                let (exists, writable) = match msr {
                    Msr::PerfEvtSel(n) => (general(n), Some(!theirs.reserved().perfevtsel)),
                    Msr::Pmc(n) => (general(n), Some(!0)),
                    Msr::FullWidthPmc(n) => (general(n), Some((1 << theirs.general_width) - 1)),
                    Msr::FixedCtr(n) => {
                        let exists = theirs.fixed >> n & 1 != 0;
                        (exists, Some((1 << theirs.fixed_width) - 1))
                    }
                    Msr::FixedCtrCtrl => (true, Some(!theirs.reserved().fixed_ctrl)),
                    Msr::GlobalCtrl => (true, Some(!theirs.reserved().global_ctrl)),
                    Msr::GlobalOvfCtrl => (true, Some(!theirs.reserved().ovf_ctrl)),
                    Msr::GlobalStatusSet => {
                        (ours.version >= 4, Some(!theirs.reserved().status_set))
                    }
                    Msr::DebugCtl => (true, Some(!theirs.reserved().debugctl)),
                    Msr::GlobalStatus | Msr::PerfCapabilities => (true, None),
                    Msr::GlobalInuse => (ours.version >= 4, None),
                    Msr::PebsEnable => (true, Some(ours.counters())),
                    Msr::PebsDataCfg => {
                        let pebs = theirs.pebs.expect("it is offered");
                        (true, Some(!pebs.data_cfg_reserved()))
                    }
                    Msr::DsArea => (true, Some(!0 >> 17)),
                };
                assert_eq!(row.reset.is_some(), exists, "{context}");
                assert_eq!(row.writable, writable.filter(|_| exists), "{context}");
            }
        }
    }

    #[test]
    fn refusals() {
        let (_, ours) = engine(Version::V2, false);
        let row = |address| rows(ours).find(|row| row.address == address).unwrap();
        assert!(row(GLOBAL_CTRL).refuses(1 << 4));
        assert!(!row(GLOBAL_CTRL).refuses(0x7_0000_000f));
        assert!(row(GLOBAL_STATUS).refuses(0));
        assert!(row(PERFEVTSEL + 4).refuses(0));
    }
}
