//! The figures of the whole machine, and the moments that the guest's doorbell marks.

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    lock::Shared,
    world::statistics::{CpuStatistics, Snapshot},
};

use super::{
    cpu::{Cpu, Local, cpus},
    sysreg::now,
};

/// The figures of the second guest, where there is one.
pub(crate) static SECOND: CpuStatistics = CpuStatistics::zero();

/// The measurement that the host's samples belong to: its number, and bit 31 when it is over. A guest that does not ring
/// is in measurement 0 until it ends.
static MEASUREMENT: AtomicU32 = AtomicU32::new(0);
const OVER: u32 = 1 << 31;

/// A measurement begins.
pub(crate) fn begin_measurement() {
    let begin = snapshot();
    MARKS.with(|marks| {
        marks.begin = Some(begin);
        marks.end = None;
    });
    MEASUREMENT.store(measurement().wrapping_add(1) & !OVER, Relaxed);
}

/// The measurement ends; its number stays.
pub(crate) fn end_measurement() {
    let end = snapshot();
    MARKS.with(|marks| marks.end = Some(end));
    MEASUREMENT.fetch_or(OVER, Relaxed);
}

/// The number of the last measurement.
pub(crate) fn measurement() -> u32 {
    MEASUREMENT.load(Relaxed) & !OVER
}

/// The number of the measurement that is going on.
pub(crate) fn current_measurement() -> Option<u32> {
    let measurement = MEASUREMENT.load(Relaxed);
    (measurement & OVER == 0).then_some(measurement)
}

/// The moments that the guest's doorbell marked.
pub(crate) struct Marks {
    pub(crate) entered: Snapshot,
    pub(crate) begin: Option<Snapshot>,
    pub(crate) end: Option<Snapshot>,
}

pub(crate) static MARKS: Shared<Marks> = Shared::new(Marks {
    entered: Snapshot::ZERO,
    begin: None,
    end: None,
});

/// The guest is about to be entered, for the first time.
pub(crate) fn mark_entry() {
    let entered = snapshot();
    MARKS.with(|marks| marks.entered = entered);
}

/// The figures of all CPUs, now.
pub(crate) fn snapshot() -> Snapshot {
    Snapshot::take(cpus().iter().map(|cpu| &cpu.statistics), now())
}

/// Brings the count of the monitor's own instructions on this CPU up to date.
pub(crate) fn note_instructions(cpu: &Cpu, local: &Local) {
    if let Some(total) = local
        .pmu
        .as_ref()
        .and_then(|pmu| pmu.own_instructions(&mut PhysicalPmu))
    {
        cpu.statistics.instructions(total);
    }
}
