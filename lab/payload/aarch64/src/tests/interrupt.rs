//! The PMU's interrupt: a level, PMOVS & PMINTEN while PMCR.E is set, that
//! comes through the GIC as a PPI.

use super::{Context, Test, wfi};
use crate::encoding::*;
use crate::gic;
use crate::loops::{self, interruptible, spin, wait_for_interrupt};
use crate::percpu::{self, PmiAction};
use crate::pmu::{CYCLE, PMCR_E, PMCR_LC, event, read, write};
use vpmu_payload_harness::{Deviation, Failure, Pass, Verdict, check, check_or, check_range};

pub(super) const TESTS: &[Test] = &[
    ("interrupt.delivered", delivered),
    ("interrupt.event_counter", event_counter),
    ("interrupt.at_el0", at_el0),
    ("interrupt.every_counter", every_counter),
    ("interrupt.sw_incr", software_increment),
    ("interrupt.pmovsset", flag_by_software),
    ("interrupt.pminten_off", not_enabled),
    ("interrupt.pminten_late", enabled_late),
    ("interrupt.let_through_late", let_through_late),
    ("interrupt.pmcr_e_off", globally_off),
    ("interrupt.pending_while_masked", pending_while_masked),
    ("interrupt.dropped_while_masked", dropped_while_masked),
    ("interrupt.dropped_by_pminten", dropped_by_pminten),
    ("interrupt.fires_again", fires_again),
    ("interrupt.one_for_two", one_for_two),
    ("interrupt.repeated", repeated),
    ("interrupt.second_without_rewrite", |cx| {
        second_without_rewrite(cx, 0)
    }),
    ("interrupt.second_cycle_counter", |cx| {
        second_without_rewrite(cx, CYCLE)
    }),
    ("interrupt.wakes_wfi", wfi::wakes),
    ("interrupt.wfi_when_pending", wfi::when_pending),
    ("interrupt.split_end", split_end),
];

/// QEMU (10.0, `pmcr_write`) changes E without looking at the line again.
const E_LEAVES_LINE: Deviation = Deviation(
    "QEMU: PMCR.E = 0 does not drop the interrupt line until the next write to PMOVS or PMINTEN",
);

/// Debian's QEMU (10.0, `pmevcntr_op_finish`) sets its timer one event early. The timer
/// finds no overflow when it fires, and QEMU sets no timer for the event that
/// is left. QEMU sets none for a counter at exactly 0 either.
const OVERFLOW_LATE: Deviation = Deviation(
    "QEMU: an overflow is not seen until something touches the PMU or changes the exception level",
);

/// A level that drops before the CPU takes it may already have been taken on
/// the guest's behalf. The GIC only promises to see the drop in finite time,
/// and drivers cope (they find no flag and return).
pub(super) const TAKEN_ON_BEHALF: Deviation =
    Deviation("the interrupt, dropped before it was taken, still comes once");

/// Returns `-events` for a cycle counter of 64 bits.
pub(super) const fn minus(events: u64) -> u64 {
    events.wrapping_neg()
}

/// Makes the cycle counter overflow after `cycles`, with its interrupt on.
pub(super) fn arm(cx: &Context, cycles: u64) -> Result<(), Failure> {
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    cx.pmu.set_up(CYCLE, 0, minus(cycles))?;
    write(PMCNTENSET_EL0, 1 << CYCLE)
}

fn taken(cx: &Context) -> u64 {
    percpu::this().taken(cx.machine.pmi)
}

/// Checks that there was one interrupt, one flag, and nothing else.
pub(super) fn expect_one(cx: &Context, n: u8) -> Result<(), Failure> {
    check("interrupts", taken(cx), 1)?;
    check("any interrupts", percpu::this().taken_any(), 1)?;
    check("flags in the interrupt", percpu::this().pmi_flags(), 1 << n)?;
    check("flags after", read(PMOVSSET_EL0)?, 0)?;
    check("active after", cx.gic.is_active(cx.machine.pmi).into(), 0)
}

pub(super) fn delivered(cx: &Context) -> Verdict {
    arm(cx, 100_000)?;
    interruptible(|| spin(1_000_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

fn event_counter(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    let event = if cx.pmu.offers(event::INST_RETIRED) {
        event::INST_RETIRED
    } else {
        event::CPU_CYCLES
    };
    let n = cx.pmu.counters - 1;
    cx.gic.enable(cx.machine.pmi);
    write(PMINTENSET_EL1, 1 << n)?;
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu
        .set_up(n, event.into(), minus(100_000) & 0xffff_ffff)?;
    interruptible(|| loops::counted(1 << n, 1_000_000));
    expect_one(cx, n)?;
    Ok(Pass::Ok)
}

/// Checks a counter that overflows at EL0: the interrupt is taken when EL1
/// unmasks.
fn at_el0(cx: &Context) -> Verdict {
    arm(cx, 100_000)?;
    loops::spin_at_el0(1_000_000)?;
    check("waits", gic::interrupt_waits().into(), 1)?;
    interruptible(|| spin(10));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that every counter can interrupt, and only with its own enable.
fn every_counter(cx: &Context) -> Verdict {
    let mut pass = Pass::Ok;
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..cx.pmu.counters {
        percpu::this().reset();
        write(PMINTENCLR_EL1, !0)?;
        write(PMINTENSET_EL1, 1 << n)?;
        cx.pmu
            .set_up(n, event::CPU_CYCLES.into(), minus(50_000) & 0xffff_ffff)?;
        write(PMCNTENSET_EL0, 1 << n)?;
        pass = pass.and(spin_to_overflow(cx, n)?);
        write(PMCNTENCLR_EL0, 1 << n)?;
        expect_one(cx, n)?;
    }
    Ok(pass)
}

/// Runs until counter `n` must have interrupted, without touching it. If that
/// is not enough, the function touches the counter.
fn spin_to_overflow(cx: &Context, n: u8) -> Verdict {
    let before = taken(cx);
    interruptible(|| spin(500_000));
    if taken(cx) > before {
        return Ok(Pass::Ok);
    }
    cx.pmu.value(n)?;
    interruptible(|| spin(10));
    Ok(Pass::Deviates(OVERFLOW_LATE))
}

fn software_increment(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E)?;
    write(PMINTENSET_EL1, 1)?;
    cx.pmu.set_up(0, event::SW_INCR.into(), 0xffff_ffff)?;
    write(PMCNTENSET_EL0, 1)?;
    write(PMSWINC_EL0, 1)?;
    interruptible(|| spin(1_000));
    expect_one(cx, 0)?;
    Ok(Pass::Ok)
}

/// Checks that a flag set by software interrupts like any other.
fn flag_by_software(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E)?;
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    write(PMOVSSET_EL0, 1 << CYCLE)?;
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

fn not_enabled(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    write(PMINTENCLR_EL1, !0)?;
    interruptible(|| spin(100_000));
    check("interrupts", percpu::this().taken_any(), 0)?;
    check("flags", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that enabling the interrupt of a counter that has overflowed raises
/// it.
fn enabled_late(cx: &Context) -> Verdict {
    not_enabled(cx)?;
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks an overflow that the interrupt controller lets through only later, and one whose flag is clear by then.
fn let_through_late(cx: &Context) -> Verdict {
    for comes in [true, false] {
        percpu::this().reset();
        arm(cx, 10_000)?;
        cx.gic.disable(cx.machine.pmi);
        interruptible(|| spin(20_000));
        check("while disabled", taken(cx), 0)?;
        check("flags", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
        if !comes {
            write(PMOVSCLR_EL0, 1 << CYCLE)?;
        }
        cx.gic.enable(cx.machine.pmi);
        interruptible(|| spin(1_000));
        if comes {
            expect_one(cx, CYCLE)?;
        } else {
            check("afterwards", taken(cx), 0)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that no interrupt comes while PMCR.E is 0, although flag and enable
/// are set.
fn globally_off(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.pmi);
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    write(PMOVSSET_EL0, 1 << CYCLE)?;
    interruptible(|| spin(1_000));
    check("interrupts while E is 0", percpu::this().taken_any(), 0)?;
    write(PMOVSCLR_EL0, 1 << CYCLE)?;
    // E is set, the line goes high, and E is cleared again, all while masked.
    write(PMCR_EL0, PMCR_E)?;
    write(PMOVSSET_EL0, 1 << CYCLE)?;
    check("waits with E", gic::interrupt_waits().into(), 1)?;
    write(PMCR_EL0, 0)?;
    spin(1_000);
    interruptible(|| spin(1_000));
    let first = check_or("interrupts after E = 0", taken(cx), 0, (1, E_LEAVES_LINE))?;
    check("E", read(PMCR_EL0)? & PMCR_E, 0)?;
    Ok(first)
}

/// Checks that an overflow while interrupts are masked waits, and comes once.
fn pending_while_masked(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    check("waits before", gic::interrupt_waits().into(), 0)?;
    spin(100_000);
    check("flags", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    check("waits", gic::interrupt_waits().into(), 1)?;
    check(
        "next interrupt",
        gic::next_interrupt(),
        cx.machine.pmi.into(),
    )?;
    check("taken while masked", percpu::this().taken_any(), 0)?;
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that clearing the flag while masked takes the interrupt back.
fn dropped_while_masked(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    spin(100_000);
    check("waits", gic::interrupt_waits().into(), 1)?;
    write(PMOVSCLR_EL0, !0)?;
    expect_dropped(cx)
}

/// Checks that disabling the counter's interrupt takes the interrupt back.
fn dropped_by_pminten(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    spin(100_000);
    check("waits", gic::interrupt_waits().into(), 1)?;
    write(PMINTENCLR_EL1, !0)?;
    let verdict = expect_dropped(cx);
    write(PMOVSCLR_EL0, !0)?;
    verdict
}

fn expect_dropped(cx: &Context) -> Verdict {
    spin(10_000);
    interruptible(|| spin(10_000));
    check_or("interrupts", taken(cx), 0, (1, TAKEN_ON_BEHALF))
}

/// Checks that a handler that leaves the line high is entered again.
fn fires_again(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    percpu::this().set_pmi_action(PmiAction::KeepOnce);
    interruptible(|| spin(100_000));
    check("interrupts", taken(cx), 2)?;
    check("flags", read(PMOVSSET_EL0)?, 0)?;
    check("active after", cx.gic.is_active(cx.machine.pmi).into(), 0)?;
    Ok(Pass::Ok)
}

/// Checks that two counters that overflowed while masked are one interrupt.
fn one_for_two(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    arm(cx, 10_000)?;
    write(PMINTENSET_EL1, 1)?;
    cx.pmu
        .set_up(0, event::CPU_CYCLES.into(), minus(10_000) & 0xffff_ffff)?;
    write(PMCNTENSET_EL0, 1)?;
    spin(100_000);
    interruptible(|| spin(1_000));
    check("interrupts", taken(cx), 1)?;
    check("flags", percpu::this().pmi_flags(), 1 << CYCLE | 1)?;
    Ok(Pass::Ok)
}

/// Checks the life of a sampling profiler: overflow, handle, rewrite.
fn repeated(cx: &Context) -> Verdict {
    arm(cx, 10_000)?;
    for count in 1..=20 {
        write(PMCCNTR_EL0, minus(10_000))?;
        interruptible(|| spin(100_000));
        check("interrupts", taken(cx), count)?;
    }
    Ok(Pass::Ok)
}

/// Checks that a counter that nobody rewrites interrupts again after 2^32
/// events. Spinning would take too long, so the test runs only where cycles go
/// on in WFI.
fn second_without_rewrite(cx: &Context, n: u8) -> Verdict {
    if n != CYCLE && cx.pmu.counters <= n {
        return Ok(Pass::Skip("no event counter"));
    }
    let (timer, second) = (cx.machine.timer, gic::timer_frequency());
    let cycles = if n == CYCLE {
        0
    } else {
        event::CPU_CYCLES.into()
    };
    write(PMCR_EL0, PMCR_E)?;
    if n == CYCLE && read(PMCR_EL0)? & PMCR_LC != 0 {
        return Ok(Pass::Skip("PMCR.LC is RES1 without AArch32"));
    }
    cx.pmu.set_up(n, cycles, 0)?;
    write(PMCNTENSET_EL0, 1 << n)?;
    cx.gic.enable(timer);
    gic::start_timer(second / 100);
    gic::wait_for_timer();
    // The handler stops the timer, whose interrupt a monitor below has taken.
    interruptible(|| spin(1_000));
    // The first count takes 10 ms. At this rate, 2^32 cycles take 20 s at most.
    if cx.pmu.value(n)? < 2_500_000 {
        return Ok(Pass::Skip("cycles stand still in WFI"));
    }

    cx.gic.enable(cx.machine.pmi);
    percpu::this().reset();
    cx.pmu.set_up(n, cycles, minus(100_000) & 0xffff_ffff)?;
    write(PMINTENSET_EL1, 1 << n)?;
    let pass = spin_to_overflow(cx, n)?;
    check("first", taken(cx), 1)?;
    // The timer ticks as under an operating system. The ticks end the wait if
    // the second interrupt does not come, and suffice for a machine that would
    // be late without them.
    let end = gic::now() + 25 * second;
    while gic::now() < end {
        gic::start_timer(second / 10);
        wait_for_interrupt();
        interruptible(|| spin(10));
        if taken(cx) > 1 {
            break;
        }
    }
    gic::stop_timer();
    check("interrupts", taken(cx), 2)?;
    Ok(pass)
}

/// Checks the same with interrupts ended in two steps (EOIR drops the priority,
/// DIR deactivates).
fn split_end(cx: &Context) -> Verdict {
    gic::set_split_end(true);
    arm(cx, 10_000)?;
    interruptible(|| spin(100_000));
    let first = expect_one(cx, CYCLE);
    percpu::this().reset();
    write(PMCCNTR_EL0, minus(10_000))?;
    interruptible(|| spin(100_000));
    gic::set_split_end(false);
    first?;
    check_range("second", taken(cx), 1, 1)?;
    Ok(Pass::Ok)
}
