//! What CPUID says of the PMU.

mod promises;

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vpmu::x86::CpuidLeaf;
use vpmu::x86::intel::Capability;

/// Puts what `capability` says into `cpuid`, in place of what KVM said of its own PMU: leaf 0AH, the
/// bits of leaves 01H and 07H, and leaf 23H if it is offered. What no guest with this PMU can use, as its MSRs
/// are the PMU's, is not offered: Intel PT, the debug store, bus lock detection and their kin. A guest looks at leaf 0AH only if the
/// vendor is Intel's.
pub fn set_cpuid(cpuid: &mut CpuId, capability: &Capability) {
    cpuid.retain(|entry| !promises::is_nobodys(entry.function));
    for entry in cpuid.as_mut_slice() {
        if entry.function == 0 {
            let highest = if capability.leaf_23 { 0x23 } else { 0x0a };
            entry.eax = entry.eax.max(highest);
        }
        let mut answer = CpuidLeaf {
            eax: entry.eax,
            ebx: entry.ebx,
            ecx: entry.ecx,
            edx: entry.edx,
        };
        promises::keep(entry.function, entry.index, &mut answer, capability);
        (entry.eax, entry.ebx) = (answer.eax, answer.ebx);
        (entry.ecx, entry.edx) = (answer.ecx, answer.edx);
    }
    replace(cpuid, 0x0a, &[capability.leaf_0a()]);
    if capability.leaf_23 {
        let subleaves: Vec<CpuidLeaf> = (0..4).map(|n| capability.leaf_23(n)).collect();
        replace(cpuid, 0x23, &subleaves);
    } else {
        replace(cpuid, 0x23, &[]);
    }
}

/// Says that the guest has the registers of [`VcpuDeadline`](crate::VcpuDeadline): leaves 40000100H
/// and 40000101H (docs/lazy-deadline.md).
pub fn set_deadline_cpuid(cpuid: &mut CpuId) {
    const BASE: u32 = 0x4000_0100;
    const FEATURE_DEADLINE: u32 = 1 << 0;
    let word = |at: usize| {
        let bytes = &b"vpmuvpmuvpmu"[at..at + 4];
        u32::from_le_bytes(bytes.try_into().expect("four bytes"))
    };
    let signature = CpuidLeaf {
        eax: BASE + 1,
        ebx: word(0),
        ecx: word(4),
        edx: word(8),
    };
    let features = CpuidLeaf {
        eax: FEATURE_DEADLINE,
        ebx: 0,
        ecx: 0,
        edx: 0,
    };
    replace(cpuid, BASE, &[signature]);
    replace(cpuid, BASE + 1, &[features]);
}

/// Puts these subleaves in place of all of `function`.
fn replace(cpuid: &mut CpuId, function: u32, subleaves: &[CpuidLeaf]) {
    cpuid.retain(|entry| entry.function != function);
    for (index, leaf) in (0..).zip(subleaves) {
        let entry = kvm_cpuid_entry2 {
            function,
            index,
            flags: if subleaves.len() > 1 {
                kvm_bindings::KVM_CPUID_FLAG_SIGNIFCANT_INDEX
            } else {
                0
            },
            eax: leaf.eax,
            ebx: leaf.ebx,
            ecx: leaf.ecx,
            edx: leaf.edx,
            ..Default::default()
        };
        cpuid.push(entry).expect("CPUID has a few dozen leaves");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::x86::intel::Version;

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
        cpuid
            .as_slice()
            .iter()
            .find(|entry| (entry.function, entry.index) == (function, index))
            .copied()
    }

    fn supported() -> CpuId {
        let entry = |function, eax| kvm_cpuid_entry2 {
            function,
            eax,
            ..Default::default()
        };
        CpuId::from_entries(&[entry(0, 7), entry(1, 0), entry(0x0a, 0xffff), entry(7, 0)]).unwrap()
    }

    #[test]
    fn the_guest_sees_the_engines_pmu_and_no_other() {
        let mut cpuid = supported();
        let capability = Capability::new(Version::V2);
        set_cpuid(&mut cpuid, &capability);
        assert_eq!(leaf(&cpuid, 0x0a, 0).unwrap().eax, capability.leaf_0a().eax);
        assert_eq!(leaf(&cpuid, 0, 0).unwrap().eax, 0x0a, "the highest leaf");
        assert_eq!(leaf(&cpuid, 1, 0).unwrap().ecx, 1 << 15, "PDCM");
        assert!(leaf(&cpuid, 0x23, 0).is_none());
        set_cpuid(&mut cpuid, &capability);
        assert_eq!(cpuid.as_slice().len(), 4, "the same again is nothing");
    }

    #[test]
    fn what_would_use_the_pmus_registers_is_not_offered() {
        let all = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            eax: u32::MAX,
            ebx: u32::MAX,
            ecx: u32::MAX,
            edx: u32::MAX,
            ..Default::default()
        };
        let mut cpuid =
            CpuId::from_entries(&[all(1, 0), all(7, 0), all(7, 1), all(0x14, 0)]).unwrap();
        set_cpuid(&mut cpuid, &Capability::new(Version::V2));
        let bus_lock_detect = leaf(&cpuid, 7, 0).unwrap().ecx >> 24 & 1;
        assert_eq!(bus_lock_detect, 0, "IA32_DEBUGCTL bit 2 is #GP");
        assert!(leaf(&cpuid, 0x14, 0).is_none(), "Intel PT");
    }

    #[test]
    fn leaf_23_has_its_subleaves() {
        let mut cpuid = supported();
        let capability = Capability {
            leaf_23: true,
            ..Capability::new(Version::V5)
        };
        set_cpuid(&mut cpuid, &capability);
        assert_eq!(leaf(&cpuid, 0x23, 1).unwrap().eax, 0xff);
        assert_eq!(leaf(&cpuid, 0, 0).unwrap().eax, 0x23);
    }
}
