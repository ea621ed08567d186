//! What this CPU's PMU is and can do.
//!
//! UNSAFETY: switches stage 2 off and on around the probe; the guest does not run yet.

use vpmu::arm::{
    PmuVersion, Register,
    partition::{Features, PmuRegisters},
};
use vpmu_monitor::{
    regs::HcrEl2,
    world::{guest_pmu::Hardware, offer::HCR_OPEN},
};

use super::{
    pmu_registers::PhysicalPmu,
    probe,
    sysreg::{isb, read_sysreg, write_sysreg},
};

/// Those bits of [`HCR_OPEN`] that route interrupts to EL2.
const HCR_INTERRUPTS: HcrEl2 = HcrEl2::FMO.union(HcrEl2::IMO);

/// This CPU's PMU, after trying its partition; `None` when there is no PMUv3.
pub(crate) fn detect_pmu() -> Option<Hardware> {
    let dfr0 = read_sysreg!("id_aa64dfr0_el1");
    let version = PmuVersion::from_id_aa64dfr0(dfr0)?;
    let features = Features::from_registers(
        dfr0,
        read_sysreg!("id_aa64mmfr0_el1"),
        read_sysreg!("mpidr_el1"),
    )?;
    let pmu = &mut PhysicalPmu;
    let pmcr = pmu.read(Register::Pmcr);
    let counters = (pmcr >> 11 & 0x1f) as u8;
    // The trial's own accesses at EL1 must neither trap nor see a stage 2. Interrupts are not routed to EL2
    // either: an interrupt that ends an access before it is made would look like isolation.
    // SAFETY: the guest is not running.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN.difference(HCR_INTERRUPTS).bits());
    }
    isb();
    let isolation = probe::isolation(counters, &features);
    // SAFETY: as above.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN.union(HcrEl2::VM).bits());
    }
    isb();
    Some(Hardware {
        features,
        isolation,
        el3: read_sysreg!("id_aa64pfr0_el1") >> 12 & 0xf != 0,
        pmcr,
        events: [pmu.read(Register::Pmceid0), pmu.read(Register::Pmceid1)],
        pmmir: if version >= PmuVersion::V3p4 {
            pmu.read(Register::Pmmir)
        } else {
            0
        },
    })
}
