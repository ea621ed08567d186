//! Tests of every register: the bits that can be written, the bits that read
//! back, and the registers that a write leaves alone. Arm ARM DDI 0487, the
//! register pages of chapter D24.

use super::{Context, Test};
use crate::encoding::*;
use crate::pmu::{
    self, CYCLE, FILTER_P, FILTER_U, PMCR_C, PMCR_D, PMCR_DP, PMCR_E, PMCR_FZO, PMCR_LC, PMCR_LP,
    PMCR_P, PMCR_X, read, write,
};
use vpmu_payload_harness::{Deviation, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("register.identity", identity),
    ("register.pmcr", pmcr),
    ("register.pmcnten", |cx| {
        set_and_clear(cx, PMCNTENSET_EL0, PMCNTENCLR_EL0)
    }),
    ("register.pminten", |cx| {
        set_and_clear(cx, PMINTENSET_EL1, PMINTENCLR_EL1)
    }),
    ("register.pmovs", |cx| {
        set_and_clear(cx, PMOVSSET_EL0, PMOVSCLR_EL0)
    }),
    ("register.pmselr", pmselr),
    ("register.pmuserenr", pmuserenr),
    ("register.pmevtyper", pmevtyper_fields),
    ("register.pmccfiltr", pmccfiltr),
    ("register.pmevcntr", pmevcntr_bits),
    ("register.pmccntr", pmccntr),
    ("register.pmxev", selected),
    ("register.pmxevtyper_31", selected_31),
    ("register.pmcr_p", reset_event_counters),
    ("register.pmcr_c", reset_cycle_counter),
];

/// Bit patterns written to whole registers.
const PATTERNS: [u64; 5] = [
    0,
    !0,
    0x5555_5555_5555_5555,
    0xaaaa_aaaa_aaaa_aaaa,
    0x0123_4567_89ab_cdef,
];

fn identity(cx: &Context) -> Verdict {
    // 0: none; 0xf: not PMUv3.
    check_range("PMUVer", cx.pmu.version, 1, 0xe)?;
    check_range("PMCR_EL0.N", cx.pmu.counters.into(), 0, 31)?;
    check(
        "SW_INCR offered",
        cx.pmu.offers(pmu::event::SW_INCR).into(),
        1,
    )?;
    check(
        "CPU_CYCLES offered",
        cx.pmu.offers(pmu::event::CPU_CYCLES).into(),
        1,
    )?;
    Ok(Pass::Ok)
}

fn pmcr(cx: &Context) -> Verdict {
    let identity = read(PMCR_EL0)? & 0xffff_f800;
    // The first mask is of bits that must hold what was written, the second of
    // bits that may (RES0, or RES1 for LC, where the feature is not
    // implemented).
    let mut must = PMCR_E | PMCR_DP;
    let mut may = PMCR_D | PMCR_X | PMCR_LC;
    if cx.pmu.version >= pmu::V3P5 {
        must |= PMCR_LP;
    }
    if cx.pmu.version >= pmu::V3P7 {
        may |= PMCR_FZO | 1 << 32;
    }
    let mut pass = Pass::Ok;
    for pattern in PATTERNS {
        write(PMCR_EL0, pattern)?;
        let mut got = read(PMCR_EL0)?;
        if cx.pmu.version < pmu::V3P5 && got & PMCR_LP != 0 {
            got &= !PMCR_LP;
            pass = Pass::Deviates(EARLY_LP);
        }
        check(
            format_args!("fields after {pattern:#x}"),
            got & !may,
            identity | pattern & must,
        )?;
    }
    Ok(pass)
}

/// QEMU (10.0, `pmcr_write`) has one mask of writable bits for all versions.
const EARLY_LP: Deviation = Deviation("QEMU: PMCR.LP can be set before PMUv3p5");
/// QEMU (10.0, `pmevtyper_write`) does the same for event numbers.
const EARLY_EVENTS: Deviation = Deviation("QEMU: event numbers have 16 bits in PMUv3");

fn set_and_clear(cx: &Context, set: Encoding, clear: Encoding) -> Verdict {
    let all = cx.pmu.mask();
    let both = |what: &str, want| {
        check(format_args!("{set} {what}"), read(set)?, want)?;
        check(format_args!("{clear} {what}"), read(clear)?, want)
    };
    write(clear, !0)?;
    both("all clear", 0)?;
    write(set, !0)?;
    both("all set", all)?;
    write(set, 0)?;
    write(clear, 0)?;
    both("after writing 0", all)?;
    write(clear, all & 0x5555_5555_5555_5555)?;
    both("every second clear", all & 0xaaaa_aaaa)?;
    write(set, 1 << CYCLE)?;
    write(set, 1)?;
    both("two set", all & 0xaaaa_aaaa | 1 << CYCLE | 1)?;
    write(clear, 1 << CYCLE)?;
    both(
        "cycle counter clear",
        (all & 0xaaaa_aaaa | 1) & !(1 << CYCLE),
    )?;
    Ok(Pass::Ok)
}

fn pmselr(_: &Context) -> Verdict {
    for pattern in PATTERNS {
        write(PMSELR_EL0, pattern)?;
        check(
            format_args!("after {pattern:#x}"),
            read(PMSELR_EL0)?,
            pattern & 0x1f,
        )?;
    }
    Ok(Pass::Ok)
}

fn pmuserenr(cx: &Context) -> Verdict {
    // v3p9 adds UEN and TID.
    let fields = if cx.pmu.version >= pmu::V3P9 {
        0x7f
    } else {
        0xf
    };
    for pattern in PATTERNS {
        write(PMUSERENR_EL0, pattern)?;
        check(
            format_args!("after {pattern:#x}"),
            read(PMUSERENR_EL0)? & !0x70,
            pattern & fields & 0xf,
        )?;
    }
    Ok(Pass::Ok)
}

/// Checks the fields. P, U and the event must hold what is written. NSK, NSU,
/// NSH, M and MT may, where EL3, EL2 or multithreading is not implemented. The
/// rest is RES0.
fn pmevtyper_fields(cx: &Context) -> Verdict {
    let event = if cx.pmu.version > 1 { 0xffff } else { 0x3ff };
    let mut pass = Pass::Ok;
    for n in 0..cx.pmu.counters {
        for pattern in PATTERNS {
            write(pmevtyper(n), pattern)?;
            let must = FILTER_P | FILTER_U | event;
            let mut got = read(pmevtyper(n))?;
            if got & 0xffff & !event != 0 {
                got &= !0xffff | event;
                pass = Pass::Deviates(EARLY_EVENTS);
            }
            check(
                format_args!("PMEVTYPER{n} after {pattern:#x}"),
                got & !0x3e00_0000,
                pattern & must,
            )?;
        }
        // The write changes only this register.
        for other in (0..cx.pmu.counters).filter(|&other| other != n) {
            check(
                format_args!("PMEVTYPER{other} after PMEVTYPER{n}"),
                read(pmevtyper(other))?,
                0,
            )?;
        }
        check(
            format_args!("PMCCFILTR after PMEVTYPER{n}"),
            read(PMCCFILTR_EL0)?,
            0,
        )?;
        write(pmevtyper(n), 0)?;
    }
    Ok(pass)
}

fn pmccfiltr(cx: &Context) -> Verdict {
    for pattern in PATTERNS {
        write(PMCCFILTR_EL0, pattern)?;
        let got = read(PMCCFILTR_EL0)?;
        check(
            format_args!("after {pattern:#x}"),
            got & !0x3c00_0000,
            pattern & (FILTER_P | FILTER_U),
        )?;
    }
    for n in 0..cx.pmu.counters {
        check(format_args!("PMEVTYPER{n}"), read(pmevtyper(n))?, 0)?;
    }
    Ok(Pass::Ok)
}

fn pmevcntr_bits(cx: &Context) -> Verdict {
    let bits = if cx.pmu.long_counters() {
        !0
    } else {
        0xffff_ffff
    };
    for n in 0..cx.pmu.counters {
        for pattern in PATTERNS {
            write(pmevcntr(n), pattern)?;
            check(
                format_args!("PMEVCNTR{n} after {pattern:#x}"),
                read(pmevcntr(n))?,
                pattern & bits,
            )?;
        }
        for other in (0..cx.pmu.counters).filter(|&other| other != n) {
            check(
                format_args!("PMEVCNTR{other} after PMEVCNTR{n}"),
                read(pmevcntr(other))?,
                0,
            )?;
        }
        write(pmevcntr(n), 0)?;
    }
    check("PMCCNTR", read(PMCCNTR_EL0)?, 0)?;
    Ok(Pass::Ok)
}

fn pmccntr(cx: &Context) -> Verdict {
    for pattern in PATTERNS {
        write(PMCCNTR_EL0, pattern)?;
        check(
            format_args!("after {pattern:#x}"),
            read(PMCCNTR_EL0)?,
            pattern,
        )?;
    }
    for n in 0..cx.pmu.counters {
        check(format_args!("PMEVCNTR{n}"), read(pmevcntr(n))?, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMXEVTYPER and PMXEVCNTR are the registers that PMSELR selects.
fn selected(cx: &Context) -> Verdict {
    for n in 0..cx.pmu.counters {
        let (event, value) = (u64::from(n) + 0x10, 0x1000 + u64::from(n));
        write(PMSELR_EL0, n.into())?;
        write(PMXEVTYPER_EL0, event)?;
        write(PMXEVCNTR_EL0, value)?;
        check(
            format_args!("PMXEVTYPER of {n}"),
            read(PMXEVTYPER_EL0)?,
            event,
        )?;
        check(
            format_args!("PMXEVCNTR of {n}"),
            read(PMXEVCNTR_EL0)?,
            value,
        )?;
    }
    for n in 0..cx.pmu.counters {
        check(
            format_args!("PMEVTYPER{n}"),
            read(pmevtyper(n))?,
            u64::from(n) + 0x10,
        )?;
        check(
            format_args!("PMEVCNTR{n}"),
            read(pmevcntr(n))?,
            0x1000 + u64::from(n),
        )?;
        write(pmevtyper(n), 0x20)?;
        write(PMSELR_EL0, n.into())?;
        check(
            format_args!("PMXEVTYPER of {n}"),
            read(PMXEVTYPER_EL0)?,
            0x20,
        )?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMXEVTYPER with 31 selected is PMCCFILTR, and no event counter's
/// register.
fn selected_31(cx: &Context) -> Verdict {
    write(PMSELR_EL0, CYCLE.into())?;
    write(PMXEVTYPER_EL0, FILTER_U)?;
    check("PMCCFILTR", read(PMCCFILTR_EL0)?, FILTER_U)?;
    write(PMCCFILTR_EL0, FILTER_P)?;
    check("PMXEVTYPER", read(PMXEVTYPER_EL0)?, FILTER_P)?;
    for n in 0..cx.pmu.counters {
        check(format_args!("PMEVTYPER{n}"), read(pmevtyper(n))?, 0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that PMCR.P resets the event counters, and nothing else.
fn reset_event_counters(cx: &Context) -> Verdict {
    fill(cx)?;
    write(PMCR_EL0, PMCR_P)?;
    check(
        "PMCR after P",
        read(PMCR_EL0)? & (PMCR_P | PMCR_C | PMCR_E),
        0,
    )?;
    for n in 0..cx.pmu.counters {
        check(format_args!("PMEVCNTR{n}"), read(pmevcntr(n))?, 0)?;
        check(format_args!("PMEVTYPER{n}"), read(pmevtyper(n))?, 0x11)?;
    }
    check("PMCCNTR", read(PMCCNTR_EL0)?, 0x1234)?;
    check("PMOVS", read(PMOVSSET_EL0)?, cx.pmu.mask())?;
    check("PMCNTEN", read(PMCNTENSET_EL0)?, cx.pmu.mask())?;
    Ok(Pass::Ok)
}

/// Checks that PMCR.C resets the cycle counter, and nothing else.
fn reset_cycle_counter(cx: &Context) -> Verdict {
    fill(cx)?;
    write(PMCR_EL0, PMCR_C)?;
    check("PMCCNTR", read(PMCCNTR_EL0)?, 0)?;
    check("PMCCFILTR", read(PMCCFILTR_EL0)?, FILTER_U)?;
    for n in 0..cx.pmu.counters {
        check(
            format_args!("PMEVCNTR{n}"),
            read(pmevcntr(n))?,
            0x100 + u64::from(n),
        )?;
    }
    check("PMOVS", read(PMOVSSET_EL0)?, cx.pmu.mask())?;
    Ok(Pass::Ok)
}

/// Writes a value to every register, with counting off by PMCR.E.
fn fill(cx: &Context) -> Result<(), vpmu_payload_harness::Failure> {
    for n in 0..cx.pmu.counters {
        cx.pmu.set_up(n, 0x11, 0x100 + u64::from(n))?;
    }
    cx.pmu.set_up(CYCLE, FILTER_U, 0x1234)?;
    write(PMOVSSET_EL0, !0)?;
    write(PMCNTENSET_EL0, !0)
}
