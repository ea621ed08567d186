//! Tests of counts. Counts fall into three classes: exact ones, those that must
//! not be zero, and those that nobody can know.
//!
//! An exact count is the difference of two runs of different length. Both runs
//! include the cost of enabling and disabling.

use super::{Context, Test};
use crate::encoding::*;
use crate::loops::{self, ROUND};
use crate::pmu::{CYCLE, PMCR_D, PMCR_E, PMCR_LC, event, read, write};
use vpmu_payload_harness::{Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("count.events", events),
    ("count.instructions", instructions),
    ("count.cycles", cycles),
    ("count.every_counter", every_counter),
    ("count.together", together),
    ("count.disabled", disabled),
    ("count.pmcr_e", globally_disabled),
    ("count.pmcr_d", divided_cycles),
    ("count.rewrite_running", rewrite_running),
    ("count.event_change", event_change),
    ("count.unoffered_event", unoffered_event),
    ("count.sw_incr", software_increment),
    ("count.sw_incr_others", software_increment_others),
    ("count.chain", chain),
];

/// The count of an event in 1,000 rounds of two instructions, one of which is a
/// taken branch.
enum Class {
    /// Between these, in any implementation.
    Between(u64, u64),
    /// Nobody can know.
    Unknowable,
}
use Class::{Between, Unknowable};

/// Common events (Arm ARM DDI 0487, D13.12); tried where PMCEID offers them.
const EVENTS: &[(u16, &str, Class)] = &[
    (0x00, "SW_INCR", Between(0, 0)),
    (0x01, "L1I_CACHE_REFILL", Unknowable),
    (0x03, "L1D_CACHE_REFILL", Unknowable),
    (0x04, "L1D_CACHE", Unknowable),
    (0x06, "LD_RETIRED", Between(0, 0)),
    (0x07, "ST_RETIRED", Between(0, 0)),
    (0x08, "INST_RETIRED", Between(2_000, 2_000)),
    (0x09, "EXC_TAKEN", Between(0, 0)),
    (0x0a, "EXC_RETURN", Between(0, 0)),
    (0x0b, "CID_WRITE_RETIRED", Between(0, 0)),
    (0x0c, "PC_WRITE_RETIRED", Between(1_000, 1_000)),
    (0x0d, "BR_IMMED_RETIRED", Between(1_000, 1_000)),
    (0x0e, "BR_RETURN_RETIRED", Between(0, 0)),
    (0x10, "BR_MIS_PRED", Unknowable),
    (0x11, "CPU_CYCLES", Between(100, 100_000)),
    (0x12, "BR_PRED", Between(1, 100_000)),
    (0x1b, "INST_SPEC", Between(1_000, 100_000)),
    (0x1e, "CHAIN", Between(0, 0)),
    (0x21, "BR_RETIRED", Between(1_000, 1_000)),
    (0x22, "BR_MIS_PRED_RETIRED", Unknowable),
    (0x23, "STALL_FRONTEND", Unknowable),
    (0x24, "STALL_BACKEND", Unknowable),
    (0x3c, "STALL", Unknowable),
];

fn events(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    for (event, name, class) in EVENTS {
        if !cx.pmu.offers(*event) {
            continue;
        }
        // The test uses counter 0: CHAIN counts on odd counters only.
        let got = cx.pmu.count_rounds(0, (*event).into())?;
        if let Between(least, most) = *class {
            check_range(name, got, least, most)?;
        }
    }
    Ok(Pass::Ok)
}

/// Returns an event whose count is known exactly.
fn exact_event(cx: &Context) -> Option<u64> {
    (cx.pmu.offers(event::INST_RETIRED) && cx.pmu.counters > 0)
        .then_some(event::INST_RETIRED.into())
}

const NO_EXACT: Pass = Pass::Skip("INST_RETIRED is not offered");

fn instructions(cx: &Context) -> Verdict {
    let Some(event) = exact_event(cx) else {
        return Ok(NO_EXACT);
    };
    write(PMCR_EL0, PMCR_E)?;
    for rounds in [1, 10, 1_000, 100_000] {
        let got = cx.pmu.count(0, event, rounds)?;
        // Between the first ISB and the end of PMCNTENCLR are the loop and a
        // few instructions.
        check_range(
            format_args!("{rounds} rounds"),
            got,
            rounds * ROUND,
            rounds * ROUND + 8,
        )?;
    }
    Ok(Pass::Ok)
}

fn cycles(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    for rounds in [1_000, 100_000] {
        let got = cx.pmu.count(CYCLE, 0, rounds)?;
        check_range(
            format_args!("{rounds} rounds"),
            got,
            rounds / 10,
            rounds * 100,
        )?;
    }
    Ok(Pass::Ok)
}

fn every_counter(cx: &Context) -> Verdict {
    let Some(event) = exact_event(cx) else {
        return Ok(NO_EXACT);
    };
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..cx.pmu.counters {
        let got = cx.pmu.count_rounds(n, event)?;
        check(format_args!("counter {n}"), got, 1_000 * ROUND)?;
        for other in (0..cx.pmu.counters).filter(|&other| other != n) {
            check(
                format_args!("counter {other} while {n} ran"),
                cx.pmu.value(other)?,
                0,
            )?;
        }
        cx.pmu.set_up(n, 0, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that all counters, enabled at once by one write, count the same.
fn together(cx: &Context) -> Verdict {
    let Some(event) = exact_event(cx) else {
        return Ok(NO_EXACT);
    };
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, event, 0)?;
    }
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    loops::counted(cx.pmu.mask(), 1_000);
    let first = cx.pmu.value(0)?;
    check_range("counter 0", first, 2_000, 2_008)?;
    for n in 1..cx.pmu.counters {
        check(format_args!("counter {n}"), cx.pmu.value(n)?, first)?;
    }
    check_range("cycles", cx.pmu.value(CYCLE)?, 100, 100_000)?;
    Ok(Pass::Ok)
}

fn disabled(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, event::CPU_CYCLES.into(), 5)?;
    }
    cx.pmu.set_up(CYCLE, 0, 5)?;
    loops::spin(1_000);
    for n in (0..cx.pmu.counters).chain([CYCLE]) {
        check(format_args!("counter {n}"), cx.pmu.value(n)?, 5)?;
    }
    Ok(Pass::Ok)
}

fn globally_disabled(cx: &Context) -> Verdict {
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, event::CPU_CYCLES.into(), 5)?;
    }
    cx.pmu.set_up(CYCLE, 0, 5)?;
    loops::counted(cx.pmu.mask(), 1_000);
    for n in (0..cx.pmu.counters).chain([CYCLE]) {
        check(format_args!("counter {n}"), cx.pmu.value(n)?, 5)?;
    }
    // PMCR.E enables the counters here, and stops them again.
    write(PMCNTENSET_EL0, !0)?;
    write(PMCR_EL0, PMCR_E)?;
    loops::spin(1_000);
    write(PMCR_EL0, 0)?;
    let stopped = read(PMCCNTR_EL0)?;
    check_range("cycles", stopped, 100, 1_000_000)?;
    loops::spin(1_000);
    check("cycles after E = 0", read(PMCCNTR_EL0)?, stopped)?;
    Ok(Pass::Ok)
}

/// Checks that PMCR.D counts every 64th cycle, unless LC is set.
fn divided_cycles(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_D)?;
    if read(PMCR_EL0)? & PMCR_D == 0 {
        return Ok(Pass::Skip("PMCR.D is RES0 without AArch32"));
    }
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    let all = cx.pmu.count(CYCLE, 0, 100_000)?;
    write(PMCR_EL0, PMCR_E | PMCR_LC | PMCR_D)?;
    let with_lc = cx.pmu.count(CYCLE, 0, 100_000)?;
    check_range("cycles with D and LC", with_lc, all / 2, all * 2)?;
    write(PMCR_EL0, PMCR_E | PMCR_D)?;
    if read(PMCR_EL0)? & PMCR_LC != 0 {
        return Ok(Pass::Skip("PMCR.LC is RES1 without AArch32"));
    }
    let divided = cx.pmu.count(CYCLE, 0, 100_000)?;
    check_range("cycles with D", divided, all / 128, all / 32)?;
    Ok(Pass::Ok)
}

/// Checks that a running counter goes on from the value written to it.
fn rewrite_running(cx: &Context) -> Verdict {
    let Some(event) = exact_event(cx) else {
        return Ok(NO_EXACT);
    };
    cx.pmu.set_up(0, event, 0)?;
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1)?;
    loops::spin(10_000);
    write(pmevcntr(0), 0x10_0000)?;
    loops::spin(1_000);
    write(PMCNTENCLR_EL0, 1)?;
    // The accesses themselves take some hundred instructions.
    check_range(
        "counter",
        cx.pmu.value(0)?,
        0x10_0000 + 2_000,
        0x10_0000 + 3_000,
    )?;
    Ok(Pass::Ok)
}

/// Checks a new event for a running counter: the value stays, and grows by the
/// new event only.
fn event_change(cx: &Context) -> Verdict {
    let Some(event) = exact_event(cx) else {
        return Ok(NO_EXACT);
    };
    cx.pmu.set_up(0, event, 0)?;
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1)?;
    loops::spin(1_000);
    write(pmevtyper(0), event::SW_INCR.into())?;
    let stopped = cx.pmu.value(0)?;
    check_range("before", stopped, 2_000, 3_000)?;
    loops::spin(1_000);
    check("while SW_INCR", cx.pmu.value(0)?, stopped)?;
    write(pmevtyper(0), event)?;
    loops::spin(1_000);
    write(PMCNTENCLR_EL0, 1)?;
    check_range("after", cx.pmu.value(0)? - stopped, 2_000, 3_000)?;
    Ok(Pass::Ok)
}

/// Checks that a common event that PMCEID does not offer counts nothing.
fn unoffered_event(cx: &Context) -> Verdict {
    let Some(event) = (0..0x40).find(|&event| !cx.pmu.offers(event)) else {
        return Ok(Pass::Skip("all common events are offered"));
    };
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    let got = cx.pmu.count(0, event.into(), 1_000)?;
    check(format_args!("event {event:#x}"), got, 0)?;
    Ok(Pass::Ok)
}

fn software_increment(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, !0)?;
    for _ in 0..10 {
        write(PMSWINC_EL0, !0)?;
    }
    write(PMSWINC_EL0, 1)?;
    write(PMSWINC_EL0, 0)?;
    check("counter 0", cx.pmu.value(0)?, 11)?;
    for n in 1..cx.pmu.counters {
        check(format_args!("counter {n}"), cx.pmu.value(n)?, 10)?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMSWINC moves no counter of another event, no disabled one, and
/// none at all while PMCR.E is 0.
fn software_increment_others(cx: &Context) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    let unoffered = (1..0x40)
        .find(|&event| !cx.pmu.offers(event))
        .unwrap_or(0x3e);
    cx.pmu.set_up(0, unoffered.into(), 7)?;
    cx.pmu.set_up(1, event::SW_INCR.into(), 7)?;
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1)?;
    write(PMSWINC_EL0, !0)?;
    check("another event", cx.pmu.value(0)?, 7)?;
    check("a disabled counter", cx.pmu.value(1)?, 7)?;
    write(PMCNTENSET_EL0, 2)?;
    write(PMCR_EL0, 0)?;
    write(PMSWINC_EL0, !0)?;
    check("while E is 0", cx.pmu.value(1)?, 7)?;
    write(PMCR_EL0, PMCR_E)?;
    write(PMSWINC_EL0, !0)?;
    check("enabled", cx.pmu.value(1)?, 8)?;
    Ok(Pass::Ok)
}

/// Checks that CHAIN counts the overflows of the even counter below.
fn chain(cx: &Context) -> Verdict {
    if !cx.pmu.offers(event::CHAIN) {
        return Ok(Pass::Skip("CHAIN is not offered"));
    }
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    write(PMCR_EL0, PMCR_E)?;
    // Software increments take the counter to 0xffff_fffe, then over from -1 to
    // 0, then on from 0.
    cx.pmu.set_up(0, event::SW_INCR.into(), 0xffff_fffe)?;
    cx.pmu.set_up(1, event::CHAIN.into(), 0)?;
    write(PMCNTENSET_EL0, 3)?;
    for (step, (low, high)) in [(0xffff_ffff, 0), (0, 1), (1, 1)].into_iter().enumerate() {
        write(PMSWINC_EL0, 1)?;
        check(
            format_args!("low, step {step}"),
            cx.pmu.value(0)? & 0xffff_ffff,
            low,
        )?;
        check(format_args!("high, step {step}"), cx.pmu.value(1)?, high)?;
    }
    // The carry goes through to the odd counter's own overflow.
    write(PMOVSCLR_EL0, !0)?;
    cx.pmu.set_up(0, event::SW_INCR.into(), 0xffff_ffff)?;
    cx.pmu.set_up(1, event::CHAIN.into(), 0xffff_ffff)?;
    write(PMSWINC_EL0, 1)?;
    check("flags of both", read(PMOVSSET_EL0)?, 3)?;
    // A counted event does the same.
    let Some(event) = exact_event(cx) else {
        return Ok(Pass::Ok);
    };
    write(PMCNTENCLR_EL0, !0)?;
    cx.pmu
        .set_up(0, event, 0u64.wrapping_sub(1_000) & 0xffff_ffff)?;
    cx.pmu.set_up(1, event::CHAIN.into(), 0)?;
    loops::counted(3, 1_000);
    check_range("low, counted", cx.pmu.value(0)? & 0xffff_ffff, 1_000, 1_008)?;
    check("high, counted", cx.pmu.value(1)?, 1)?;
    Ok(Pass::Ok)
}
