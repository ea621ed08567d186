//! Reads and writes every system register encoding with op0 = 3 with several
//! patterns. Each access gives a value, or an exception that EL1 can take from
//! its own instruction, but never a dead machine. The test prints the registers
//! that can be read and written, for comparison between machines.

use super::{Context, Test};
use crate::encoding::*;
use crate::fault::Fault;
use crate::{cell, uart};
use vpmu_payload_harness::{Failure, Pass, Text, Verdict};

pub(super) const TESTS: &[Test] = &[("fuzzregs.read", read_all), ("fuzzregs.write", write_all)];

const PATTERNS: [u64; 4] = [0, !0, 0x5555_5555_5555_5555, 0xaaaa_aaaa_aaaa_aaaa];

/// Exception classes that such an access may have at EL1: UNDEFINED, SIMD and
/// floating point, system register, SVE, SME.
const CLASSES: [u64; 5] = [0x00, 0x07, 0x18, 0x19, 0x1d];

/// Registers that the test does not write, because the program itself would go
/// down: (op1, CRn), why.
const NOT_WRITTEN: &[(u16, u16, &str)] = &[
    (0, 1, "SCTLR_EL1, ACTLR_EL1, CPACR_EL1 and the like"),
    (0, 2, "translation tables, pointer authentication keys"),
    (0, 4, "ELR, SPSR, SP, PSTATE fields, ICC_PMR_EL1"),
    (0, 12, "VBAR_EL1, the interrupt interface"),
    (3, 2, "guarded control stack"),
    (3, 4, "PSTATE fields"),
];

/// Values of CRn whose registers the CPU's maker defines.
const IMPLEMENTATION_DEFINED: [u16; 2] = [11, 15];

fn read_all(_: &Context) -> Verdict {
    let mut values = 0;
    for register in registers() {
        // One of these reads acknowledges an interrupt. That is harmless,
        // because none is pending.
        if accepted(register, Access::Read, cell::read(register))?.is_some() {
            values += 1;
            uart::print(format_args!("payload: readable {register}\n"));
        }
    }
    uart::print(format_args!(
        "payload: {values} of {} encodings can be read\n",
        Encoding::OP0_3
    ));
    Ok(Pass::Ok)
}

fn write_all(cx: &Context) -> Verdict {
    let mut written = 0;
    for register in registers() {
        let excluded = register == TPIDR_EL1
            || IMPLEMENTATION_DEFINED.contains(&register.crn())
            || NOT_WRITTEN
                .iter()
                .any(|&(op1, crn, _)| (op1, crn) == (register.op1(), register.crn()));
        if excluded {
            continue;
        }
        let before = cell::read(register).ok();
        let mut taken = false;
        for pattern in PATTERNS {
            taken |= accepted(register, Access::Write, cell::write(register, pattern))?.is_some();
        }
        if taken {
            written += 1;
            uart::print(format_args!("payload: writable {register}\n"));
        }
        if let Some(value) = before
            && taken
        {
            accepted(register, Access::Write, cell::write(register, value))?;
        }
    }
    cx.pmu.reset()?;
    uart::print(format_args!(
        "payload: {written} of {} encodings can be written\n",
        Encoding::OP0_3
    ));
    Ok(Pass::Ok)
}

fn registers() -> impl Iterator<Item = Encoding> {
    (0..Encoding::OP0_3).map(Encoding::nth_op0_3)
}

/// Returns the value, `None` for an allowed exception, or the failure.
fn accepted<T>(
    register: Encoding,
    access: Access,
    result: Result<T, Fault>,
) -> Result<Option<T>, Failure> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(fault) if CLASSES.contains(&fault.class()) => Ok(None),
        Err(fault) => Err(Failure(Text::new(format_args!(
            "{access} of {register} (got ESR {:#x} want a value or an exception of its own)",
            fault.syndrome
        )))),
    }
}
