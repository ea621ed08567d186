//! The encodings of the PMU's space that are registers, and the directions in
//! which EL1 can access them. All others are UNDEFINED: EC 0 taken to EL1.

use super::{Context, Test};
use crate::cell;
use crate::encoding::*;
use crate::fault::Fault;
use crate::pmu::{self, CYCLE, read, write};
use vpmu_payload_harness::{Deviation, Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("access.allocated", allocated),
    ("access.unallocated", unallocated),
    ("access.pmevcntr_beyond", |cx| beyond(cx, pmevcntr)),
    ("access.pmevtyper_beyond", |cx| beyond(cx, pmevtyper)),
    ("access.pmxevcntr_beyond", |cx| {
        selected_beyond(cx, PMXEVCNTR_EL0)
    }),
    ("access.pmxevtyper_beyond", |cx| {
        selected_beyond(cx, PMXEVTYPER_EL0)
    }),
    ("access.pmxevcntr_31", |_| selected(CYCLE, PMXEVCNTR_EL0)),
];

/// Readable, writable.
const REGISTERS: &[(Encoding, bool, bool)] = &[
    (PMCR_EL0, true, true),
    (PMCNTENSET_EL0, true, true),
    (PMCNTENCLR_EL0, true, true),
    (PMOVSCLR_EL0, true, true),
    (PMSWINC_EL0, false, true),
    (PMSELR_EL0, true, true),
    (PMCEID0_EL0, true, false),
    (PMCEID1_EL0, true, false),
    (PMCCNTR_EL0, true, true),
    (PMXEVTYPER_EL0, true, true),
    (PMXEVCNTR_EL0, true, true),
    (PMUSERENR_EL0, true, true),
    (PMOVSSET_EL0, true, true),
    (PMINTENSET_EL1, true, true),
    (PMINTENCLR_EL1, true, true),
    (PMCCFILTR_EL0, true, true),
];

/// PMXEVTYPER and PMXEVCNTR with PMSELR beyond the counters: UNDEFINED where
/// FEAT_FGT is implemented, as here. Before, RAZ/WI was one of the choices.
const SELECTED_RAZ: Deviation = Deviation(
    "QEMU: PMXEV* of an unimplemented counter is RAZ/WI, not UNDEFINED, although it has FEAT_FGT",
);

fn allocated(cx: &Context) -> Verdict {
    for &(register, readable, writable) in REGISTERS {
        expect(register, Access::Read, readable)?;
        expect(register, Access::Write, writable)?;
    }
    let v3p4 = cx.pmu.version >= 5;
    expect(PMMIR_EL1, Access::Read, v3p4)?;
    expect(PMMIR_EL1, Access::Write, false)?;
    for n in 0..cx.pmu.counters {
        for register in [pmevcntr(n), pmevtyper(n)] {
            expect(register, Access::Read, true)?;
            expect(register, Access::Write, true)?;
        }
    }
    Ok(Pass::Ok)
}

fn unallocated(cx: &Context) -> Verdict {
    if cx.pmu.version >= pmu::V3P9 {
        return Ok(Pass::Skip("v3p9 and later have more registers"));
    }
    let spaces = [(3, 9, 12), (3, 9, 13), (3, 9, 14), (0, 9, 14), (0, 9, 13)];
    for (op1, crn, crm) in spaces {
        for op2 in 0..8 {
            let register = Encoding::op0_3(op1, crn, crm, op2);
            if register != PMMIR_EL1 && REGISTERS.iter().all(|&(known, ..)| known != register) {
                expect(register, Access::Read, false)?;
                expect(register, Access::Write, false)?;
            }
        }
    }
    // This encoding lies between PMEVCNTR30 and PMEVTYPER0.
    expect(pmevcntr(31), Access::Read, false)?;
    expect(pmevcntr(31), Access::Write, false)?;
    Ok(Pass::Ok)
}

/// Registers of counters from PMCR.N on are UNDEFINED.
fn beyond(cx: &Context, register: fn(u8) -> Encoding) -> Verdict {
    for n in cx.pmu.counters..31 {
        expect(register(n), Access::Read, false)?;
        expect(register(n), Access::Write, false)?;
    }
    Ok(Pass::Ok)
}

fn selected_beyond(cx: &Context, register: Encoding) -> Verdict {
    let mut pass = Pass::Ok;
    for n in cx.pmu.counters..31 {
        pass = pass.and(selected(n, register)?);
    }
    Ok(pass)
}

/// Checks that an access is UNDEFINED, with the known deviation.
fn selected(n: u8, register: Encoding) -> Verdict {
    write(PMSELR_EL0, n.into())?;
    let written = cell::write(register, !0);
    let got = cell::read(register);
    match (written, got) {
        (Err(Fault::UNDEFINED), Err(Fault::UNDEFINED)) => {}
        // Under a monitor, one of the two may trap and the other not: a turn of another guest's has come between them.
        (Ok(()) | Err(Fault::UNDEFINED), Ok(0) | Err(Fault::UNDEFINED)) => {
            return Ok(Pass::Deviates(SELECTED_RAZ));
        }
        (_, got) => {
            return Err(Failure(Text::new(format_args!(
                "{register} with PMSELR {n} (got {got:x?} want UNDEFINED)"
            ))));
        }
    }
    check("PMSELR after", read(PMSELR_EL0)?, n.into())?;
    Ok(Pass::Ok)
}

/// Fails unless the access is permitted as `allowed` says, or otherwise
/// UNDEFINED.
fn expect(register: Encoding, access: Access, allowed: bool) -> Result<(), Failure> {
    let result = match access {
        Access::Read => cell::read(register).map(drop),
        Access::Write => cell::write(register, 0),
    };
    let want = if allowed {
        Ok(())
    } else {
        Err(Fault::UNDEFINED)
    };
    if result == want {
        return Ok(());
    }
    Err(Failure(Text::new(format_args!(
        "{access} of {register} (got {result:x?} want {want:x?})"
    ))))
}
