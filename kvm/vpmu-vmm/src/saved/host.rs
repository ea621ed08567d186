//! The check that this host has the features that a saved guest has found.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vpmu::x86::ArchEvent;
use vpmu_kvm::Capability;

use crate::Error;

/// CPUID's registers of feature bits: leaf, subleaf, and for EAX to EDX the bits that are features.
/// Other bits are numbers, or, as OSXSAVE, the guest's own settings.
const FEATURES: [(u32, u32, [u32; 4]); 6] = [
    (0x1, 0, [0, 0, !(1 << 27), !0]),
    (0x7, 0, [0, !0, !(1 << 4), !0]),
    (0x7, 1, [!0, 0, 0, !0]),
    (0xd, 0, [!0, 0, 0, !0]),
    (0xd, 1, [!0, 0, 0, 0]),
    (0x8000_0001, 0, [0, 0, !0, !0]),
];

/// Compares the CPUID that the guest had with the CPUID that it would have here, and checks
/// that its events can be counted.
pub(crate) fn check(
    saved: &[kvm_cpuid_entry2],
    here: &CpuId,
    pmu: Option<(Capability, Capability)>,
) -> Result<(), Error> {
    for (leaf, subleaf, masks) in FEATURES {
        let registers = |entries: &[kvm_cpuid_entry2]| {
            entries
                .iter()
                .find(|entry| (entry.function, entry.index) == (leaf, subleaf))
                .map_or([0; 4], |e| [e.eax, e.ebx, e.ecx, e.edx])
        };
        let (saved, here) = (registers(saved), registers(here.as_slice()));
        let names = ["EAX", "EBX", "ECX", "EDX"];
        for (((saved, here), mask), register) in saved.into_iter().zip(here).zip(masks).zip(names) {
            let missing = saved & !here & mask;
            if missing != 0 {
                return Err(Error::Features(leaf, register, missing));
            }
        }
    }
    let Some((had, best)) = pmu else {
        return Ok(());
    };
    let lost = |&event: &ArchEvent| had.has_event(event) && !best.has_event(event);
    match ArchEvent::ENUMERATED.into_iter().find(lost) {
        Some(event) => Err(Error::Event(event)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, ecx: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            ecx,
            ..Default::default()
        }
    }

    #[test]
    fn a_feature_that_is_not_here_is_named() {
        let here = CpuId::from_entries(&[leaf(1, 0b0110)]).unwrap();
        assert!(check(&[leaf(1, 0b0100)], &here, None).is_ok());
        assert!(check(&[leaf(1, 0b0110 | 1 << 27)], &here, None).is_ok());
        assert!(matches!(
            check(&[leaf(1, 0b1110)], &here, None),
            Err(Error::Features(1, "ECX", 0b1000))
        ));
        let nothing = CpuId::from_entries(&[]).unwrap();
        assert!(check(&[leaf(7, 1)], &nothing, None).is_err());
        assert!(check(&[leaf(0x16, 1)], &nothing, None).is_ok(), "a number");
    }
}
