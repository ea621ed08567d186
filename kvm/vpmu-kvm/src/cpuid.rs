//! CPUID's description of the PMU, and of the processor that has it.
//!
//! With AMD's PMU the guest's processor is the host's: vendor, family, model, topology, and KVM's paravirtual
//! features. Only what the PMU adds, and what would need registers that nobody keeps, is changed.
//!
//! Linux drives an architectural PMU only on Intel's processors, and knows quirks of most models. So with Intel's PMU
//! the guest's processor is one that Intel never made. Where the host is AMD's, AMD's own leaves go, and with them
//! features that only they explain. Of KVM's paravirtual features the clock stays: others would have the guest execute
//! VMCALL, which is an invalid opcode on AMD. What is missed most are paravirtual spinlocks, where two vCPUs
//! share one processor.

mod promises;

use vpmu::paravirt::Offer;
use vpmu::x86::{Capability, CpuidLeaf, amd};

/// A model of family 6 that Intel never made: no kernel has special handling for it.
const SIGNATURE: u32 = 0x000f_06e1;
/// "GenuineIntel" in EBX, EDX, ECX.
const INTEL: (u32, u32, u32) = (0x756e_6547, 0x4965_6e69, 0x6c65_746e);

const PERFMON_V2: u32 = 0x8000_0022;
/// CPUID.8000_0001H:ECX: leaves 8000_001DH and 8000_001EH are there.
const TOPOEXT: u32 = 1 << 22;

/// KVM's features, where its leaves are the first of a hypervisor's: see [`kvm_features`].
const KVM_FEATURES: u32 = 0x4000_0001;
const KVM: &[u8; 12] = b"KVMKVMKVM\0\0\0";
const OURS: &[u8; 12] = b"vpmuvpmuvpmu";
const KVMCLOCK: u32 = 1 << 0;
const KVMCLOCK2: u32 = 1 << 3;
const KVMCLOCK_STABLE: u32 = 1 << 24;

/// One entry of a vCPU's CPUID: the fields of KVM's `kvm_cpuid_entry2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuidEntry {
    /// The leaf: EAX.
    pub function: u32,
    /// The subleaf: ECX.
    pub index: u32,
    /// Bit 0: the subleaf matters.
    pub flags: u32,
    /// The answer.
    pub leaf: CpuidLeaf,
}

/// Takes the numbers in KVM's order: function, index, flags, EAX, EBX, ECX, EDX.
impl From<[u32; 7]> for CpuidEntry {
    fn from([function, index, flags, eax, ebx, ecx, edx]: [u32; 7]) -> Self {
        Self {
            function,
            index,
            flags,
            leaf: CpuidLeaf { eax, ebx, ecx, edx },
        }
    }
}

impl From<CpuidEntry> for [u32; 7] {
    fn from(entry: CpuidEntry) -> Self {
        let CpuidLeaf { eax, ebx, ecx, edx } = entry.leaf;
        [entry.function, entry.index, entry.flags, eax, ebx, ecx, edx]
    }
}

#[cfg(feature = "bindings")]
impl From<&kvm_bindings::kvm_cpuid_entry2> for CpuidEntry {
    fn from(e: &kvm_bindings::kvm_cpuid_entry2) -> Self {
        [e.function, e.index, e.flags, e.eax, e.ebx, e.ecx, e.edx].into()
    }
}

#[cfg(feature = "bindings")]
impl From<CpuidEntry> for kvm_bindings::kvm_cpuid_entry2 {
    fn from(entry: CpuidEntry) -> Self {
        let [function, index, flags, eax, ebx, ecx, edx] = entry.into();
        Self {
            function,
            index,
            flags,
            eax,
            ebx,
            ecx,
            edx,
            ..Self::default()
        }
    }
}

/// Returns the leaves that are the PMU's alone, as leaf, subleaf, answer: 0AH, and 1CH and 23H if they are offered; 8000_0022H
/// with AMD's PerfMonV2.
fn own_leaves(capability: &Capability) -> Vec<(u32, u32, CpuidLeaf)> {
    match capability {
        Capability::Intel(capability) => {
            let subleaves = if capability.leaf_23 { 4 } else { 0 };
            let leaf_23 = (0..subleaves).map(|n| (0x23, n, capability.leaf_23(n)));
            let leaf_1c = capability.lbr.map(|lbr| (0x1c, 0, lbr.leaf_1c()));
            std::iter::once((0x0a, 0, capability.leaf_0a()))
                .chain(leaf_1c)
                .chain(leaf_23)
                .collect()
        }
        Capability::Amd(capability) => match capability.interface {
            amd::Interface::Legacy | amd::Interface::Core => Vec::new(),
            amd::Interface::V2 => vec![(PERFMON_V2, 0, capability.leaf_8000_0022())],
        },
    }
}

/// Turns `cpuid` into that of a processor with this PMU: see [`Offer::set_cpuid`](crate::Offer::set_cpuid).
pub(crate) fn set_architectural(
    cpuid: &mut Vec<CpuidEntry>,
    capability: &Capability,
    tsc_khz: u32,
) {
    if let Capability::Intel(_) = capability {
        set_intel(cpuid, tsc_khz);
    }
    let of_kvm = kvm_features(cpuid);
    for entry in cpuid.iter_mut() {
        let function = match entry.function {
            function if Some(function) == of_kvm => KVM_FEATURES,
            // Hyper-V's interface.
            KVM_FEATURES => continue,
            function => function,
        };
        promises::keep(function, entry.index, &mut entry.leaf, capability);
    }
    let has_topology = cpuid.iter().any(|entry| entry.function == 0x8000_001e);
    let leaves = own_leaves(capability);
    for CpuidEntry { function, leaf, .. } in cpuid.iter_mut() {
        match *function {
            // The last leaf of the range.
            first @ (0 | 0x8000_0000) => {
                let own = leaves.iter().map(|own| own.0);
                let own = own.filter(|own| own & 0x8000_0000 == first).max();
                leaf.eax = leaf.eax.max(own.unwrap_or(0));
            }
            // The bit may explain a leaf that the VMM has taken out.
            0x8000_0001 if !has_topology => leaf.ecx &= !TOPOEXT,
            _ => {}
        }
    }
    // Subleaves of another processor's would stay beside the PMU's own.
    cpuid.retain(|entry| {
        !matches!(entry.function, 0x0a | 0x23) && !promises::is_nobodys(entry.function)
    });
    put(cpuid, leaves);
}

/// Returns the leaf of KVM's features. KVM's leaves are behind those of Hyper-V where the guest has both, and guests search
/// for them in steps of 100H (Linux's Documentation/virt/kvm/x86/cpuid.rst).
fn kvm_features(cpuid: &[CpuidEntry]) -> Option<u32> {
    let is_kvm = |entry: &&CpuidEntry| {
        matches!(entry.function, 0x4000_0000..=0x4000_ffff)
            && entry.function.is_multiple_of(0x100)
            && signature(&entry.leaf) == *KVM
    };
    cpuid.iter().find(is_kvm).map(|entry| entry.function + 1)
}

/// Returns a hypervisor's name.
fn signature(leaf: &CpuidLeaf) -> [u8; 12] {
    let words = [leaf.ebx, leaf.ecx, leaf.edx];
    std::array::from_fn(|n| words[n / 4].to_le_bytes()[n % 4])
}

fn set_intel(cpuid: &mut Vec<CpuidEntry>, tsc_khz: u32) {
    let vendor = cpuid.iter().find(|entry| entry.function == 0);
    if vendor.is_none_or(|entry| (entry.leaf.ebx, entry.leaf.edx, entry.leaf.ecx) != INTEL) {
        become_intel(cpuid, tsc_khz);
    }
    for entry in cpuid.iter_mut().filter(|entry| entry.function == 1) {
        // Linux has tables of events and quirks for models that it knows, and would use counters that are not there.
        entry.leaf.eax = SIGNATURE;
    }
}

/// Says that the guest has registers of our own: leaves 40000100H and 40000101H, and 40000102H with the paravirtual PMU
/// (docs/how/lazy-deadline.md, docs/how/paravirtual-pmu.md).
pub(crate) fn set_own(cpuid: &mut Vec<CpuidEntry>, deadline: bool, pmu: Option<&Offer>) {
    // The deadline's bit, and the PMU's.
    let features = u32::from(deadline) | u32::from(pmu.is_some()) << 1;
    if features == 0 {
        return;
    }
    const BASE: u32 = 0x4000_0100;
    const FEATURES: u32 = BASE + 1;
    const PMU: u32 = BASE + 2;
    // Whoever else has these leaves moves on. Only KVM's are there, behind Hyper-V's, and both its guests and KVM search for them.
    let is_taken = |entry: &CpuidEntry| entry.function == BASE && signature(&entry.leaf) != *OURS;
    if cpuid.iter().any(is_taken) {
        let theirs = |entry: &&mut CpuidEntry| matches!(entry.function, BASE..0x4000_0200);
        for entry in cpuid.iter_mut().filter(theirs) {
            if entry.function == BASE {
                // The highest leaf of the range.
                entry.leaf.eax = entry.leaf.eax.saturating_add(0x100);
            }
            entry.function += 0x100;
        }
    }
    let last = if pmu.is_some() { PMU } else { FEATURES };
    let [ebx, ecx, edx] = [0, 1, 2].map(|n| u32::from_le_bytes(OURS.as_chunks().0[n]));
    cpuid.retain(|entry| !matches!(entry.function, BASE..=PMU));
    cpuid.push([BASE, 0, 0, last, ebx, ecx, edx].into());
    cpuid.push([FEATURES, 0, 0, features, 0, 0, 0].into());
    put(cpuid, pmu.map(|pmu| (PMU, 0, pmu.leaf())));
}

fn put(cpuid: &mut Vec<CpuidEntry>, leaves: impl IntoIterator<Item = (u32, u32, CpuidLeaf)>) {
    const SIGNIFICANT_INDEX: u32 = 1 << 0;
    let entry = |(function, index, leaf)| CpuidEntry {
        function,
        index,
        flags: if function == 0x23 {
            SIGNIFICANT_INDEX
        } else {
            0
        },
        leaf,
    };
    cpuid.extend(leaves.into_iter().map(entry));
}

/// Gives the guest the CPUID that drivers of an architectural PMU search for.
fn become_intel(cpuid: &mut Vec<CpuidEntry>, tsc_khz: u32) {
    // Leaves 15H and 16H tell how fast the host's crystal is; the guest's TSC may be scaled.
    cpuid.retain(|entry| entry.function <= 0x8000_0008 && !matches!(entry.function, 0x15 | 0x16));
    let of_kvm = kvm_features(cpuid);
    for CpuidEntry { function, leaf, .. } in cpuid.iter_mut() {
        match *function {
            0 => {
                leaf.eax = 0x16;
                (leaf.ebx, leaf.edx, leaf.ecx) = INTEL;
            }
            function if Some(function) == of_kvm => {
                leaf.eax &= KVMCLOCK | KVMCLOCK2 | KVMCLOCK_STABLE;
            }
            // Address widths and the extended features that Intel has too.
            0x8000_0000 => leaf.eax = 0x8000_0008,
            0x8000_0001 => {
                leaf.eax = 0;
                leaf.ebx = 0;
                leaf.ecx &= 1 << 0 | 1 << 5 | 1 << 8; // LAHF, LZCNT, PREFETCHW
                leaf.edx &= 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
            }
            // EBX has AMD's features, EDX the number of threads and INVLPGB's limit: neither is in Intel's manual.
            0x8000_0008 => (leaf.ebx, leaf.edx) = (0, 0),
            _ => {}
        }
    }
    let (hz, mhz) = (tsc_khz.saturating_mul(1000), tsc_khz / 1000);
    // The crystal's rate has 32 bits.
    if u64::from(tsc_khz) * 1000 == u64::from(hz) {
        cpuid.push([0x15, 0, 0, 1, 1, hz, 0].into());
    }
    cpuid.push([0x16, 0, 0, mhz, mhz, 100, 0].into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::x86::intel::{self, Version};
    use vpmu::x86::lbr;

    fn intel(version: Version) -> Capability {
        intel::Capability::new(version).into()
    }

    const KHZ: u32 = 2_400_000;
    const AMD: (u32, u32, u32) = (0x6874_7541, 0x6974_6e65, 0x444d_4163);

    fn leaf(cpuid: &[CpuidEntry], function: u32, index: u32) -> Option<CpuidLeaf> {
        cpuid
            .iter()
            .find(|entry| (entry.function, entry.index) == (function, index))
            .map(|entry| entry.leaf)
    }

    fn entry(function: u32, eax: u32) -> CpuidEntry {
        CpuidEntry::from([function, 0, 0, eax, 0, 0, 0])
    }

    /// Returns KVM's supported features on a host of this vendor.
    fn supported((ebx, edx, ecx): (u32, u32, u32)) -> Vec<CpuidEntry> {
        vec![
            CpuidEntry::from([0, 0, 0, 7, ebx, ecx, edx]),
            entry(1, 0x306a9),
            entry(0x0a, 0xffff),
            entry(7, 0),
            entry(0x8000_0022, 1),
        ]
    }

    #[test]
    fn the_guest_sees_the_engines_pmu_and_no_other() {
        let mut cpuid = supported(INTEL);
        let capability = intel(Version::V2);
        set_architectural(&mut cpuid, &capability, KHZ);
        let leaf_0a = intel::Capability::new(Version::V2).leaf_0a();
        assert_eq!(leaf(&cpuid, 0x0a, 0), Some(leaf_0a));
        assert_eq!(leaf(&cpuid, 0, 0).unwrap().eax, 0x0a, "the highest leaf");
        assert_eq!(leaf(&cpuid, 1, 0).unwrap().ecx, 1 << 15, "PDCM");
        assert_eq!(leaf(&cpuid, 1, 0).unwrap().eax, SIGNATURE);
        assert!(leaf(&cpuid, 0x23, 0).is_none());
        let once = cpuid.clone();
        set_architectural(&mut cpuid, &capability, KHZ);
        assert_eq!(cpuid, once);
    }

    #[test]
    fn a_guest_of_an_amd_host_sees_intels() {
        let mut cpuid = supported(AMD);
        set_architectural(&mut cpuid, &intel(Version::V2), KHZ);
        let vendor = leaf(&cpuid, 0, 0).unwrap();
        assert_eq!((vendor.ebx, vendor.edx, vendor.ecx), INTEL);
        assert_eq!(leaf(&cpuid, 0x16, 0).unwrap().eax, 2400, "MHz");
        assert_eq!(leaf(&cpuid, 0x15, 0).unwrap().ecx, 2_400_000_000);
        assert!(leaf(&cpuid, 0x8000_0022, 0).is_none(), "AMD's PMU");
        let once = cpuid.clone();
        set_architectural(&mut cpuid, &intel(Version::V2), KHZ);
        assert_eq!(cpuid, once);
    }

    #[test]
    fn what_would_use_the_pmus_registers_is_not_offered() {
        let all = |function, index| {
            let ones = u32::MAX;
            CpuidEntry::from([function, index, 0, ones, ones, ones, ones])
        };
        let mut cpuid = vec![all(1, 0), all(7, 0), all(7, 1), all(0x14, 0)];
        set_architectural(&mut cpuid, &intel(Version::V2), KHZ);
        let bus_lock_detect = leaf(&cpuid, 7, 0).unwrap().ecx >> 24 & 1;
        assert_eq!(bus_lock_detect, 0, "IA32_DEBUGCTL bit 2 is #GP");
        assert!(leaf(&cpuid, 0x14, 0).is_none(), "Intel PT");
    }

    #[test]
    fn a_guest_that_is_replayed_waits_for_flushes() {
        let with = |cpuid: Vec<CpuidEntry>, capability: Capability| {
            let [alone, behind] = [false, true].map(|hyperv| {
                let mut cpuid = cpuid.clone();
                let base = hypervisors(&mut cpuid, hyperv);
                set_architectural(&mut cpuid, &capability, KHZ);
                if hyperv {
                    assert_eq!(leaf(&cpuid, 0x4000_0001, 0).unwrap().eax, HV_1);
                }
                leaf(&cpuid, base + 1, 0).unwrap().eax
            });
            assert_eq!(alone, behind);
            alone
        };
        let intel = |lbr| intel::Capability {
            lbr,
            ..intel::Capability::new(Version::V5)
        };
        let amd = |lbr| amd::Capability {
            lbr,
            ..amd::Capability::new(amd::Interface::V2)
        };
        let records = (
            lbr::intel::Capability::new(),
            lbr::amd::Capability::default(),
        );
        assert_eq!(with(supported(INTEL), intel(None).into()), u32::MAX);
        assert_eq!(with(supported(AMD), amd(None).into()), u32::MAX);
        const PV_TLB_FLUSH: u32 = 1 << 9;
        let waits = !PV_TLB_FLUSH;
        assert_eq!(with(supported(INTEL), intel(Some(records.0)).into()), waits);
        assert_eq!(with(supported(AMD), amd(Some(records.1)).into()), waits);
    }

    const HV_1: u32 = u32::from_le_bytes(*b"Hv#1");

    /// Adds KVM's leaves, perhaps behind Hyper-V's. Returns the first of them.
    fn hypervisors(cpuid: &mut Vec<CpuidEntry>, hyperv: bool) -> u32 {
        let base = if hyperv { 0x4000_0100 } else { 0x4000_0000 };
        if hyperv {
            let name = [0x7263_694d, 0x666f_736f, 0x7648_2074]; // Microsoft Hv
            cpuid.push([0x4000_0000, 0, 0, 0x4000_0005, name[0], name[1], name[2]].into());
            cpuid.push([0x4000_0001, 0, 0, HV_1, 0, 0, 0].into());
        }
        let name = [0x4b4d_564b, 0x564b_4d56, 0x4d];
        cpuid.push([base, 0, 0, base + 1, name[0], name[1], name[2]].into());
        cpuid.push([base + 1, 0, 0, u32::MAX, 0, 0, 0].into());
        base
    }

    #[test]
    fn our_leaves_take_nobodys_away() {
        let mut cpuid = Vec::new();
        hypervisors(&mut cpuid, true);
        for _ in 0..2 {
            set_own(&mut cpuid, true, None);
            assert_eq!(leaf(&cpuid, 0x4000_0100, 0).unwrap().eax, 0x4000_0101);
            assert_eq!(leaf(&cpuid, 0x4000_0200, 0).unwrap().eax, 0x4000_0201);
            assert_eq!(kvm_features(&cpuid), Some(0x4000_0201));
            assert_eq!(leaf(&cpuid, 0x4000_0201, 0).unwrap().eax, u32::MAX);
        }
    }

    #[test]
    fn our_own_features_add_up() {
        let pmu = Offer {
            counters: 8,
            events: 0b101,
            rings: true,
            raw: false,
            filter: vpmu::x86::EventFilter::default(),
        };
        let mut cpuid = Vec::new();
        set_own(&mut cpuid, false, None);
        assert!(cpuid.is_empty());
        set_own(&mut cpuid, true, None);
        assert_eq!(leaf(&cpuid, 0x4000_0100, 0).unwrap().eax, 0x4000_0101);
        assert_eq!(leaf(&cpuid, 0x4000_0101, 0).unwrap().eax, 0b01);
        set_own(&mut cpuid, false, Some(&pmu));
        assert_eq!(leaf(&cpuid, 0x4000_0101, 0).unwrap().eax, 0b10);
        set_own(&mut cpuid, true, Some(&pmu));
        assert_eq!(leaf(&cpuid, 0x4000_0100, 0).unwrap().eax, 0x4000_0102);
        assert_eq!(leaf(&cpuid, 0x4000_0101, 0).unwrap().eax, 0b11);
        let told = leaf(&cpuid, 0x4000_0102, 0).unwrap();
        assert_eq!((told.eax, told.ebx, told.ecx), (0x508, 0b101, 1));
        assert_eq!(cpuid.len(), 3);
    }

    #[test]
    fn leaf_23_has_its_subleaves() {
        let mut cpuid = supported(INTEL);
        let capability = intel::Capability {
            leaf_23: true,
            ..intel::Capability::new(Version::V5)
        };
        set_architectural(&mut cpuid, &capability.into(), KHZ);
        assert_eq!(leaf(&cpuid, 0x23, 1).unwrap().eax, 0xff);
        assert_eq!(leaf(&cpuid, 0, 0).unwrap().eax, 0x23);
    }

    #[test]
    fn a_guest_of_an_amd_host_keeps_its_processor() {
        for interface in [
            amd::Interface::Legacy,
            amd::Interface::Core,
            amd::Interface::V2,
        ] {
            let capability = amd::Capability::new(interface);
            let mut cpuid = supported(AMD);
            cpuid.push(entry(0x8000_0000, 0x8000_000a));
            cpuid.push(CpuidEntry::from([0x8000_0001, 0, 0, 0, 0, u32::MAX, 0]));
            set_architectural(&mut cpuid, &capability.into(), KHZ);
            let vendor = leaf(&cpuid, 0, 0).unwrap();
            assert_eq!((vendor.ebx, vendor.edx, vendor.ecx), AMD);
            assert_eq!(vendor.eax, 7);
            assert_eq!(leaf(&cpuid, 1, 0).unwrap().eax, 0x306a9, "family and model");
            assert!(leaf(&cpuid, 0x0a, 0).is_none() && leaf(&cpuid, 0x16, 0).is_none());
            let features = leaf(&cpuid, 0x8000_0001, 0).unwrap().ecx;
            assert_eq!(features & 1 << 23, capability.leaf_8000_0001_ecx());
            // SVM, IBS, TOPOEXT without its leaves, northbridge and L3 counters.
            assert_eq!(
                features & (1 << 2 | 1 << 10 | 1 << 22 | 1 << 24 | 1 << 28),
                0
            );
            assert_ne!(features & 1 << 6, 0, "SSE4A: the host's");
            let v2 = interface == amd::Interface::V2;
            let last = leaf(&cpuid, 0x8000_0000, 0).unwrap().eax;
            assert_eq!(last, if v2 { 0x8000_0022 } else { 0x8000_000a });
            let described = leaf(&cpuid, 0x8000_0022, 0);
            assert_eq!(described, v2.then(|| capability.leaf_8000_0022()));
            let once = cpuid.clone();
            set_architectural(&mut cpuid, &capability.into(), KHZ);
            assert_eq!(cpuid, once);
        }
        let mut cpuid = supported(AMD);
        cpuid.push(CpuidEntry::from([0x8000_0001, 0, 0, 0, 0, TOPOEXT, 0]));
        cpuid.push(entry(0x8000_001e, 0));
        set_architectural(
            &mut cpuid,
            &amd::Capability::new(amd::Interface::Core).into(),
            KHZ,
        );
        assert_ne!(leaf(&cpuid, 0x8000_0001, 0).unwrap().ecx & TOPOEXT, 0);
    }
}
