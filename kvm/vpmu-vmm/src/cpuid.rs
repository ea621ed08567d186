//! The guest's processor: KVM's supported features, one processor in each package, and the changes for its PMU.
//!
//! The paravirtual end of interrupt is not offered to any guest: without an exit at a handler's begin, QEMU's
//! repeated interrupt (docs/figures/qemu.md) ends most nested guests.

use kvm_bindings::CpuId;
use vpmu_kvm::{CpuidEntry, CpuidLeaf, Offer};

use super::Error;

const PV_EOI: u32 = 1 << 6;

/// Leaves 0BH and 1FH: extended topology.
const TOPOLOGY: [u32; 2] = [0x0b, 0x1f];

/// Returns the subleaves of a leaf of [`TOPOLOGY`] for vCPU `id`, whose package has one core with one thread (SDM
/// vol. 2A, CPUID). Subleaf 2 ends the list.
fn topology(function: u32, id: u8) -> [CpuidEntry; 3] {
    const SIGNIFICANT_INDEX: u32 = 1 << 0;
    const THREAD: u32 = 1;
    const CORE: u32 = 2;
    const NONE: u32 = 0;
    [(0, THREAD), (1, CORE), (2, NONE)].map(|(index, kind)| CpuidEntry {
        function,
        index,
        flags: SIGNIFICANT_INDEX,
        leaf: CpuidLeaf {
            // No bit of the x2APIC ID numbers threads or cores.
            eax: 0,
            ebx: u32::from(kind != NONE),
            ecx: kind << 8 | index,
            edx: id.into(),
        },
    })
}

/// Turns KVM's supported features into the CPUID of vCPU `id`.
pub(super) fn guest(cpuid: &mut CpuId, id: u8, tsc_khz: u32, offer: &Offer) -> Result<(), Error> {
    const PDCM: u32 = 1 << 15;
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                // There is one processor in this package, with this APIC.
                entry.ebx = entry.ebx & 0xff00 | 1 << 16 | u32::from(id) << 24;
                // A guest of the guest's would not be saved.
                entry.ecx = entry.ecx & !(PDCM | VMX) | TSC_DEADLINE | HYPERVISOR;
            }
            0x4000_0001 => entry.eax &= !PV_EOI,
            0x8000_0001 => entry.ecx &= !SVM,
            0x8000_0008 => entry.ecx = 0,
            _ => {}
        }
    }
    // Each processor is a package of its own: no other leaf has more to say. KVM's topology is the host's, as are its
    // answers about a PMU.
    cpuid.retain(|entry| {
        !matches!(
            entry.function,
            4 | 0x0a
                | 0x0b
                | 0x1f
                | 0x23
                | 0x8000_000a
                | 0x8000_001d
                | 0x8000_001e
                | 0x8000_0022
                | 0x8000_0026
        )
    });
    let mut leaves: Vec<CpuidEntry> = cpuid.as_slice().iter().map(CpuidEntry::from).collect();
    offer.set_cpuid(&mut leaves, tsc_khz);
    let highest = leaves.iter().find(|entry| entry.function == 0);
    let highest = highest.map_or(0, |entry| entry.leaf.eax);
    let there = TOPOLOGY.into_iter().filter(|&leaf| leaf <= highest);
    leaves.extend(there.flat_map(|leaf| topology(leaf, id)));
    let leaves: Vec<_> = leaves.into_iter().map(Into::into).collect();
    *cpuid = CpuId::from_entries(&leaves)
        .map_err(|_| Error::Stopped("its CPUID has too many leaves".to_owned()))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;
    use vpmu_kvm::{Capability, Perfmon, intel};

    use super::*;

    /// Returns vCPU 3's leaves on a host whose highest leaf is `highest`.
    fn cpuid(highest: u32, offer: &Offer) -> Vec<[u32; 7]> {
        let host = |function, eax, edx| kvm_cpuid_entry2 {
            function,
            eax,
            edx,
            ..Default::default()
        };
        // The host's own topology, of its processor 7.
        let leaves = [
            host(0, highest, 0),
            host(1, 0, 0),
            host(0x0b, 1, 7),
            host(0x1f, 1, 7),
        ];
        let mut cpuid = CpuId::from_entries(&leaves).unwrap();
        guest(&mut cpuid, 3, 2_000_000, offer).unwrap();
        let entries = cpuid.as_slice().iter().map(CpuidEntry::from);
        entries.map(<[u32; 7]>::from).collect()
    }

    #[test]
    fn each_vcpu_has_its_own_x2apic_id_in_a_package_of_its_own() {
        let none = Offer::default();
        let intel = Capability::from(intel::Capability::new(Perfmon::V5)).into();
        for (highest, offer, leaves) in [
            (0x0a, &none, &[][..]),
            (0x0d, &none, &[0x0b]),
            (0x20, &none, &[0x0b, 0x1f]),
            // An Intel processor's highest leaf is the one that its PMU needs, or more.
            (0x20, &intel, &[0x0b]),
        ] {
            let entries = cpuid(highest, offer);
            let found = entries.iter().filter(|entry| TOPOLOGY.contains(&entry[0]));
            let expected = leaves.iter().flat_map(|&leaf| {
                [
                    [leaf, 0, 1, 0, 1, 0x100, 3],
                    [leaf, 1, 1, 0, 1, 0x201, 3],
                    [leaf, 2, 1, 0, 0, 0x002, 3],
                ]
            });
            assert!(found.copied().eq(expected), "{highest:#x}: {entries:x?}");
        }
    }
}
