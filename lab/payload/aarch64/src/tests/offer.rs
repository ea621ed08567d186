//! The offer of the ID registers. A feature whose field says that it is missing has no registers, and a hypervisor's
//! own features are not offered to its guest.

use super::{Context, Test};
use crate::cell;
use crate::encoding::*;
use crate::fault::Fault;
use crate::pmu::V3P9;
use vpmu_payload_harness::{Failure, Pass, Text, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("offer.absent_is_undefined", absent_is_undefined),
    ("offer.read_only", read_only),
    ("offer.implementer", implementer),
    ("offer.pmu_agrees", pmu_agrees),
];

/// A feature: the ID register, the place of its field, and the least value that offers the register.
const FEATURES: &[(&str, Encoding, u32, u64, Encoding)] = &[
    ("SPE", ID_AA64DFR0_EL1, 32, 1, Encoding::op0_3(0, 9, 9, 0)),
    ("TRBE", ID_AA64DFR0_EL1, 44, 1, Encoding::op0_3(0, 9, 11, 0)),
    ("TRF", ID_AA64DFR0_EL1, 40, 1, Encoding::op0_3(0, 1, 2, 1)),
    (
        "PMUACR",
        ID_AA64DFR0_EL1,
        8,
        V3P9,
        Encoding::op0_3(0, 9, 14, 4),
    ),
    (
        "PMICNTR",
        ID_AA64DFR1_EL1,
        36,
        1,
        Encoding::op0_3(3, 9, 4, 0),
    ),
    ("MPAM", ID_AA64PFR0_EL1, 40, 1, Encoding::op0_3(0, 10, 5, 0)),
    ("AMU", ID_AA64PFR0_EL1, 44, 1, Encoding::op0_3(3, 13, 2, 0)),
    ("NMI", ID_AA64PFR1_EL1, 36, 1, Encoding::op0_3(0, 4, 3, 0)),
];

fn absent_is_undefined(_: &Context) -> Verdict {
    for &(name, id, shift, least, register) in FEATURES {
        if cell::read(id)? >> shift & 0xf >= least {
            continue;
        }
        // A hypervisor can keep only writes of ALLINT from a guest.
        let got = if name == "NMI" {
            cell::write(register, 0)
        } else {
            cell::read(register).map(drop)
        };
        if got != Err(Fault::UNDEFINED) {
            return Err(Failure(Text::new(format_args!(
                "{name} is not offered, and {register} is there (got {got:x?})"
            ))));
        }
    }
    Ok(Pass::Ok)
}

/// Checks that ID registers cannot be written.
fn read_only(_: &Context) -> Verdict {
    for crm in 1..8 {
        for op2 in 0..8 {
            let register = Encoding::op0_3(0, 0, crm, op2);
            let before = cell::read(register)?;
            let write = cell::write(register, !before);
            check(
                format_args!("write of {register} is UNDEFINED"),
                (write == Err(Fault::UNDEFINED)).into(),
                1,
            )?;
            check(register, cell::read(register)?, before)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that a guest has none of the registers that the core's implementer has defined: on some cores they reach caches,
/// clocks and errors of the whole machine.
fn implementer(_: &Context) -> Verdict {
    if cell::read(ID_AA64PFR0_EL1)? >> 8 & 0xf != 0 {
        return Ok(Pass::Skip("there is an EL2, and no hypervisor"));
    }
    for crn in [11, 15] {
        for rest in 0..0x400 {
            let register = Encoding::op0_3(rest >> 7, crn, rest >> 3 & 0xf, rest & 7);
            for got in [cell::read(register).map(drop), cell::write(register, 0)] {
                if got != Err(Fault::UNDEFINED) {
                    return Err(Failure(Text::new(format_args!(
                        "{register} is there (got {got:x?})"
                    ))));
                }
            }
        }
    }
    Ok(Pass::Ok)
}

/// Checks that the AArch32 view of the PMU agrees with the AArch64 view, where there is an AArch32.
fn pmu_agrees(cx: &Context) -> Verdict {
    const AARCH32: u64 = 2;
    if cell::read(ID_AA64PFR0_EL1)? & 0xf != AARCH32 {
        return Ok(Pass::Skip("no AArch32"));
    }
    let aarch32 = cell::read(Encoding::op0_3(0, 0, 1, 2))? >> 24 & 0xf;
    // PMUv3 is 1 in one view and 3 in the other. Later versions have the same number in both.
    let wanted = if cx.pmu.version == 1 {
        3
    } else {
        cx.pmu.version
    };
    check("ID_DFR0_EL1.PerfMon", aarch32, wanted)?;
    Ok(Pass::Ok)
}
