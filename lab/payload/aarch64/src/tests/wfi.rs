//! WFI together with the PMU's interrupt.

use super::Context;
use super::interrupt::{arm, expect_one, minus};
use crate::encoding::*;
use crate::gic;
use crate::loops::{interruptible, spin, wait_for_interrupt};
use crate::percpu;
use crate::pmu::{CYCLE, read, write};
use vpmu_payload_harness::{Pass, Verdict, check};

/// Checks that the PMU wakes a halted CPU, interrupts masked or not.
pub(super) fn wakes(cx: &Context) -> Verdict {
    // If cycles stand still in WFI, the timer wakes the CPU.
    let safety = gic::timer_frequency() / 10;
    cx.gic.enable(cx.machine.timer);
    arm(cx, 1_000_000)?;
    gic::start_timer(safety);
    // An interrupt of a monitor's below may end WFI, too.
    loop {
        wait_for_interrupt();
        if gic::timer_fired() || read(PMOVSSET_EL0)? != 0 {
            break;
        }
    }
    if gic::timer_fired() {
        // What a monitor below has taken comes all the same.
        interruptible(|| spin(1_000));
        return Ok(Pass::Skip("cycles stand still in WFI"));
    }
    check("flags", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    check(
        "next interrupt",
        gic::next_interrupt(),
        cx.machine.pmi.into(),
    )?;
    gic::stop_timer();
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    // With interrupts unmasked, the interrupt is taken at the WFI.
    percpu::this().reset();
    write(PMCCNTR_EL0, minus(1_000_000))?;
    gic::start_timer(safety);
    while percpu::this().taken_any() == 0 {
        interruptible(wait_for_interrupt);
    }
    check("timer", gic::timer_fired().into(), 0)?;
    gic::stop_timer();
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that WFI does not halt while the interrupt waits.
pub(super) fn when_pending(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    spin(100_000);
    cx.gic.enable(cx.machine.timer);
    gic::start_timer(gic::timer_frequency());
    wait_for_interrupt();
    check("timer", gic::timer_fired().into(), 0)?;
    gic::stop_timer();
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}
