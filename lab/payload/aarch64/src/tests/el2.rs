//! What EL2 may rely on when it gives EL1 and EL0 some of its counters, or none (`test=el2.`). The program is its own
//! hypervisor here: it begins at EL2 and has the registers of EL2 written there (`cell`). An access that traps to EL2 is
//! UNDEFINED for EL1 and EL0 (`entry.rs`).
//!
//! Each test is the reproducer of a patch in `packaging/qemu`, and lists what QEMU 10.0 does without it.

use super::user::{EN, RULES, Rule};
use super::{Context, Test};
use crate::cell::{self, read_at_el2, write_at_el2};
use crate::encoding::*;
use crate::fault::Fault;
use crate::pmu::{FILTER_P, PMCR_E, event, read, write};
use vpmu_payload_harness::{Deviation, Failure, Pass, Text, Verdict, check_or};

pub(super) const TESTS: &[Test] = &[
    ("el2.traps_what_userenr_allows", |cx| alone(cx, trapped)),
    ("el2.counters_have_no_bits", |cx| alone(cx, hidden)),
    ("el2.counters_are_out_of_reach", |cx| {
        alone(cx, out_of_reach)
    }),
    ("el2.interrupts_by_hpme", |cx| alone(cx, gated)),
];

/// MDCR_EL2.HPMN: number of event counters that are not EL2's alone.
const HPMN: u64 = 0x1f;
/// MDCR_EL2.TPM: accesses to the PMU from EL1 and EL0 trap.
const TPM: u64 = 1 << 6;
/// MDCR_EL2.HPME: the counters that are EL2's alone count.
const HPME: u64 = 1 << 7;

const PASSES_TPM: Deviation =
    Deviation("QEMU: accesses of EL0 that PMUSERENR_EL0.{ER, CR, SW} allow pass by MDCR_EL2.TPM");
const HAVE_BITS: Deviation =
    Deviation("QEMU: EL1 reaches EL2's counters in registers with a bit for each counter");
const IN_REACH: Deviation = Deviation("QEMU: EL1 reaches EL2's counters by their numbers");
const GATED_BY_E: Deviation =
    Deviation("QEMU: PMCR_EL0.E gates the interrupts of EL2's counters, and HPME does not");

/// Runs `test` with MDCR_EL2 as the program has it, and leaves it so. The test gets that value, and the last counter.
fn alone(cx: &Context, test: fn(&Context, u64, u8) -> Verdict) -> Verdict {
    const EL2: u64 = 2 << 2;
    if read_at_el2(CURRENT_EL) != Ok(EL2) {
        return Ok(Pass::Skip("EL2 is not the program's"));
    }
    let Some(last) = cx.pmu.counters.checked_sub(1) else {
        return Ok(Pass::Skip("no event counter"));
    };
    let mdcr = read_at_el2(MDCR_EL2)?;
    let verdict = test(cx, mdcr, last);
    write_at_el2(MDCR_EL2, mdcr)?;
    verdict
}

/// Returns `mdcr` with the last counter EL2's alone, and that bit.
const fn without(mdcr: u64, last: u8) -> (u64, u64) {
    (mdcr & !HPMN | last as u64, 1 << last)
}

/// Checks that TPM traps every access of EL0 that PMUSERENR_EL0 allows, by whichever of its bits, and none that it traps
/// to EL1.
fn trapped(_: &Context, mdcr: u64, _: u8) -> Verdict {
    let mut pass = Pass::Ok;
    for userenr in 0..16 {
        write_at_el2(PMUSERENR_EL0, userenr)?;
        write_at_el2(MDCR_EL2, mdcr | TPM)?;
        for (register, access, rule) in RULES {
            let Rule::EnabledBy(bits) = rule else {
                continue;
            };
            let allowed = userenr & bits != 0 || *register == PMUSERENR_EL0;
            let syndrome = register.trap_syndrome(*access);
            let want = if allowed {
                Fault::UNDEFINED
            } else {
                Fault { syndrome }
            };
            let got = match access {
                Access::Read => cell::read_at_el0(*register).map(drop),
                Access::Write => cell::write_at_el0(*register, 0),
            };
            if got == Ok(()) && userenr & bits & !EN != 0 {
                pass = pass.and(Pass::Deviates(PASSES_TPM));
            } else if got != Err(want) {
                return Err(Failure(Text::new(format_args!(
                    "{access} of {register} at EL0 with PMUSERENR {userenr:#x} (got {got:x?} want {want:x?})"
                ))));
            }
        }
    }
    Ok(pass)
}

/// Checks that EL1 sees no bit of a counter of EL2's, and changes none.
fn hidden(_: &Context, mdcr: u64, last: u8) -> Verdict {
    let (mdcr, bit) = without(mdcr, last);
    write_at_el2(MDCR_EL2, mdcr)?;
    let mut pass = Pass::Ok;
    for (set, clear) in [
        (PMCNTENSET_EL0, PMCNTENCLR_EL0),
        (PMINTENSET_EL1, PMINTENCLR_EL1),
        (PMOVSSET_EL0, PMOVSCLR_EL0),
    ] {
        write_at_el2(set, bit)?;
        let seen = check_or(set, read(set)? & bit, 0, (bit, HAVE_BITS))?;
        write(clear, !0)?;
        let kept = read_at_el2(set)? & bit;
        let kept = check_or(clear, kept, bit, (0, HAVE_BITS))?;
        write_at_el2(clear, bit)?;
        write(set, bit)?;
        let taken = read_at_el2(set)? & bit;
        let taken = check_or(format_args!("{set} again"), taken, 0, (bit, HAVE_BITS))?;
        write_at_el2(clear, bit)?;
        pass = pass.and(seen).and(kept).and(taken);
    }
    Ok(pass)
}

/// Checks that no register of EL1's reaches the value or the type of a counter of EL2's.
fn out_of_reach(_: &Context, mdcr: u64, last: u8) -> Verdict {
    const VALUE: u64 = 0x1234;
    let (mdcr, _) = without(mdcr, last);
    write_at_el2(MDCR_EL2, mdcr)?;
    let mut pass = Pass::Ok;
    for (number, name, by_selection) in [
        (pmevcntr(last), "its value", PMXEVCNTR_EL0),
        (pmevtyper(last), "its type", PMXEVTYPER_EL0),
    ] {
        let value = if name == "its type" {
            FILTER_P | u64::from(event::CPU_CYCLES)
        } else {
            VALUE
        };
        write_at_el2(number, value)?;
        for register in [number, by_selection] {
            write_at_el2(PMSELR_EL0, last.into())?;
            // Undefined, trapped or ignored: all of these are allowed.
            let read = cell::read(register).unwrap_or(0);
            let hidden = check_or(format_args!("{name}, read"), read, 0, (value, IN_REACH))?;
            let _ = cell::write(register, 0);
            let kept = read_at_el2(number)?;
            let kept = check_or(format_args!("{name}, kept"), kept, value, (0, IN_REACH))?;
            write_at_el2(number, value)?;
            pass = pass.and(hidden).and(kept);
        }
    }
    Ok(pass)
}

/// Checks that the flag of a counter of EL2's interrupts while that counter may count: by HPME, not by PMCR_EL0.E, which
/// is EL1's.
fn gated(cx: &Context, mdcr: u64, last: u8) -> Verdict {
    let (mdcr, bit) = without(mdcr, last);
    let pmi = cx.machine.pmi;
    write_at_el2(PMINTENSET_EL1, bit)?;
    let mut pass = Pass::Ok;
    for (enabled, host) in [(0, HPME), (PMCR_E, 0), (PMCR_E, HPME), (0, 0)] {
        write_at_el2(MDCR_EL2, mdcr | host)?;
        write(PMCR_EL0, enabled)?;
        write_at_el2(PMOVSSET_EL0, bit)?;
        let (waits, want) = (cx.gic.is_pending(pmi), host != 0);
        let what = format_args!("pending with PMCR_EL0.E = {enabled}, HPME = {want}");
        let by_e = (u64::from(enabled != 0), GATED_BY_E);
        pass = pass.and(check_or(what, waits.into(), want.into(), by_e)?);
        write_at_el2(PMOVSCLR_EL0, bit)?;
    }
    write_at_el2(PMINTENCLR_EL1, bit)?;
    Ok(pass)
}
