//! Registers of which a hypervisor may trap some and leave others to the hardware. A value written by one way must be
//! there by the other, and must stay when the way changes.

use super::interrupt::expect_one;
use super::{Context, Test};
use crate::encoding::*;
use crate::loops::{self, interruptible, spin};
use crate::percpu;
use crate::pmu::{CYCLE, PMCR_C, PMCR_E, PMCR_LC, PMCR_LP, PMCR_P, PMCR_X, event, read, write};
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("mixed.one_flag_of_two", one_flag_of_two),
    ("mixed.flag_of_a_stopped_counter", flag_of_a_stopped_counter),
    ("mixed.line_by_pminten", line_by_pminten),
    ("mixed.reset_keeps_flags", reset_keeps_flags),
    ("mixed.increment_between_writes", increment_between_writes),
    ("mixed.width_while_counting", width_while_counting),
    ("mixed.export_keeps_all", |cx| {
        keeps_all(cx, || {
            write(PMCR_EL0, PMCR_E | PMCR_X)?;
            write(PMCR_EL0, PMCR_E)
        })
    }),
    ("mixed.chain_keeps_all", |cx| {
        keeps_all(cx, || {
            write(pmevtyper(1), event::CHAIN.into())?;
            write(pmevtyper(1), event::SW_INCR.into())
        })
    }),
    ("mixed.chain_by_selection", |cx| {
        keeps_all(cx, || {
            write(PMSELR_EL0, 1)?;
            write(PMXEVTYPER_EL0, event::CHAIN.into())?;
            check("the type", read(pmevtyper(1))?, event::CHAIN.into())?;
            write(PMXEVTYPER_EL0, event::SW_INCR.into())?;
            write(PMSELR_EL0, SELECTION)
        })
    }),
];

const LOW: u64 = 0xffff_ffff;

/// The selection in `keeps_all`: a counter that need not exist.
const SELECTION: u64 = 9;

/// Checks that clearing one flag leaves the other, which came without an interrupt.
fn one_flag_of_two(cx: &Context) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    write(PMCR_EL0, PMCR_E)?;
    for n in 0..2 {
        cx.pmu.set_up(n, event::CPU_CYCLES.into(), LOW)?;
    }
    loops::counted(3, 10);
    check("flags", read(PMOVSSET_EL0)?, 3)?;
    write(PMOVSCLR_EL0, 1)?;
    check("flags after", read(PMOVSCLR_EL0)?, 2)?;
    loops::counted(1, 10);
    write(PMOVSSET_EL0, 1)?;
    check("flags at last", read(PMOVSSET_EL0)?, 3)?;
    Ok(Pass::Ok)
}

/// Checks the flag of a stopped counter. The counter counted with its interrupt on, and software sets the flag
/// afterwards. One interrupt must come, and the hypervisor below must not take interrupts for ever.
fn flag_of_a_stopped_counter(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    loops::counted(1 << CYCLE, 10);
    write(PMOVSSET_EL0, 1 << CYCLE)?;
    spin(1_000);
    check("flags before", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that the flag stays set all the time, and that the line follows the enable, down and up again.
fn line_by_pminten(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.pmi);
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu.set_up(CYCLE, 0, LOW)?;
    loops::counted(1 << CYCLE, 10);
    interruptible(|| spin(1_000));
    check("interrupts before", percpu::this().taken_any(), 0)?;
    write(PMINTENSET_EL1, 1 << CYCLE)?;
    interruptible(|| spin(1_000));
    expect_one(cx, CYCLE)?;
    Ok(Pass::Ok)
}

/// Checks that PMCR_EL0.P and C set counters to zero, and change nothing else.
fn reset_keeps_flags(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E)?;
    cx.pmu.set_up(CYCLE, 0, LOW)?;
    loops::counted(1 << CYCLE, 10);
    for n in 0..cx.pmu.counters {
        write(pmevcntr(n), 7)?;
    }
    write(PMCR_EL0, PMCR_E | PMCR_P | PMCR_C)?;
    check("flags", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    for n in (0..cx.pmu.counters).chain([CYCLE]) {
        check(format_args!("counter {n}"), cx.pmu.value(n)?, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that software increments go on from the written value, and set only their own flag.
fn increment_between_writes(cx: &Context) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1)?;
    for start in [5, 1_000, LOW - 1] {
        write(pmevcntr(0), start)?;
        write(pmevcntr(1), start)?;
        write(PMSWINC_EL0, 3)?;
        write(PMSWINC_EL0, 3)?;
        check(
            format_args!("from {start:#x}"),
            cx.pmu.value(0)? & LOW,
            (start + 2) & LOW,
        )?;
        check("the stopped one", cx.pmu.value(1)?, start)?;
    }
    check("flags", read(PMOVSSET_EL0)?, 1)?;
    Ok(Pass::Ok)
}

/// Checks that a counter overflows at the width that PMCR_EL0 gives at that moment.
fn width_while_counting(cx: &Context) -> Verdict {
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    cx.pmu.set_up(CYCLE, 0, LOW)?;
    loops::counted(1 << CYCLE, 10);
    check("flags of 64 bits", read(PMOVSSET_EL0)?, 0)?;
    write(PMCCNTR_EL0, LOW)?;
    write(PMCR_EL0, PMCR_E)?;
    if read(PMCR_EL0)? & PMCR_LC == 0 {
        loops::counted(1 << CYCLE, 10);
        check("flags of 32 bits", read(PMOVSSET_EL0)?, 1 << CYCLE)?;
    }
    if !cx.pmu.long_counters() || cx.pmu.counters == 0 {
        return Ok(Pass::Ok);
    }
    write(PMOVSCLR_EL0, !0)?;
    write(PMCR_EL0, PMCR_E | PMCR_LP)?;
    cx.pmu
        .set_up(0, event::CPU_CYCLES.into(), LOW - 1_000_000)?;
    loops::counted(1, 10);
    write(PMCR_EL0, PMCR_E)?;
    loops::counted(1, 2_000_000);
    check("the event counter's", read(PMOVSSET_EL0)?, 1)?;
    Ok(Pass::Ok)
}

/// Checks that values, flags, enables, selection and permissions are the same after `change`, and that the cycle
/// counter goes on.
fn keeps_all(cx: &Context, change: fn() -> Result<(), Failure>) -> Verdict {
    if cx.pmu.counters < 2 {
        return Ok(Pass::Skip("fewer than two event counters"));
    }
    write(PMCR_EL0, PMCR_E)?;
    write(PMCNTENSET_EL0, 1 | 1 << CYCLE)?;
    write(PMINTENSET_EL1, 2)?;
    write(PMOVSSET_EL0, 1)?;
    write(PMUSERENR_EL0, 0b1010)?;
    write(PMSELR_EL0, SELECTION)?;
    write(pmevcntr(0), 0x1234)?;
    write(pmevcntr(1), 0x5678)?;
    let before = read(PMCCNTR_EL0)?;
    change()?;
    let after = read(PMCCNTR_EL0)?;
    check_range("cycles", after - before, 1, 1_000_000)?;
    let expected = [
        ("PMCNTEN", PMCNTENSET_EL0, 1 | 1 << CYCLE),
        ("PMINTEN", PMINTENSET_EL1, 2),
        ("PMOVS", PMOVSSET_EL0, 1),
        ("PMUSERENR", PMUSERENR_EL0, 0b1010),
        ("PMSELR", PMSELR_EL0, SELECTION),
        ("PMEVCNTR0", pmevcntr(0), 0x1234),
        ("PMEVCNTR1", pmevcntr(1), 0x5678),
    ];
    for (name, register, value) in expected {
        check(name, read(register)?, value)?;
    }
    check("PMCR.E", read(PMCR_EL0)? & (PMCR_E | PMCR_X), PMCR_E)?;
    Ok(Pass::Ok)
}
