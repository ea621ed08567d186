//! What this CPU's PMU is and can do.
//!
//! UNSAFETY: reads system registers.

use vpmu::arm::{
    PmuVersion, Register,
    partition::{Features, PmuRegisters},
};
use vpmu_monitor::world::guest_pmu::Hardware;

use super::{cpu::Monitor, pmu_registers::PhysicalPmu, probe, sysreg::read_sysreg};

/// This CPU's PMU, after trying its partition; `None` when there is no PMUv3.
pub(crate) fn detect_pmu(monitor: &Monitor) -> Option<Hardware> {
    let dfr0 = read_sysreg!("id_aa64dfr0_el1");
    let version = PmuVersion::from_id_aa64dfr0(dfr0)?;
    let features = Features::from_registers(
        dfr0,
        read_sysreg!("id_aa64mmfr0_el1"),
        read_sysreg!("mpidr_el1"),
        monitor.machine.cpus.iter().copied(),
    )?;
    let pmu = &mut PhysicalPmu;
    let pmcr = pmu.read(Register::Pmcr);
    let counters = (pmcr >> 11 & 0x1f) as u8;
    let findings = probe::findings(counters, monitor.settings.host_counters, &features);
    Some(Hardware {
        features,
        findings,
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
