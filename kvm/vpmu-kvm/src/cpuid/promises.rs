//! CPUID's promises of performance monitoring and of features that share its registers, and who keeps them.
//!
//! With the PMU's MSRs intercepted, the engine answers for all of IA32_DEBUGCTL too, and KVM for none
//! of it. A feature that KVM offers may so lose the register that it works by. Each is either kept or
//! not offered.

use vpmu::x86::{Capability, CpuidLeaf, amd, intel};

/// The party that keeps a promise.
#[derive(Clone, Copy, Debug)]
enum Keeper {
    /// Intel's model, where the capability has it.
    Intel(fn(&intel::Capability) -> bool),
    /// AMD's model, where the capability has it.
    Amd(fn(&amd::Capability) -> bool),
    /// KVM, without a register of the PMU.
    Kvm,
    /// KVM, for a guest that has no branch records, and so is never replayed.
    Unreplayed,
    /// Nobody, for a reason that the row gives: the bit is cleared, although no register of the PMU is missing.
    Withheld,
    /// Nobody: the bit is cleared.
    Nobody,
}

impl Keeper {
    /// Returns whether a guest with `capability` is offered a feature that KVM offers if `before`.
    fn offers(self, before: bool, capability: &Capability) -> bool {
        match (self, capability) {
            (Self::Intel(offers), Capability::Intel(capability)) => offers(capability),
            (Self::Amd(offers), Capability::Amd(capability)) => offers(capability),
            (Self::Kvm, _) => before,
            (Self::Unreplayed, Capability::Intel(capability)) => before && capability.lbr.is_none(),
            (Self::Unreplayed, Capability::Amd(capability)) => {
                before && capability.offered_lbr().is_none()
            }
            _ => false,
        }
    }
}

/// The guest's rights if the bit is set: to read an MSR, and to set these bits of it.
type Uses = Option<(u32, u64)>;

/// Leaf, subleaf.
type Leaf = (u32, u32);

/// One bit of CPUID: its name and what the guest may do with it, both of which the test checks by; where it is; who keeps it.
type Promise = (&'static str, (Leaf, Register, u32), Uses, Keeper);

#[derive(Clone, Copy, Debug)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

const fn debugctl(bits: u64) -> Uses {
    Some((0x1d9, bits))
}

const fn msr(index: u32) -> Uses {
    Some((index, 0))
}

/// SDM vol. 2A, CPUID; APM vol. 3, appendix E; Linux's Documentation/virt/kvm/x86/cpuid.rst. Leaves 0AH, 23H and 8000_0022H as a whole are the engine's.
// A row is a line.
#[rustfmt::skip]
const PROMISES: &[Promise] = {
    use Keeper::{Amd as AmdModel, Intel, Kvm, Nobody, Unreplayed, Withheld};
    use Register::{Eax, Ebx, Ecx, Edx};
    const ONE: Leaf = (1, 0);
    const SEVEN: Leaf = (7, 0);
    const KVM: Leaf = (super::KVM_FEATURES, 0);
    const AMD: Leaf = (0x8000_0001, 0);
    // GLOBAL_STATUS_RESET of the bit that is Intel PT's PMI.
    const PT: Uses = Some((0x390, 1 << 55));
    &[
        // Branch trace storage is no part of the promise: IA32_MISC_ENABLE has its bit.
        ("DTES64", (ONE, Ecx, 2), msr(0x600), Intel(|c| c.pebs.is_some())),
        ("DS-CPL", (ONE, Ecx, 4), debugctl(3 << 9), Nobody),
        // A guest's own KVM has its VM entries load IA32_PERF_GLOBAL_CTRL, which KVM refuses where a filter has that register.
        // And the PMU would have to know of the guest's guests: PEBS would write records where their page tables lead.
        ("VMX", (ONE, Ecx, 5), None, Withheld),
        ("PDCM", (ONE, Ecx, 15), msr(0x345), Intel(|c| c.pdcm)),
        // CR4.DE and I/O breakpoints, no MSR.
        ("DE", (ONE, Edx, 2), None, Kvm),
        ("DS", (ONE, Edx, 21), msr(0x3f1), Intel(|c| c.pebs.is_some())),
        // Debugging inside transactions is part of the feature, so it goes as a whole.
        ("RTM", (SEVEN, Ebx, 11), debugctl(1 << 15), Nobody),
        ("Intel PT", (SEVEN, Ebx, 25), PT, Nobody),
        ("BUS_LOCK_DETECT", (SEVEN, Ecx, 24), debugctl(1 << 2), Nobody),
        ("LBR", (SEVEN, Edx, 19), msr(0x14ce), Intel(|c| c.lbr.is_some())),
        // XSAVES would save the processor's records, not those of the model.
        ("XSAVES of LBR", ((0x0d, 1), Ecx, 15), msr(0xda0), Nobody),
        ("leaf 23H", ((7, 1), Eax, 8), None, Intel(|c| c.leaf_23)),
        // A replay stores while its vCPU is out of KVM_RUN. With the feature another vCPU would not wait for it to forget a page, and
        // may hand the page on in that moment.
        ("PV_TLB_FLUSH", (KVM, Eax, 9), None, Unreplayed),
        ("Hyper-V's remote flush", ((0x4000_0004, 0), Eax, 2), None, Unreplayed),
        ("IBS", (AMD, Ecx, 10), msr(0xc001_1030), Nobody),
        // AMD's counters tell a guest's guests apart, which these cannot.
        ("SVM", (AMD, Ecx, 2), None, Withheld),
        ("PerfCtrExtCore", (AMD, Ecx, 23), msr(0xc001_0200), AmdModel(|c| c.leaf_8000_0001_ecx() != 0)),
        ("PerfCtrExtNB", (AMD, Ecx, 24), msr(0xc001_0240), Nobody),
        ("PerfCtrExtLLC", (AMD, Ecx, 28), msr(0xc001_0230), Nobody),
        ("BRS", ((0x8000_0008, 0), Ebx, 31), msr(0xc001_010f), Nobody),
    ]
};

/// Leaves that only describe features that nobody keeps: Intel PT, IBS; and those of architectural LBR and PerfMonV2, which
/// the PMU's own leaf then replaces.
const NOBODYS_LEAVES: [u32; 4] = [0x14, 0x1c, 0x8000_001b, 0x8000_0022];

/// Returns whether `function` only describes features that no guest with this PMU has.
pub(super) fn is_nobodys(function: u32) -> bool {
    NOBODYS_LEAVES.contains(&function)
}

/// Removes the features that nobody keeps from an answer of CPUID, and adds those that the engine keeps.
pub(super) fn keep(function: u32, index: u32, answer: &mut CpuidLeaf, capability: &Capability) {
    for &(_, (leaf, register, bit), _, keeper) in PROMISES {
        if leaf != (function, index) {
            continue;
        }
        let register = match register {
            Register::Eax => &mut answer.eax,
            Register::Ebx => &mut answer.ebx,
            Register::Ecx => &mut answer.ecx,
            Register::Edx => &mut answer.edx,
        };
        let before = *register >> bit & 1 != 0;
        let offered = keeper.offers(before, capability);
        *register = *register & !(1 << bit) | u32::from(offered) << bit;
    }
}

#[cfg(test)]
mod tests {
    use vpmu::x86::intel::Version;
    use vpmu::x86::{Outcome, Pmu, PmuConfig};
    use vpmu_perf::PerfHost;

    use super::*;

    fn offered(promise: &Promise, capability: &Capability, before: u32) -> bool {
        let &(_, ((function, index), register, bit), ..) = promise;
        let mut answer = CpuidLeaf {
            eax: before,
            ebx: before,
            ecx: before,
            edx: before,
        };
        keep(function, index, &mut answer, capability);
        let register = match register {
            Register::Eax => answer.eax,
            Register::Ebx => answer.ebx,
            Register::Ecx => answer.ecx,
            Register::Edx => answer.edx,
        };
        register >> bit & 1 != 0
    }

    /// Returns whether the guest can use the registers of a promise: read the MSR, set the bits.
    fn works((msr, bits): (u32, u64), capability: &Capability) -> bool {
        let mut pmu = Pmu::new(PmuConfig::new(*capability)).unwrap();
        let mut host = None::<PerfHost>;
        let read = matches!(pmu.rdmsr(msr, &mut host), Outcome::Value(_));
        let mut bits = (0..64).map(|n| bits & 1 << n).filter(|&bit| bit != 0);
        read && bits.all(|bit| pmu.wrmsr(msr, bit, &mut host) == Outcome::Done)
    }

    fn capabilities() -> Vec<Capability> {
        let intel = [Version::V2, Version::V5].into_iter().flat_map(|version| {
            [(false, false), (true, version == Version::V5)].map(|(pdcm, leaf_23)| {
                intel::Capability {
                    pdcm,
                    full_width_writes: pdcm,
                    leaf_23,
                    pebs: leaf_23.then(Default::default),
                    ..intel::Capability::new(version)
                }
                .into()
            })
        });
        use amd::Interface::{Core, Legacy, V2};
        let amd = [Legacy, Core, V2].map(|interface| amd::Capability::new(interface).into());
        intel.chain(amd).collect()
    }

    #[test]
    fn what_is_offered_works_and_what_does_not_work_is_not_offered() {
        for capability in capabilities() {
            for promise in PROMISES {
                let &(name, _, uses, keeper) = promise;
                for before in [0, u32::MAX] {
                    let offered = offered(promise, &capability, before);
                    match (keeper, uses) {
                        (_, Some(uses)) => {
                            let works = works(uses, &capability);
                            assert_eq!(offered, works, "{name}: {uses:x?}");
                        }
                        (Keeper::Nobody, None) => {
                            panic!("{name}: unkept for no reason")
                        }
                        (keeper, None) => {
                            let kept = keeper.offers(before != 0, &capability);
                            assert_eq!(offered, kept, "{name}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_guest_has_no_guests_of_its_own() {
        let find = |name| PROMISES.iter().find(|promise| promise.0 == name);
        let virtualization = ["VMX", "SVM"].map(|name| find(name).unwrap());
        for capability in capabilities() {
            let has = |promise| offered(promise, &capability, u32::MAX);
            assert_eq!(virtualization.map(has), [false; 2], "{capability:?}");
        }
    }

    #[test]
    fn each_bit_is_in_the_table_once() {
        let place = |&(_, (leaf, register, bit), ..): &Promise| (leaf, register as u32, bit);
        for (n, promise) in PROMISES.iter().enumerate() {
            let twice = PROMISES[..n]
                .iter()
                .any(|other| place(other) == place(promise));
            assert!(!twice, "{}", promise.0);
        }
    }
}
