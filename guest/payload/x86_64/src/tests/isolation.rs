//! Each CPU has a PMU of its own: what another one does is not to be seen, nor
//! felt.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::interrupt::storm;
use super::register::{check_filled, fill};
use super::{Context, Test, hostile};
use crate::apic::{self, LVT_NMI};
use crate::percpu::{self, PmiAction};
use crate::pmu::{COUNT, Counter, wait};
use crate::ports;
use crate::smp::{self, Job};
use crate::vectors::WAKE;
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("isolation.registers", registers),
    ("isolation.counts", counts),
    ("isolation.storm_next_door", storm_next_door),
    ("isolation.init", init),
];

/// The CPU next door.
const OTHER: usize = 1;
/// What it counts, cycles: long beside an interrupt and what a hypervisor does
/// before it lets a halted CPU sleep.
const LONG: u64 = 10_000_000;

/// Whether the last job next door went well.
static WENT_WELL: AtomicBool = AtomicBool::new(false);
/// What was counted there.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// Notes how a job on CPU `cpu` went.
pub(super) fn note(cpu: usize, done: &Result<(), Failure>) {
    if let Err(Failure(text)) = done {
        ports::print(format_args!("payload: CPU {cpu}: {}\n", text.as_str()));
    }
    WENT_WELL.store(done.is_ok(), Relaxed);
}

/// Does `work` on the CPU next door.
pub(super) fn next_door(cx: &Context, work: Job) -> Result<(), Failure> {
    match work {
        Job::Disturb => hostile::hostile(cx, 4, LVT_NMI).map(drop),
        Job::Storm => storm(cx, LVT_NMI, PmiAction::StopAndStorm).map(drop),
        _ => {
            let counter = Counter::General(0);
            cx.pmu.configure(counter, COUNT)?;
            cx.pmu.enable(counter.bit())?;
            wait(|| Ok(counter.value()? >= LONG))?;
            COUNTED.store(counter.value()?, Relaxed);
            Ok(())
        }
    }
}

const ALONE: Pass = Pass::Skip("one processor");

/// Hands out a job.
fn begin(cx: &Context, work: Job) {
    WENT_WELL.store(false, Relaxed);
    smp::hand_out(cx.boot, OTHER, work);
}

/// Checks that it went well, and that nothing came here but its end.
fn end() -> Result<(), Failure> {
    let cpu = percpu::this();
    if !WENT_WELL.load(Relaxed) {
        return Err(Failure(Text::new(format_args!("it failed on CPU {OTHER}"))));
    }
    let others = cpu.taken_any() - cpu.taken(WAKE);
    check(format_args!("interrupts"), others, 0)
}

/// Registers hold what was written here, whatever is written there.
fn registers(cx: &Context) -> Verdict {
    if !smp::runs(OTHER) {
        return Ok(ALONE);
    }
    fill(cx)?;
    apic::set_lvtpc(LVT_NMI);
    begin(cx, Job::Disturb);
    smp::wait_for(OTHER);
    end()?;
    check_filled(cx)?;
    check(format_args!("LVTPC"), apic::lvtpc().into(), LVT_NMI.into())?;
    Ok(Pass::Ok)
}

/// A halted CPU's cycles stand still while the other one's go on.
fn counts(cx: &Context) -> Verdict {
    if !smp::runs(OTHER) {
        return Ok(ALONE);
    }
    let counter = Counter::General(0);
    cx.pmu.configure(counter, COUNT)?;
    cx.pmu.enable(counter.bit())?;
    begin(cx, Job::Work);
    smp::wait_for(OTHER);
    let own = counter.value()?;
    end()?;
    let theirs = COUNTED.load(Relaxed);
    check_range(format_args!("{counter} there"), theirs, LONG, u64::MAX)?;
    check_range(format_args!("{counter} here"), own, 1, theirs / 2)?;
    Ok(Pass::Ok)
}

/// A storm there is none here: this CPU works, counts, and is not interrupted.
fn storm_next_door(cx: &Context) -> Verdict {
    if !smp::runs(OTHER) {
        return Ok(ALONE);
    }
    let counter = Counter::General(0);
    cx.pmu.configure(counter, COUNT)?;
    cx.pmu.enable(counter.bit())?;
    apic::set_lvtpc(LVT_NMI);
    let (mut rounds, mut last) = (0, 0);
    begin(cx, Job::Storm);
    while !smp::is_done(OTHER) {
        let value = counter.value()?;
        check_range(format_args!("{counter}"), value, last, u64::MAX)?;
        last = value;
        rounds += 1;
    }
    end()?;
    check_range(format_args!("rounds of work"), rounds, 1, u64::MAX)?;
    Ok(Pass::Ok)
}

/// INIT leaves a PMU as it is (SDM vol. 3A, table 10-1), and the others' too.
fn init(cx: &Context) -> Verdict {
    if !smp::runs(OTHER) {
        return Ok(ALONE);
    }
    fill(cx)?;
    begin(cx, Job::Fill);
    smp::wait_for(OTHER);
    end()?;
    smp::start(cx.boot, OTHER)?;
    begin(cx, Job::CheckFilled);
    smp::wait_for(OTHER);
    end()?;
    check_filled(cx)?;
    Ok(Pass::Ok)
}
