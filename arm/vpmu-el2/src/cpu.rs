//! What this CPU has, and what of it traps.
//!
//! UNSAFETY: writes trap registers.

use vpmu::arm::emulated::{EmulatedConfig, Identity};
use vpmu::arm::partition::{
    Features, Isolation, PartitionConfig, PmuRegisters as _, TrapRegisters,
};
use vpmu::arm::{EventFilter, PmuVersion, Register, pmcr};
use vpmu::counter::Policy;

use crate::registers::PhysicalPmu;
use crate::sysreg::{isb, read_sysreg, write_sysreg};

/// Returns what the ID registers of this CPU say. `cpus` are the affinities (MPIDR_EL1) of all CPUs of the machine. `None`:
/// the CPU has no PMUv3.
pub fn features(cpus: impl IntoIterator<Item = u64>) -> Option<Features> {
    let (dfr0, mmfr0) = id_registers();
    Features::from_registers(dfr0, mmfr0, read_sysreg!("mpidr_el1"), cpus)
}

/// Returns how this CPU could be divided, `host_counters` of its counters the host's. Nothing of its isolation is proven:
/// [`probe`](crate::probe) fills that in. `cpus` and `None` as for [`features`].
pub fn partition_config(
    host_counters: u8,
    cpus: impl IntoIterator<Item = u64>,
) -> Option<PartitionConfig> {
    let features = features(cpus)?;
    let pmu = &mut PhysicalPmu;
    Some(PartitionConfig {
        implemented: ((pmu.read(Register::Pmcr) & pmcr::N_MASK) >> pmcr::N_SHIFT) as u8,
        host_counters,
        features,
        isolation: Isolation::NONE,
        filter: EventFilter::default(),
        events: [pmu.read(Register::Pmceid0), pmu.read(Register::Pmceid1)],
    })
}

/// Returns the emulated PMU that is this CPU's own, with the counters that the host does not keep. The fewest accesses of
/// such a PMU trap.
pub fn emulated_config(cpu: &PartitionConfig) -> EmulatedConfig {
    let pmu = &mut PhysicalPmu;
    let pfr0 = read_sysreg!("id_aa64pfr0_el1");
    EmulatedConfig {
        counters: cpu.implemented.saturating_sub(cpu.host_counters),
        version: cpu.features.version,
        // ID_AA64PFR0_EL1.EL3 and EL0.
        el3: pfr0 >> 12 & 0xf != 0,
        aarch32: pfr0 & 0xf == 2,
        identity: Identity::from_pmcr(pmu.read(Register::Pmcr)),
        events: cpu.events,
        pmmir: if cpu.features.version >= PmuVersion::V3p4 {
            pmu.read(Register::Pmmir)
        } else {
            0
        },
        filter: cpu.filter,
        policy: Policy::default(),
    }
}

/// Returns ID_AA64DFR0_EL1 and ID_AA64MMFR0_EL1 of this CPU.
pub fn id_registers() -> (u64, u64) {
    (
        read_sysreg!("id_aa64dfr0_el1"),
        read_sysreg!("id_aa64mmfr0_el1"),
    )
}

/// Writes the trap registers: what the PMU wants, and the hypervisor's `own` bits. `fgt`: FEAT_FGT exists.
pub fn set_traps(pmu: &TrapRegisters, own: &TrapRegisters, fgt: bool) {
    // SAFETY: they only say what traps. The plan says which accesses may go untrapped, and the rest is the caller's.
    unsafe {
        write_sysreg!("mdcr_el2", pmu.mdcr_el2 | own.mdcr_el2);
        if fgt {
            // HDFGRTR_EL2 and HDFGWTR_EL2.
            write_sysreg!("s3_4_c3_c1_4", pmu.hdfgrtr_el2 | own.hdfgrtr_el2);
            write_sysreg!("s3_4_c3_c1_5", pmu.hdfgwtr_el2 | own.hdfgwtr_el2);
        }
    }
    isb();
}
