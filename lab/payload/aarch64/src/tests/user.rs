//! Accesses from EL0 that PMUSERENR_EL0 lets through. Others are trapped to EL1
//! with EC 0x18 and a syndrome that names the register. Registers that EL0 does
//! not have are UNDEFINED whatever PMUSERENR says.

use super::{Context, Test};
use crate::cell;
use crate::encoding::*;
use crate::fault::Fault;
use crate::pmu::{read, write};
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("user.accesses", accesses),
    ("user.beyond", beyond),
    ("user.writes_arrive", writes_arrive),
];

pub(super) const EN: u64 = 1;
const SW: u64 = 2;
const CR: u64 = 4;
const ER: u64 = 8;
/// A value for `EnabledBy`: the access is never trapped.
const ALWAYS: u64 = !0;

/// The condition under which EL0 has access.
pub(super) enum Rule {
    /// Any of these bits of PMUSERENR.
    EnabledBy(u64),
    /// Never: the access is UNDEFINED.
    Undefined,
}
use Access::{Read, Write};
use Rule::{EnabledBy, Undefined};

/// Arm ARM DDI 0487, "Accessing" of each register's page, EL0.
pub(super) const RULES: &[(Encoding, Access, Rule)] = &[
    (PMCR_EL0, Read, EnabledBy(EN)),
    (PMCR_EL0, Write, EnabledBy(EN)),
    (PMCNTENSET_EL0, Read, EnabledBy(EN)),
    (PMCNTENSET_EL0, Write, EnabledBy(EN)),
    (PMCNTENCLR_EL0, Read, EnabledBy(EN)),
    (PMCNTENCLR_EL0, Write, EnabledBy(EN)),
    (PMOVSCLR_EL0, Read, EnabledBy(EN)),
    (PMOVSCLR_EL0, Write, EnabledBy(EN)),
    (PMOVSSET_EL0, Read, EnabledBy(EN)),
    (PMOVSSET_EL0, Write, EnabledBy(EN)),
    (PMSWINC_EL0, Read, Undefined),
    (PMSWINC_EL0, Write, EnabledBy(EN | SW)),
    (PMSELR_EL0, Read, EnabledBy(EN | ER)),
    (PMSELR_EL0, Write, EnabledBy(EN | ER)),
    (PMCEID0_EL0, Read, EnabledBy(EN)),
    (PMCEID0_EL0, Write, Undefined),
    (PMCEID1_EL0, Read, EnabledBy(EN)),
    (PMCEID1_EL0, Write, Undefined),
    (PMCCNTR_EL0, Read, EnabledBy(EN | CR)),
    (PMCCNTR_EL0, Write, EnabledBy(EN)),
    (PMXEVTYPER_EL0, Read, EnabledBy(EN)),
    (PMXEVTYPER_EL0, Write, EnabledBy(EN)),
    (PMXEVCNTR_EL0, Read, EnabledBy(EN | ER)),
    (PMXEVCNTR_EL0, Write, EnabledBy(EN)),
    (pmevcntr(0), Read, EnabledBy(EN | ER)),
    (pmevcntr(0), Write, EnabledBy(EN)),
    (pmevtyper(0), Read, EnabledBy(EN)),
    (pmevtyper(0), Write, EnabledBy(EN)),
    (PMCCFILTR_EL0, Read, EnabledBy(EN)),
    (PMCCFILTR_EL0, Write, EnabledBy(EN)),
    (PMUSERENR_EL0, Read, EnabledBy(ALWAYS)),
    (PMUSERENR_EL0, Write, Undefined),
    (PMINTENSET_EL1, Read, Undefined),
    (PMINTENSET_EL1, Write, Undefined),
    (PMINTENCLR_EL1, Read, Undefined),
    (PMINTENCLR_EL1, Write, Undefined),
    (PMMIR_EL1, Read, Undefined),
];

fn accesses(cx: &Context) -> Verdict {
    for userenr in 0..16 {
        write(PMUSERENR_EL0, userenr)?;
        for (register, access, rule) in RULES {
            if *register == PMXEVCNTR_EL0 && cx.pmu.counters == 0 {
                continue;
            }
            let want = match rule {
                Undefined => Err(Fault::UNDEFINED),
                EnabledBy(ALWAYS) => Ok(()),
                EnabledBy(bits) if userenr & bits != 0 => Ok(()),
                EnabledBy(_) => Err(Fault {
                    syndrome: register.trap_syndrome(*access),
                }),
            };
            expect(*register, *access, userenr, want)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that counters that do not exist are UNDEFINED at EL0 too, when EN
/// gives EL0 access.
fn beyond(cx: &Context) -> Verdict {
    write(PMUSERENR_EL0, EN)?;
    for n in cx.pmu.counters..31 {
        for register in [pmevcntr(n), pmevtyper(n)] {
            for access in [Read, Write] {
                expect(register, access, EN, Err(Fault::UNDEFINED))?;
            }
        }
    }
    Ok(Pass::Ok)
}

/// Checks that EL1 reads what EL0 wrote, and that a trapped write has no
/// effect.
fn writes_arrive(cx: &Context) -> Verdict {
    if cx.pmu.counters == 0 {
        return Ok(Pass::Skip("no event counter"));
    }
    write(PMUSERENR_EL0, EN)?;
    cell::write_at_el0(PMSELR_EL0, 31)?;
    cell::write_at_el0(PMCCNTR_EL0, 0x1234_5678)?;
    cell::write_at_el0(pmevcntr(0), 77)?;
    cell::write_at_el0(PMCNTENSET_EL0, !0)?;
    write(PMUSERENR_EL0, ER)?;
    let syndrome = pmevcntr(0).trap_syndrome(Write);
    expect(pmevcntr(0), Write, ER, Err(Fault { syndrome }))?;
    check("PMEVCNTR0 at EL0", cell::read_at_el0(pmevcntr(0))?, 77)?;
    check("PMSELR", read(PMSELR_EL0)?, 31)?;
    check("PMCCNTR", read(PMCCNTR_EL0)?, 0x1234_5678)?;
    check("PMEVCNTR0", read(pmevcntr(0))?, 77)?;
    check("PMCNTEN", read(PMCNTENSET_EL0)?, cx.pmu.mask())?;
    Ok(Pass::Ok)
}

fn expect(
    register: Encoding,
    access: Access,
    userenr: u64,
    want: Result<(), Fault>,
) -> Result<(), Failure> {
    let got = match access {
        Read => cell::read_at_el0(register).map(drop),
        Write => cell::write_at_el0(register, 0),
    };
    if got == want {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{access} of {register} at EL0 with PMUSERENR {userenr:#x} (got {got:x?} want {want:x?})"
    ))))
}
