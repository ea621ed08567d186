//! Overflow flags, without interrupts.

use super::{Context, Test};
use crate::encoding::*;
use crate::loops;
use crate::pmu::{CYCLE, PMCR_E, PMCR_LC, PMCR_LP, event, read, write};
use vpmu_payload_harness::{Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("overflow.event_counter", event_counter),
    ("overflow.at_minus_one", at_minus_one),
    ("overflow.at_zero", at_zero),
    ("overflow.disabled", disabled),
    ("overflow.every_counter", every_counter),
    ("overflow.lp", long_event_counter),
    ("overflow.lc", long_cycle_counter),
    ("overflow.far", far),
    ("overflow.sw_incr", software_increment),
    ("overflow.flags_clear", flags_clear),
    ("overflow.second", second),
    ("overflow.goes_on", goes_on),
];

const LOW: u64 = 0xffff_ffff;

/// Returns `-events` as a counter value of 32 bits.
const fn minus(events: u64) -> u64 {
    events.wrapping_neg() & LOW
}

/// Returns the event that overflow tests count, an exact one where there is
/// one.
fn event(cx: &Context) -> u64 {
    if cx.pmu.offers(event::INST_RETIRED) {
        event::INST_RETIRED.into()
    } else {
        event::CPU_CYCLES.into()
    }
}

fn event_counter(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu.set_up(0, event(cx), minus(100_000))?;
    loops::counted(1, 10);
    check("flags before", read(PMOVSSET_EL0)?, 0)?;
    loops::counted(1, 1_000_000);
    check("flags after", read(PMOVSSET_EL0)?, 1)?;
    check("flags by PMOVSCLR", read(PMOVSCLR_EL0)?, 1)?;
    let value = cx.pmu.value(0)?;
    // From v3p5 on, the counter itself has 64 bits and goes on.
    let carry = if cx.pmu.long_counters() { LOW + 1 } else { 0 };
    check("upper half", value & !LOW, carry)?;
    check_range("lower half", value & LOW, 1_000, 4_000_000)?;
    Ok(Pass::Ok)
}

fn at_minus_one(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu.set_up(0, event(cx), LOW)?;
    loops::counted(1, 1);
    check("flags", read(PMOVSSET_EL0)?, 1)?;
    check_range("value", cx.pmu.value(0)? & LOW, 0, 10_000)?;
    Ok(Pass::Ok)
}

fn at_zero(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, event(cx), 0)?;
    }
    loops::counted(cx.pmu.mask(), 10_000);
    check("flags", read(PMOVSSET_EL0)?, 0)?;
    for n in (0..cx.pmu.counters).chain([CYCLE]) {
        check_range(
            format_args!("counter {n}"),
            cx.pmu.value(n)?,
            1_000,
            1_000_000,
        )?;
    }
    Ok(Pass::Ok)
}

fn disabled(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, event(cx), LOW)?;
    }
    cx.pmu.set_up(CYCLE, 0, LOW)?;
    loops::spin(1_000);
    write(PMSWINC_EL0, !0)?;
    check("flags", read(PMOVSSET_EL0)?, 0)?;
    Ok(Pass::Ok)
}

/// Checks that each counter sets its own flag.
fn every_counter(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    for n in (0..cx.pmu.counters).chain([CYCLE]) {
        let event = if n == CYCLE { 0 } else { event(cx) };
        cx.pmu.set_up(n, event, minus(100))?;
        loops::counted(1 << n, 10_000);
        check(format_args!("counter {n}"), read(PMOVSSET_EL0)?, 1 << n)?;
        write(PMOVSCLR_EL0, 1 << n)?;
    }
    Ok(Pass::Ok)
}

/// Checks that with PMCR.LP, event counters overflow at 64 bits only.
fn long_event_counter(cx: &Context) -> Verdict {
    if !cx.pmu.long_counters() || cx.pmu.counters == 0 {
        return Ok(Pass::Skip("needs PMUv3p5 and an event counter"));
    }
    write(PMCR_EL0, PMCR_E | PMCR_LP)?;
    cx.pmu.set_up(0, event(cx), minus(100))?;
    loops::counted(1, 10_000);
    check("flags at 32 bits", read(PMOVSSET_EL0)?, 0)?;
    check("upper half", cx.pmu.value(0)? >> 32, 1)?;
    cx.pmu.set_up(0, event(cx), 100_u64.wrapping_neg())?;
    loops::counted(1, 10_000);
    check("flags at 64 bits", read(PMOVSSET_EL0)?, 1)?;
    check_range("value", cx.pmu.value(0)?, 100, 10_000_000)?;
    // LP does not apply to the cycle counter.
    cx.pmu.set_up(CYCLE, 0, minus(100))?;
    write(PMOVSCLR_EL0, !0)?;
    if read(PMCR_EL0)? & PMCR_LC == 0 {
        loops::counted(1 << CYCLE, 10_000);
        check("cycle counter's flag", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMCR.LC has the effect on the cycle counter that LP has on the
/// others.
fn long_cycle_counter(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    if read(PMCR_EL0)? & PMCR_LC == 0 {
        cx.pmu.set_up(CYCLE, 0, minus(100))?;
        loops::counted(1 << CYCLE, 10_000);
        check("flags at 32 bits, LC = 0", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
        // The cycle counter has 64 bits in any case.
        check("upper half", read(PMCCNTR_EL0)? >> 32, 1)?;
        write(PMOVSCLR_EL0, !0)?;
    }
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    cx.pmu.set_up(CYCLE, 0, minus(100))?;
    loops::counted(1 << CYCLE, 10_000);
    check("flags at 32 bits, LC = 1", read(PMOVSSET_EL0)?, 0)?;
    cx.pmu.set_up(CYCLE, 0, 100_u64.wrapping_neg())?;
    loops::counted(1 << CYCLE, 10_000);
    check("flags at 64 bits", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    check_range("value", read(PMCCNTR_EL0)?, 100, 10_000_000)?;
    Ok(Pass::Ok)
}

/// Checks a cycle counter whose overflow is as far ahead as 64 bits let it be: no time of the machine's reaches as far.
fn far(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    for value in 0..4 {
        cx.pmu.set_up(CYCLE, 0, value)?;
        loops::counted(1 << CYCLE, 10_000);
        check("flags", read(PMOVSSET_EL0)?, 0)?;
        check_range("value", read(PMCCNTR_EL0)?, 100, 10_000_000)?;
    }
    Ok(Pass::Ok)
}

fn software_increment(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1)?;
    cx.pmu.set_up(0, event::SW_INCR.into(), LOW - 1)?;
    write(PMSWINC_EL0, 1)?;
    check("flags at -1", read(PMOVSSET_EL0)?, 0)?;
    write(PMSWINC_EL0, 1)?;
    check("flags at 0", read(PMOVSSET_EL0)?, 1)?;
    let carry = if cx.pmu.long_counters() { LOW + 1 } else { 0 };
    check("value", cx.pmu.value(0)?, carry)?;
    write(PMOVSCLR_EL0, 1)?;
    write(PMSWINC_EL0, 1)?;
    check("flags at 1", read(PMOVSSET_EL0)?, 0)?;
    if cx.pmu.long_counters() {
        write(PMCR_EL0, PMCR_E | PMCR_LP)?;
        cx.pmu.set_up(0, event::SW_INCR.into(), LOW)?;
        write(PMSWINC_EL0, 1)?;
        check("flags at 32 bits with LP", read(PMOVSSET_EL0)?, 0)?;
        cx.pmu.set_up(0, event::SW_INCR.into(), !0)?;
        write(PMSWINC_EL0, 1)?;
        check("flags at 64 bits with LP", read(PMOVSSET_EL0)?, 1)?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMOVSCLR clears the bits that are written as one, and no others.
fn flags_clear(cx: &Context) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..2 {
        cx.pmu.set_up(n, event(cx), minus(100))?;
    }
    cx.pmu.set_up(CYCLE, 0, minus(100))?;
    let all = 1 << CYCLE | 3;
    write(PMOVSCLR_EL0, 0)?;
    loops::counted(all, 10_000);
    check("all", read(PMOVSSET_EL0)?, all)?;
    write(PMOVSCLR_EL0, 2)?;
    check("without 1", read(PMOVSSET_EL0)?, 1 << CYCLE | 1)?;
    write(PMOVSCLR_EL0, 1 << CYCLE)?;
    check("without the cycle counter", read(PMOVSSET_EL0)?, 1)?;
    // A flag stays when its counter is written.
    write(pmevcntr(0), 0)?;
    check("after a counter write", read(PMOVSSET_EL0)?, 1)?;
    Ok(Pass::Ok)
}

/// Checks overflow after overflow: a flag that was cleared is set again.
fn second(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    for step in 0..3 {
        cx.pmu.set_up(0, event(cx), minus(1_000))?;
        loops::counted(1, 10_000);
        check(format_args!("step {step}"), read(PMOVSSET_EL0)?, 1)?;
        write(PMOVSCLR_EL0, 1)?;
        loops::counted(1, 10_000);
        check(
            format_args!("step {step}, flag clear"),
            read(PMOVSSET_EL0)?,
            0,
        )?;
    }
    Ok(Pass::Ok)
}

/// Checks that the counter goes on through its overflow, exactly.
fn goes_on(cx: &Context) -> Verdict {
    if !cx.pmu.offers(event::INST_RETIRED) || cx.pmu.counters < 2 {
        return Ok(Pass::Skip("INST_RETIRED is not offered"));
    }
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu.set_up(0, event(cx), minus(1_000))?;
    cx.pmu.set_up(1, event(cx), 0)?;
    loops::counted(3, 10_000);
    let (overflowed, plain) = (cx.pmu.value(0)?, cx.pmu.value(1)?);
    check("difference", plain.wrapping_sub(overflowed) & LOW, 1_000)?;
    Ok(Pass::Ok)
}
