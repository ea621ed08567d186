//! Each CPU has a PMU of its own: another CPU's PMU is neither visible nor
//! noticeable.

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

/// The other CPU.
const OTHER: usize = 1;
/// Cycles that the other CPU counts. The number is large beside an interrupt
/// and the work of a hypervisor before it lets a halted CPU sleep.
const LONG: u64 = 10_000_000;

/// Whether the other CPU's last job went well.
static WENT_WELL: AtomicBool = AtomicBool::new(false);
/// The other CPU's count.
static COUNTED: AtomicU64 = AtomicU64::new(0);

/// Notes the result of a job on CPU `cpu`.
pub(super) fn note(cpu: usize, done: &Result<(), Failure>) {
    if let Err(Failure(text)) = done {
        ports::print(format_args!("payload: CPU {cpu}: {}\n", text.as_str()));
    }
    WENT_WELL.store(done.is_ok(), Relaxed);
}

/// Does `work` on the other CPU.
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

/// Checks that the job went well, and that only its end reached this CPU.
fn end() -> Result<(), Failure> {
    let cpu = percpu::this();
    if !WENT_WELL.load(Relaxed) {
        return Err(Failure(Text::new(format_args!("it failed on CPU {OTHER}"))));
    }
    let others = cpu.taken_any() - cpu.taken(WAKE);
    check("interrupts", others, 0)
}

/// Checks that registers hold the values written here, whatever the other CPU
/// writes.
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
    check("LVTPC", apic::lvtpc().into(), LVT_NMI.into())?;
    Ok(Pass::Ok)
}

/// Checks that a halted CPU's cycles stand still while the other CPU's go on.
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

/// Checks that a storm on the other CPU does not reach this one: this CPU
/// works, counts, and is not interrupted.
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
        check_range(counter, value, last, u64::MAX)?;
        last = value;
        rounds += 1;
    }
    end()?;
    check_range("rounds of work", rounds, 1, u64::MAX)?;
    Ok(Pass::Ok)
}

/// Checks that INIT leaves a PMU as it is (SDM vol. 3A, table 10-1), and the
/// others' too.
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
