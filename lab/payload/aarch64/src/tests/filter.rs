//! Filter bits, which select the exception levels at which a counter counts.

use super::{Context, Test};
use crate::encoding::*;
use crate::loops::ROUND;
use crate::pmu::{
    CYCLE, FILTER_NSH, FILTER_NSK, FILTER_NSU, FILTER_P, FILTER_U, PMCR_E, PMCR_LC, event, write,
};
use crate::psci;
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("filter.event_counter", event_counter),
    ("filter.cycle_counter", cycle_counter),
    ("filter.sw_incr", software_increment),
    ("filter.nsh", el2_is_not_counted),
    ("filter.nsh_cycles", cycles_of_el2_are_not_counted),
    ("filter.change_running", change_running),
];

/// Whether EL1 and EL0 are counted.
type Counted = (bool, bool);

/// Filter bits, with the counted levels without EL3 (where NSK and NSU are
/// RES0), and with EL3, in the non-secure state.
const FILTERS: &[(u64, Counted, Counted)] = &[
    (0, (true, true), (true, true)),
    (FILTER_P, (false, true), (false, true)),
    (FILTER_U, (true, false), (true, false)),
    (FILTER_P | FILTER_U, (false, false), (false, false)),
    (FILTER_NSK, (true, true), (false, true)),
    (FILTER_NSU, (true, true), (true, false)),
    (FILTER_P | FILTER_NSK, (false, true), (true, true)),
    (FILTER_U | FILTER_NSU, (true, false), (true, true)),
    (
        FILTER_P | FILTER_U | FILTER_NSK | FILTER_NSU,
        (false, false),
        (true, true),
    ),
    (FILTER_NSH, (true, true), (true, true)),
    (FILTER_NSH | FILTER_P, (false, true), (false, true)),
    (FILTER_NSH | FILTER_U, (true, false), (true, false)),
];

fn event_counter(cx: &Context) -> Verdict {
    if !cx.pmu.offers(event::INST_RETIRED) || cx.pmu.counters == 0 {
        return Ok(Pass::Skip("INST_RETIRED is not offered"));
    }
    write(PMCR_EL0, PMCR_E)?;
    let exactly = |what: &str, bits: u64, got, counted| {
        let want = if counted { 1_000 * ROUND } else { 0 };
        check(format_args!("{what} with {bits:#x}"), got, want)
    };
    each_filter(cx, |bits, el1, el0| {
        let event = bits | u64::from(event::INST_RETIRED);
        exactly("EL1", bits, cx.pmu.count_rounds(0, event)?, el1)?;
        exactly("EL0", bits, cx.pmu.count_rounds_at_el0(0, event)?, el0)
    })
}

fn cycle_counter(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    let roughly = |what: &str, bits: u64, got, counted| {
        let (least, most) = if counted { (100, 100_000) } else { (0, 0) };
        check_range(format_args!("{what} with {bits:#x}"), got, least, most)
    };
    each_filter(cx, |bits, el1, el0| {
        roughly("EL1", bits, cx.pmu.count_rounds(CYCLE, bits)?, el1)?;
        roughly("EL0", bits, cx.pmu.count_rounds_at_el0(CYCLE, bits)?, el0)
    })
}

fn each_filter(
    cx: &Context,
    mut try_one: impl FnMut(u64, bool, bool) -> Result<(), Failure>,
) -> Verdict {
    for &(bits, without_el3, with_el3) in FILTERS {
        let (el1, el0) = if cx.pmu.el3 { with_el3 } else { without_el3 };
        try_one(bits, el1, el0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that SW_INCR is an event like others: a filter excludes it, too.
fn software_increment(cx: &Context) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    cx.pmu.set_up(0, FILTER_P, 0)?;
    cx.pmu.set_up(1, FILTER_U, 0)?;
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 3)?;
    write(PMUSERENR_EL0, 2)?;
    for _ in 0..3 {
        write(PMSWINC_EL0, 3)?;
    }
    crate::cell::write_at_el0(PMSWINC_EL0, 3)?;
    check("counter with P", cx.pmu.value(0)?, 1)?;
    check("counter with U", cx.pmu.value(1)?, 3)?;
    Ok(Pass::Ok)
}

/// Checks that a monitor's work at EL2 on the guest's behalf is not counted,
/// even with NSH. Calls to the monitor cost the guest one instruction each (and
/// the loop around).
fn el2_is_not_counted(cx: &Context) -> Verdict {
    if !cx.pmu.offers(event::INST_RETIRED) || cx.pmu.counters == 0 {
        return Ok(Pass::Skip("INST_RETIRED is not offered"));
    }
    calls_cost_the_same_with_nsh(cx, 0, event::INST_RETIRED.into())
}

/// Checks that cycles of EL2 are not counted either.
fn cycles_of_el2_are_not_counted(cx: &Context) -> Verdict {
    calls_cost_the_same_with_nsh(cx, CYCLE, 0)
}

fn calls_cost_the_same_with_nsh(cx: &Context, n: u8, event: u64) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    let calls = |bits: u64, count: u64| -> Result<u64, Failure> {
        cx.pmu.set_up(n, bits | event, 0)?;
        write(PMCNTENSET_EL0, 1 << n)?;
        for _ in 0..count {
            psci::version();
        }
        write(PMCNTENCLR_EL0, 1 << n)?;
        Ok(cx.pmu.value(n)?)
    };
    let cost = |bits| Ok::<_, Failure>(calls(bits, 110)?.wrapping_sub(calls(bits, 10)?));
    let without = cost(0)?;
    check_range("100 calls", without, 100, 20_000)?;
    check("100 calls with NSH", cost(FILTER_NSH)?, without)?;
    check("100 calls, again", cost(0)?, without)?;
    Ok(Pass::Ok)
}

/// Checks that a filter written to a running counter holds at once, and the
/// count so far stays.
fn change_running(cx: &Context) -> Verdict {
    cx.pmu.set_up(CYCLE, 0, 0)?;
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    write(PMCNTENSET_EL0, 1 << CYCLE)?;
    crate::loops::spin(1_000);
    write(PMCCFILTR_EL0, FILTER_P)?;
    let stopped = cx.pmu.value(CYCLE)?;
    check_range("before", stopped, 100, 1_000_000)?;
    crate::loops::spin(1_000);
    check("filtered", cx.pmu.value(CYCLE)?, stopped)?;
    write(PMCCFILTR_EL0, 0)?;
    crate::loops::spin(1_000);
    check_range("after", cx.pmu.value(CYCLE)? - stopped, 100, 1_000_000)?;
    Ok(Pass::Ok)
}
