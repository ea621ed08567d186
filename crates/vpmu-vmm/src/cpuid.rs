//! The guest's processor: what KVM supports, and with our PMU a nameless Intel processor.
//!
//! Linux drives an architectural PMU only on Intel's processors, so with one the vendor is Intel
//! also where the host is AMD's; AMD's own leaves then go, and with them features that only they
//! explain. Of KVM's paravirtual features the clock stays: others would have the guest execute
//! VMCALL, which is an invalid opcode on AMD. What is missed most are paravirtual spinlocks, where
//! two vCPUs share one processor. The paravirtual end of interrupt is not offered to any guest:
//! without an exit at a handler's begin, QEMU's repeated interrupt (docs/benches.md) ends most
//! nested guests.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vpmu::x86::CpuidLeaf;
use vpmu::x86::intel::Capability;

/// A model of family 6 that Intel never made: no kernel has special handling for it.
const SIGNATURE: u32 = 0x000f_06e1;

const KVMCLOCK: u32 = 1 << 0;
const KVMCLOCK2: u32 = 1 << 3;
const PV_EOI: u32 = 1 << 6;
const KVMCLOCK_STABLE: u32 = 1 << 24;

/// Makes what KVM supports the CPUID of vCPU `id`.
pub(super) fn guest(
    cpuid: &mut CpuId,
    id: u8,
    tsc_khz: u32,
    pmu: Option<&Capability>,
    lazy_deadline: bool,
) {
    const PDCM: u32 = 1 << 15;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => {
                // One processor in this package, with this APIC.
                entry.ebx = entry.ebx & 0xff00 | 1 << 16 | u32::from(id) << 24;
                entry.ecx = entry.ecx & !PDCM | TSC_DEADLINE | HYPERVISOR;
            }
            0x4000_0001 => entry.eax &= !PV_EOI,
            0x8000_0008 => entry.ecx = 0,
            _ => {}
        }
    }
    // Each processor is a package of its own: no topology to tell. Nor is there a PMU of KVM's.
    cpuid.retain(|entry| {
        !matches!(
            entry.function,
            4 | 0x0a | 0x0b | 0x1f | 0x23 | 0x8000_001d | 0x8000_001e | 0x8000_0022 | 0x8000_0026
        )
    });
    if let Some(capability) = pmu {
        become_intel(cpuid, tsc_khz);
        vpmu_kvm::set_cpuid(cpuid, capability);
    }
    if lazy_deadline {
        vpmu_kvm::set_deadline_cpuid(cpuid);
    }
}

/// What the guest's drivers of an architectural PMU look for.
fn become_intel(cpuid: &mut CpuId, tsc_khz: u32) {
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            0 => {
                entry.eax = 0x16;
                (entry.ebx, entry.edx, entry.ecx) = (0x756e_6547, 0x4965_6e69, 0x6c65_746e);
            }
            1 => entry.eax = SIGNATURE,
            0x4000_0001 => entry.eax &= KVMCLOCK | KVMCLOCK2 | KVMCLOCK_STABLE,
            // Address widths and the extended features that Intel has too.
            0x8000_0000 => entry.eax = 0x8000_0008,
            0x8000_0001 => {
                entry.eax = 0;
                entry.ebx = 0;
                entry.ecx &= 1 << 0 | 1 << 5 | 1 << 8; // LAHF, LZCNT, PREFETCHW
                entry.edx &= 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
            }
            0x8000_0008 => (entry.ebx, entry.edx) = (0, 0),
            _ => {}
        }
    }
    cpuid.retain(|entry| entry.function <= 0x8000_0008);
    let hz = tsc_khz.saturating_mul(1000);
    let mhz = tsc_khz / 1000;
    let crystal = CpuidLeaf {
        eax: 1,
        ebx: 1,
        ecx: hz,
        edx: 0,
    };
    let frequency = CpuidLeaf {
        eax: mhz,
        ebx: mhz,
        ecx: 100,
        edx: 0,
    };
    if u64::from(tsc_khz) * 1000 == u64::from(hz) {
        replace(cpuid, 0x15, &[crystal]);
    }
    replace(cpuid, 0x16, &[frequency]);
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
