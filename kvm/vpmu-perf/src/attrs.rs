//! The table of what is opened for a guest's event on a host's processor.
//!
//! Linux's generic events are not what their names say on every processor, so each row names the line that it rests on:
//! `intel_perfmon_event_map` (arch/x86/events/intel/core.c), `amd_perfmon_event_map`, `amd_zen1_perfmon_event_map` and
//! their successors (arch/x86/events/amd/core.c), all of Linux 6.12; the SDM (vol. 3B, table 20-1); AMD's BKDGs up to
//! family 16h, and the PPRs since. What has no row is opened by its number, if guest and host are of one vendor, or not
//! at all.

use std::ops::RangeInclusive;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_HW_REF_CPU_CYCLES, PERF_TYPE_HARDWARE, PERF_TYPE_RAW,
};
use vpmu::x86::ArchEvent;

use crate::processor::{P0_CYCLES, Processor, Vendor};

/// One row: an event, the vendor and the families of processors, and the type and the configuration of the perf event that
/// counts it there. No vendor: every one.
type Row = (ArchEvent, Option<Vendor>, RangeInclusive<u8>, (u32, u64));

const fn generic(number: u32) -> (u32, u64) {
    (PERF_TYPE_HARDWARE, number as u64)
}

const fn numbered(config: u64) -> (u32, u64) {
    (PERF_TYPE_RAW, config)
}

const EVERY: RangeInclusive<u8> = 0..=0xff;
/// K8 to Jaguar: `amd_perfmon_event_map` ("K7 and later, up to and including Family 16h").
const BEFORE_ZEN: RangeInclusive<u8> = 0..=0x16;
/// Zen and its successors, and Hygon's (18h).
const ZEN: RangeInclusive<u8> = 0x17..=0xff;

/// The table. Of the rows for an event, the first that the processor fits holds.
#[rustfmt::skip]
const ROWS: &[Row] = {
    use ArchEvent::*;
    const INTEL: Option<Vendor> = Some(Vendor::Intel);
    const AMD: Option<Vendor> = Some(Vendor::Amd);
    &[
        // Intel 0x003c, AMD 0x0076 in each map.
        (CoreCycles, None, EVERY, generic(PERF_COUNT_HW_CPU_CYCLES)),
        // 0x00c0 in all maps.
        (Instructions, None, EVERY, generic(PERF_COUNT_HW_INSTRUCTIONS)),
        // Intel 0x00c4 and 0x00c5, AMD 0x00c2 and 0x00c3 in each map.
        (Branches, None, EVERY, generic(PERF_COUNT_HW_BRANCH_INSTRUCTIONS)),
        (BranchMisses, None, EVERY, generic(PERF_COUNT_HW_BRANCH_MISSES)),
        // AMD's core counters see no cache behind the L2, so there Linux counts the L2's requests and misses, and a guest
        // has what the host's own `perf` shows. By number: a kernel that does not know the family has the map of those up
        // to 16h, where these are other events.
        (LlcReferences, AMD, BEFORE_ZEN, numbered(0x077d)),
        (LlcMisses, AMD, BEFORE_ZEN, numbered(0x077e)),
        (LlcReferences, AMD, ZEN, numbered(0xff60)),
        (LlcMisses, AMD, ZEN, numbered(0x0964)),
        // Intel 0x4f2e and 0x412e.
        (LlcReferences, None, EVERY, generic(PERF_COUNT_HW_CACHE_REFERENCES)),
        (LlcMisses, None, EVERY, generic(PERF_COUNT_HW_CACHE_MISSES)),
        // 0x0300 in Intel's map: a pseudo event of fixed counter 2, which counts at the TSC's rate.
        (TscCycles, INTEL, EVERY, generic(PERF_COUNT_HW_REF_CPU_CYCLES)),
        // By number: Linux calls 0x013c BUS_CYCLES, and its REF_CPU_CYCLES is the one above.
        (ReferenceCycles, INTEL, EVERY, numbered(0x013c)),
        // REF_CPU_CYCLES of `amd_zen4_perfmon_event_map` (Linux 6.10), by number, as earlier kernels and families have no
        // name for it. P-state 0 is the TSC's rate, so both are one event. Families up to 16h have none like that.
        (TscCycles, AMD, ZEN, numbered(P0_CYCLES)),
        (ReferenceCycles, AMD, ZEN, numbered(P0_CYCLES)),
        // No row for TopdownSlots: Linux counts these in a group of their own (perf's `slots`), and AMD's have none.
    ]
};

/// Returns the type and the configuration of a perf event that counts `event` on `host`.
pub(crate) fn architectural(event: ArchEvent, host: Processor) -> Option<(u32, u64)> {
    let fits = |(counted, vendor, families, _): &&Row| {
        *counted == event
            && vendor.is_none_or(|vendor| vendor == host.vendor)
            && families.contains(&host.family)
    };
    let &(.., (type_, config)) = ROWS.iter().find(fits)?;
    let is_there = config != P0_CYCLES || host.has_p0_cycles;
    is_there.then_some((type_, config))
}

/// Returns the type and the configuration of a perf event that counts the raw event of a guest of `vendor` on `host`.
pub(crate) fn raw(vendor: Vendor, config: u64, host: Processor) -> Option<(u32, u64)> {
    // Each of these counts what a further register says, which the guest does not have: OFFCORE_RSP_0 and 1 (0xb7 and
    // 0xbb, 0x2a and 0x2b from Golden Cove on), PEBS_LD_LAT (0xcd), PEBS_FRONTEND (the rest). Linux asks for `config1`
    // (intel_skl_extra_regs, intel_glc_extra_regs, intel_rwc_extra_regs, intel_lnc_extra_regs). Other processors hardly
    // have them.
    #[rustfmt::skip]
    const WITH_REGISTER: [u64; 10] = [
        0x01b7, 0x01bb, 0x012a, 0x012b, 0x01cd, 0x01c6, 0x02c6, 0x03c6, 0x40ad, 0x04c2,
    ];
    // Merge pairs an odd counter with the one below (PPR, PERF_CTL). Linux has none for an event by itself.
    const MERGE: u64 = 0xf_0000_00ff;
    // Up to family 16h these selects are the northbridge's, which counts for all cores of the package, whatever the rings
    // and GuestOnly say (amd_is_nb_event): a guest would see its neighbours.
    const NORTHBRIDGE: u64 = 0xe0;
    // The same number is another event on another maker's processors.
    if vendor != host.vendor {
        return None;
    }
    let known = match vendor {
        Vendor::Intel => !WITH_REGISTER.contains(&(config & 0xffff)),
        Vendor::Amd if BEFORE_ZEN.contains(&host.family) => config & NORTHBRIDGE != NORTHBRIDGE,
        Vendor::Amd => config & MERGE != MERGE,
        Vendor::Other => false,
    };
    known.then_some(numbered(config))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Linux 6.12's generic events, in the order of their numbers from 0: cycles, instructions, cache references, cache
    /// misses, branches, branch misses, bus cycles, stalls (two), reference cycles. 0: none, which perf refuses.
    type Map = [u64; 10];

    /// `intel_perfmon_event_map`, arch/x86/events/intel/core.c.
    const INTEL: Map = [
        0x003c, 0x00c0, 0x4f2e, 0x412e, 0x00c4, 0x00c5, 0x013c, 0, 0, 0x0300,
    ];

    /// `amd_pmu_event_map`, arch/x86/events/amd/core.c.
    fn amd_map(family: u8, zen4: bool) -> Map {
        match family {
            // amd_perfmon_event_map
            0..=0x16 => [
                0x0076, 0x00c0, 0x077d, 0x077e, 0x00c2, 0x00c3, 0, 0x00d0, 0x00d1, 0,
            ],
            // amd_zen4_perfmon_event_map
            _ if zen4 || family >= 0x1a => [
                0x0076,
                0x00c0,
                0xff60,
                0x0964,
                0x00c2,
                0x00c3,
                0,
                0x00a9,
                0,
                0x1_0000_0120,
            ],
            // amd_zen2_perfmon_event_map
            0x19 => [
                0x0076, 0x00c0, 0xff60, 0x0964, 0x00c2, 0x00c3, 0, 0x00a9, 0, 0,
            ],
            // amd_zen1_perfmon_event_map
            _ => [
                0x0076, 0x00c0, 0xff60, 0x0964, 0x00c2, 0x00c3, 0, 0x0287, 0x0187, 0,
            ],
        }
    }

    /// Returns the number that the processor's register gets for an event, if the kernel with this map opens it.
    fn programmed(event: ArchEvent, host: Processor, map: Map) -> Option<u64> {
        let (type_, config) = architectural(event, host)?;
        match type_ {
            PERF_TYPE_HARDWARE => Some(map[config as usize]).filter(|&number| number != 0),
            PERF_TYPE_RAW => Some(config),
            other => panic!("{event:?}: {other}"),
        }
    }

    const fn amd(family: u8, has_p0_cycles: bool) -> Processor {
        Processor {
            vendor: Vendor::Amd,
            family,
            has_p0_cycles,
        }
    }

    const fn of(vendor: Vendor) -> Processor {
        Processor {
            vendor,
            family: 6,
            has_p0_cycles: false,
        }
    }

    /// What the manuals say that each event's number is, not what the table says.
    #[test]
    fn each_family_of_amds_gets_its_own_numbers() {
        for family in 0x0f..=0x1a {
            for (zen4, counts_p0) in [(false, false), (false, true), (true, true)] {
                let (host, map) = (amd(family, counts_p0), amd_map(family, zen4));
                let zen = family >= 0x17;
                let p0 = (zen && counts_p0).then_some(0x1_0000_0120);
                for (event, expected) in [
                    (ArchEvent::CoreCycles, Some(0x0076)),
                    (ArchEvent::Instructions, Some(0x00c0)),
                    (ArchEvent::Branches, Some(0x00c2)),
                    (ArchEvent::BranchMisses, Some(0x00c3)),
                    (
                        ArchEvent::LlcReferences,
                        Some(if zen { 0xff60 } else { 0x077d }),
                    ),
                    (
                        ArchEvent::LlcMisses,
                        Some(if zen { 0x0964 } else { 0x077e }),
                    ),
                    (ArchEvent::ReferenceCycles, p0),
                    (ArchEvent::TscCycles, p0),
                    (ArchEvent::TopdownSlots, None),
                ] {
                    let found = programmed(event, host, map);
                    assert_eq!(found, expected, "{event:?} on family {family:#x}");
                }
            }
        }
    }

    #[test]
    fn a_kernel_that_does_not_know_the_family_counts_the_same() {
        // A family that the kernel does not know has the map of those up to 16h; on Zen 0x077d is no request to the L2.
        let old = amd_map(0x10, false);
        let host = amd(0x17, false);
        let caches = [ArchEvent::LlcReferences, ArchEvent::LlcMisses];
        assert_eq!(
            caches.map(|event| programmed(event, host, old)),
            [Some(0xff60), Some(0x0964)]
        );
    }

    #[test]
    fn intels_reference_cycles_are_not_those_of_the_tsc() {
        let host = of(Vendor::Intel);
        for (event, expected) in [
            (ArchEvent::CoreCycles, Some(0x003c)),
            (ArchEvent::Instructions, Some(0x00c0)),
            (ArchEvent::ReferenceCycles, Some(0x013c)),
            (ArchEvent::LlcReferences, Some(0x4f2e)),
            (ArchEvent::LlcMisses, Some(0x412e)),
            (ArchEvent::Branches, Some(0x00c4)),
            (ArchEvent::BranchMisses, Some(0x00c5)),
            (ArchEvent::TscCycles, Some(0x0300)),
            (ArchEvent::TopdownSlots, None),
        ] {
            assert_eq!(programmed(event, host, INTEL), expected, "{event:?}");
        }
    }

    #[test]
    fn another_makers_processor_has_only_generic_events() {
        let host = of(Vendor::Other);
        let cycles = architectural(ArchEvent::CoreCycles, host);
        assert_eq!(cycles, Some(generic(PERF_COUNT_HW_CPU_CYCLES)));
        for event in [ArchEvent::ReferenceCycles, ArchEvent::TscCycles] {
            assert_eq!(architectural(event, host), None);
        }
        assert_eq!(raw(Vendor::Other, 0xc0, host), None);
    }

    #[test]
    fn an_event_that_needs_another_register_is_not_offered() {
        let intel = |config| raw(Vendor::Intel, config, of(Vendor::Intel));
        assert_eq!(intel(0x01b7), None);
        assert_eq!(intel(0x41_01bb), None, "with an edge, too");
        assert_eq!(intel(0x012a), None, "Golden Cove's");
        assert_eq!(intel(0x02b7), Some((PERF_TYPE_RAW, 0x02b7)));
        let zen = |config| raw(Vendor::Amd, config, amd(0x17, true));
        assert_eq!(zen(0xf_0000_00ff), None);
        assert_eq!(zen(0x01b7), Some((PERF_TYPE_RAW, 0x01b7)));
        assert_eq!(raw(Vendor::Intel, 0xc0, amd(0x17, true)), None);
    }

    #[test]
    fn a_guest_does_not_count_its_neighbours_at_the_northbridge() {
        // 0x4e0: DRAM accesses; 0x0e1 of family 10h; 0x1f0 of 15h, which the kernel's constraints refuse as well.
        for config in [0x07e0, 0x00e1, 0x1_0000_00f0] {
            for family in [0x0f, 0x10, 0x14, 0x15, 0x16] {
                assert_eq!(raw(Vendor::Amd, config, amd(family, false)), None);
            }
        }
        let cycles = raw(Vendor::Amd, 0x76, amd(0x10, false));
        assert_eq!(cycles, Some((PERF_TYPE_RAW, 0x76)));
    }
}
