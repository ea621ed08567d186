//! What this CPU's PMU is and can do.
//!
//! UNSAFETY: reads system registers.

use vpmu::arm::{
    Register,
    partition::{Findings, PmuRegisters},
};
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{lock::Shared, world::guest_pmu::Hardware};

use super::{cpu::Monitor, sysreg::read_sysreg};

/// What CPUs of the same kind have in common: MIDR_EL1, REVIDR_EL1, PMCR_EL0, and the ID registers that the probe goes by.
type Kind = [u64; 6];

/// A machine has few kinds of CPUs. One that finds no room is probed each time.
const KINDS: usize = 8;

/// What the probe has found of each kind.
static PROBED: Shared<[Option<(Kind, Findings)>; KINDS]> = Shared::new([None; KINDS]);

fn kind(pmcr: u64) -> Kind {
    [
        read_sysreg!("midr_el1"),
        read_sysreg!("revidr_el1"),
        pmcr & !PMCR_CONTROL,
        read_sysreg!("id_aa64pfr0_el1"),
        read_sysreg!("id_aa64dfr0_el1"),
        read_sysreg!("id_aa64mmfr0_el1"),
    ]
}

/// PMCR_EL0's bits that software writes.
const PMCR_CONTROL: u64 = 0x7ff;

/// This CPU's PMU, after trying its partition, where no CPU of the same kind has been tried; `None` when there is no PMUv3.
pub(crate) fn detect_pmu(monitor: &Monitor) -> Option<Hardware> {
    let cpus = monitor.machine.cpus.iter().copied();
    let partition = vpmu_el2::partition_config(monitor.settings.host_counters, cpus)?;
    let kind = kind(PhysicalPmu.read(Register::Pmcr));
    let known = PROBED.with(|probed| probed.iter().flatten().find(|(of, _)| *of == kind).copied());
    let findings = if let Some((_, findings)) = known {
        findings
    } else {
        let (counters, host_counters) = (partition.implemented, partition.host_counters);
        let findings = vpmu_el2::probe(counters, host_counters, &partition.features);
        PROBED.with(|probed| {
            if let Some(room) = probed.iter_mut().find(|place| place.is_none()) {
                *room = Some((kind, findings));
            }
        });
        findings
    };
    Some(Hardware {
        emulated: vpmu_el2::emulated_config(&partition),
        partition,
        findings,
    })
}
