//! The table of what is opened for a guest's event on a host's processor.
//!
//! Linux's generic events are not what their names say on every processor, so each row names what it rests on: Intel's
//! `intel_perfmon_event_map` (arch/x86/events/intel/core.c) and AMD's `amd_zen4_perfmon_event_map` and its elders
//! (arch/x86/events/amd/core.c), both of Linux 6.12, the SDM (vol. 3B, table 20-1) and the PPRs. What has no row is
//! opened by its number, if guest and host are of one vendor, or not at all.

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_CACHE_MISSES,
    PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS,
    PERF_COUNT_HW_REF_CPU_CYCLES, PERF_TYPE_HARDWARE, PERF_TYPE_RAW,
};
use vpmu::x86::ArchEvent;

use crate::choose::Vendor;

/// Returns the type and the configuration of a perf event that counts `event` on a processor of `host`.
pub(crate) fn architectural(event: ArchEvent, host: Vendor) -> Option<(u32, u64)> {
    let generic = |number: u32| Some((PERF_TYPE_HARDWARE, u64::from(number)));
    match event {
        ArchEvent::CoreCycles => generic(PERF_COUNT_HW_CPU_CYCLES),
        ArchEvent::Instructions => generic(PERF_COUNT_HW_INSTRUCTIONS),
        ArchEvent::LlcReferences => generic(PERF_COUNT_HW_CACHE_REFERENCES),
        ArchEvent::LlcMisses => generic(PERF_COUNT_HW_CACHE_MISSES),
        ArchEvent::Branches => generic(PERF_COUNT_HW_BRANCH_INSTRUCTIONS),
        ArchEvent::BranchMisses => generic(PERF_COUNT_HW_BRANCH_MISSES),
        // Intel's map has 0x0300, a pseudo event of fixed counter 2. Only there do they mean the same.
        ArchEvent::TscCycles => generic(PERF_COUNT_HW_REF_CPU_CYCLES),
        // By number. Linux calls Intel's 0x013c BUS_CYCLES, and its REF_CPU_CYCLES is the one above. AMD's map has
        // 0x100000120 since Zen 4; earlier families have the event too, under no name.
        ArchEvent::ReferenceCycles => match host {
            Vendor::Intel => Some((PERF_TYPE_RAW, 0x013c)),
            Vendor::Amd => Some((PERF_TYPE_RAW, 0x1_0000_0120)),
            Vendor::Other => None,
        },
        ArchEvent::TopdownSlots => None,
    }
}

/// Returns the type and the configuration of a perf event that counts the guest's raw event on a processor of the same
/// vendor.
pub(crate) fn raw(vendor: Vendor, config: u64) -> Option<(u32, u64)> {
    // Each of these counts what a further register says, which the guest does not have: OFFCORE_RSP_0 and 1 (0xb7 and
    // 0xbb), PEBS_LD_LAT (0xcd), PEBS_FRONTEND (0xc6). Linux asks for `config1` (intel_skl_extra_regs and its kin).
    const WITH_REGISTER: [u64; 4] = [0x01b7, 0x01bb, 0x01cd, 0x01c6];
    // Merge pairs an odd counter with the one below (PPR, PERF_CTL). Linux has none for an event by itself.
    const MERGE: u64 = 0xf_0000_00ff;
    let known = match vendor {
        Vendor::Intel => !WITH_REGISTER.contains(&(config & 0xffff)),
        Vendor::Amd => config & MERGE != MERGE,
        Vendor::Other => false,
    };
    known.then_some((PERF_TYPE_RAW, config))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_cycles_are_not_those_of_the_tsc() {
        let reference = |host| architectural(ArchEvent::ReferenceCycles, host);
        assert_eq!(reference(Vendor::Intel), Some((PERF_TYPE_RAW, 0x13c)));
        assert_eq!(reference(Vendor::Amd), Some((PERF_TYPE_RAW, 0x1_0000_0120)));
        assert_eq!(reference(Vendor::Other), None);
        let tsc = architectural(ArchEvent::TscCycles, Vendor::Intel);
        let expected = u64::from(PERF_COUNT_HW_REF_CPU_CYCLES);
        assert_eq!(tsc, Some((PERF_TYPE_HARDWARE, expected)));
    }

    #[test]
    fn an_event_that_needs_another_register_is_not_offered() {
        assert_eq!(raw(Vendor::Intel, 0x01b7), None);
        assert_eq!(raw(Vendor::Intel, 0x41_01bb), None, "with an edge, too");
        assert_eq!(raw(Vendor::Intel, 0x02b7), Some((PERF_TYPE_RAW, 0x02b7)));
        assert_eq!(raw(Vendor::Amd, 0xf_0000_00ff), None);
        assert_eq!(raw(Vendor::Amd, 0x01b7), Some((PERF_TYPE_RAW, 0x01b7)));
        assert_eq!(raw(Vendor::Other, 0xc0), None);
    }
}
