//! PSCI, and with it the other CPUs: each is started, runs all tests, stops,
//! and can be started again.

use super::{ANSWERS, ASK, Context, DONE, Test};
use crate::entry;
use crate::gic;
use crate::loops::{interruptible, spin, wait_for_interrupt};
use crate::{percpu, psci};
use vpmu_payload_harness::{BootArgs, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("psci.version", version),
    ("psci.unknown_function", unknown_function),
    ("psci.cpu_on_errors", cpu_on_errors),
    ("psci.affinity_info", affinity_info),
    ("psci.suspend_errors", suspend_errors),
    ("psci.other_cpus", other_cpus),
    ("psci.other_cpus_again", other_cpus_again),
];

const NOT_SUPPORTED: i64 = -1;
const INVALID_PARAMETERS: i64 = -2;
const ALREADY_ON: i64 = -4;
const ON: i64 = 0;
const OFF: i64 = 1;

/// An affinity that no CPU has.
const NOBODY: u64 = 0xab_00cd_ef00;

/// Fails unless a call returned `want`.
fn gives(what: &str, got: i64, want: i64) -> Result<(), vpmu_payload_harness::Failure> {
    // Functions of 32 bits give errors in the lower half only.
    let low = |value: i64| value as u64 & 0xffff_ffff;
    check(what, low(got), low(want))
}

fn version(_: &Context) -> Verdict {
    check_range("version", psci::version() as u64, 2, 0x1_ffff)?;
    Ok(Pass::Ok)
}

fn unknown_function(_: &Context) -> Verdict {
    gives(
        "function 0x840000ff",
        psci::call(0x8400_00ff, [0; 3]),
        NOT_SUPPORTED,
    )?;
    gives(
        "function 0xc40000ff",
        psci::call(0xc400_00ff, [0; 3]),
        NOT_SUPPORTED,
    )?;
    Ok(Pass::Ok)
}

fn cpu_on_errors(cx: &Context) -> Verdict {
    let entry = entry::secondary_address();
    gives(
        "CPU_ON of this CPU",
        psci::cpu_on(cx.machine.cpus[0], entry, 0),
        ALREADY_ON,
    )?;
    gives(
        "CPU_ON of nobody",
        psci::cpu_on(NOBODY, entry, 0),
        INVALID_PARAMETERS,
    )?;
    Ok(Pass::Ok)
}

/// Checks that states that no firmware knows are refused at once, and that the simplest is not.
fn suspend_errors(cx: &Context) -> Verdict {
    // Were such a state taken for another, this CPU would sleep until the timer wakes it.
    cx.gic.enable(cx.machine.timer);
    for state in [0xffff_ffff, 0x8000_0000, 0x0002_0000] {
        gic::start_timer(gic::timer_frequency() / 100);
        gives(
            "CPU_SUSPEND of an unknown state",
            psci::cpu_suspend(state),
            INVALID_PARAMETERS,
        )?;
        check("timer fired", gic::timer_fired().into(), 0)?;
    }
    let mut calls = 0;
    while !gic::timer_fired() {
        gives("CPU_SUSPEND as stand-by", psci::cpu_suspend(0), 0)?;
        calls += 1;
    }
    // An interrupt of a hypervisor's own may end a stand-by, as it may end WFI: the end of a turn does. A call that does not
    // wait is made thousands of times.
    check_range("calls of a stand-by", calls, 1, 1_000)?;
    // The handler stops the timer.
    interruptible(|| spin(1_000));
    check("interrupts", percpu::this().taken(cx.machine.timer), 1)?;
    Ok(Pass::Ok)
}

fn affinity_info(cx: &Context) -> Verdict {
    gives("this CPU", psci::affinity_info(cx.machine.cpus[0]), ON)?;
    gives("nobody", psci::affinity_info(NOBODY), INVALID_PARAMETERS)?;
    for &cpu in &cx.machine.cpus[1..cx.machine.cpu_count] {
        gives("another CPU", psci::affinity_info(cpu), OFF)?;
    }
    Ok(Pass::Ok)
}

fn other_cpus(cx: &Context) -> Verdict {
    start_others(cx)
}

/// Starts the other CPUs one by one, and lets each run its tests and stop. Each runs within a millisecond: what a hypervisor
/// finds out about a CPU is true of others of its kind, and stays true.
fn start_others(cx: &Context) -> Verdict {
    if cx.machine.cpu_count < 2 {
        return Ok(Pass::Skip("one CPU"));
    }
    cx.gic.enable(DONE);
    cx.gic.enable(ASK);
    for index in 1..cx.machine.cpu_count {
        let cpu = cx.machine.cpus[index];
        percpu::this().reset();
        let asked = gic::now();
        gives(
            "CPU_ON",
            psci::cpu_on(cpu, entry::secondary_address(), index as u64),
            0,
        )?;
        // This CPU halts unless it is to be busy: some emulators count its instructions as the other's.
        let is_busy = BootArgs::parse(cx.machine.bootargs).busy;
        let mut answered = 0;
        while percpu::this().taken(DONE) == 0 {
            if !is_busy {
                wait_for_interrupt();
            }
            interruptible(|| spin(1));
            if percpu::this().taken(ASK) > answered {
                answered += 1;
                for intid in 0..ANSWERS {
                    match answered {
                        1 => gic::send(intid, cpu),
                        _ => gic::send_to_others(intid),
                    }
                }
            }
        }
        check(
            "interrupts meanwhile",
            percpu::this().taken_any(),
            1 + answered,
        )?;
        for _ in 0..1_000 {
            if psci::affinity_info(cpu) == OFF {
                break;
            }
            spin(10_000);
        }
        let ticks = percpu::of(index).started().wrapping_sub(asked);
        let within = gic::timer_frequency() / 1_000;
        check_range(
            format_args!("ticks until CPU {index} ran"),
            ticks,
            0,
            within,
        )?;
        gives("AFFINITY_INFO after CPU_OFF", psci::affinity_info(cpu), OFF)?;
    }
    // Nothing was sent to any other CPU.
    check("waits", gic::interrupt_waits().into(), 0)?;
    Ok(Pass::Ok)
}

/// Checks that a CPU starts as well the second time.
fn other_cpus_again(cx: &Context) -> Verdict {
    start_others(cx)
}
