//! The guest's processor: KVM's supported features, one processor in each package, and the changes for its PMU.
//!
//! The paravirtual end of interrupt is not offered to any guest: without an exit at a handler's begin, QEMU's
//! repeated interrupt (docs/benches.md) ends most nested guests.

use kvm_bindings::CpuId;
use vpmu_kvm::{Capability, CpuidEntry, Offer};

use super::Error;

const PV_EOI: u32 = 1 << 6;

/// Turns KVM's supported features into the CPUID of vCPU `id`.
pub(super) fn guest(
    cpuid: &mut CpuId,
    id: u8,
    tsc_khz: u32,
    pmu: Option<&Capability>,
    lazy_deadline: bool,
    paravirtual: Option<&Offer>,
) -> Result<(), Error> {
    const PDCM: u32 = 1 << 15;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                // There is one processor in this package, with this APIC.
                entry.ebx = entry.ebx & 0xff00 | 1 << 16 | u32::from(id) << 24;
                entry.ecx = entry.ecx & !PDCM | TSC_DEADLINE | HYPERVISOR;
            }
            0x4000_0001 => entry.eax &= !PV_EOI,
            0x8000_0008 => entry.ecx = 0,
            _ => {}
        }
    }
    // Each processor is a package of its own, so there is no topology to report. There is no PMU of KVM's either.
    cpuid.retain(|entry| {
        !matches!(
            entry.function,
            4 | 0x0a | 0x0b | 0x1f | 0x23 | 0x8000_001d | 0x8000_001e | 0x8000_0022 | 0x8000_0026
        )
    });
    let mut leaves: Vec<CpuidEntry> = cpuid.as_slice().iter().map(CpuidEntry::from).collect();
    if let Some(capability) = pmu {
        vpmu_kvm::set_cpuid(&mut leaves, capability, tsc_khz);
    }
    if lazy_deadline {
        vpmu_kvm::set_deadline_cpuid(&mut leaves);
    }
    if let Some(offer) = paravirtual {
        vpmu_kvm::set_paravirt_cpuid(&mut leaves, offer);
    }
    let leaves: Vec<_> = leaves.into_iter().map(Into::into).collect();
    *cpuid = CpuId::from_entries(&leaves)
        .map_err(|_| Error::Stopped("its CPUID has too many leaves".to_owned()))?;
    Ok(())
}
