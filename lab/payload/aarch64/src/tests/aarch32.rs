//! EL0 in AArch32 under an AArch64 EL1: the same PMU by MRC, MCR, MRRC and MCRR. The same bits of PMUSERENR_EL0 permit
//! or refuse accesses (Arm ARM DDI 0487, chapter G8.4, "Accessing" of each register).

use super::{Context, Test};
use crate::cell::{self, a32_at_el0};
use crate::encoding::*;
use crate::fault::Fault;
use crate::pmu::{CYCLE, FILTER_P, V3P1, event, read, write};
use vpmu_payload_harness::{Deviation, Failure, Pass, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("aarch32.registers", |cx| {
        on_aarch32(|| registers(cx.pmu.version))
    }),
    ("aarch32.counter", |cx| {
        if cx.pmu.counters == 0 {
            return Ok(Pass::Skip("no event counter"));
        }
        on_aarch32(counter)
    }),
    ("aarch32.cycle_counter", cycle_counter),
    ("aarch32.refused", |_| on_aarch32(refused)),
    ("aarch32.failed_condition", |_| on_aarch32(failed_condition)),
    ("aarch32.not_for_el0", |_| on_aarch32(not_for_el0)),
];

const EN: u64 = 1;
/// PMUSERENR_EL0.CR: the cycle counter may be read.
const CR: u64 = 4;

fn has_aarch32() -> Result<bool, Fault> {
    const AARCH32: u64 = 2;
    Ok(cell::read(ID_AA64PFR0_EL1)? & 0xf == AARCH32)
}

fn on_aarch32(test: impl FnOnce() -> Result<(), Failure>) -> Verdict {
    if !has_aarch32()? {
        return Ok(Pass::Skip("no AArch32"));
    }
    test().map(|()| Pass::Ok)
}

/// QEMU 10.0 has no 64-bit form of PMCCNTR.
const NO_MRRC: Deviation = Deviation("QEMU: MRRC and MCRR of PMCCNTR are UNDEFINED");

/// Returns `MRC p15, 0, r0, <this>`: CRn, CRm and opc2 are those of the AArch64 register.
const fn mrc(register: Encoding) -> u32 {
    0xee10_0f10
        | (register.crn() as u32) << 16
        | (register.op2() as u32) << 5
        | register.crm() as u32
}

/// Returns `MCR p15, 0, r0, <this>`.
const fn mcr(register: Encoding) -> u32 {
    mrc(register) & !(1 << 20)
}

/// `MRRC p15, 0, r1, r0, c9`: the upper half of PMCCNTR into r0.
const MRRC_UPPER: u32 = 0xec50_1f09;
/// `MRRC p15, 0, r0, r1, c9`: the lower half into r0.
const MRRC_LOWER: u32 = 0xec51_0f09;
/// `MCRR p15, 0, r0, r0, c9`.
const MCRR: u32 = 0xec40_0f09;

fn registers(version: u64) -> Result<(), Failure> {
    write(PMUSERENR_EL0, EN)?;
    // Counters stand still: PMCR.E is 0.
    write(PMCCNTR_EL0, 0x1_2345_6789)?;
    let low = a32_at_el0(mrc(PMCCNTR_EL0), 0)?;
    check("PMCCNTR", low, 0x2345_6789)?;
    a32_at_el0(mcr(PMCCNTR_EL0), 7)?;
    let kept = read(PMCCNTR_EL0)?;
    check("PMCCNTR after MCR", kept, 0x1_0000_0007)?;

    a32_at_el0(mcr(PMCNTENSET_EL0), 1 << CYCLE)?;
    let enabled = a32_at_el0(mrc(PMCNTENCLR_EL0), 0)?;
    check("PMCNTEN", enabled, 1 << CYCLE)?;
    write(PMCNTENCLR_EL0, !0)?;
    a32_at_el0(mcr(PMSELR_EL0), 31)?;
    check("PMSELR", read(PMSELR_EL0)?, 31)?;
    let user = a32_at_el0(mrc(PMUSERENR_EL0), 0)?;
    check("PMUSERENR", user, EN)?;
    for (upper, register) in [(4, PMCEID0_EL0), (5, PMCEID1_EL0)] {
        let whole = read(register)?;
        let low = a32_at_el0(mrc(register), 0)?;
        check(register, low, whole & 0xffff_ffff)?;
        // PMCEID2 and PMCEID3 came with PMUv3p1.
        if version < V3P1 {
            continue;
        }
        let high = a32_at_el0(mrc(Encoding::op0_3(3, 9, 14, upper)), 0)?;
        check(format_args!("upper {register}"), high, whole >> 32)?;
    }
    Ok(())
}

/// Checks the cycle counter by MRRC and MCRR.
fn cycle_counter(_: &Context) -> Verdict {
    const MCRR_CLASS: u64 = 0x04;
    if !has_aarch32()? {
        return Ok(Pass::Skip("no AArch32"));
    }
    write(PMUSERENR_EL0, EN)?;
    write(PMCCNTR_EL0, 0x1_2345_6789)?;
    if a32_at_el0(MRRC_LOWER, 0) == Err(Fault::UNDEFINED) {
        return Ok(Pass::Deviates(NO_MRRC));
    }
    let lower = a32_at_el0(MRRC_LOWER, 0)?;
    check("PMCCNTR lower", lower, 0x2345_6789)?;
    let upper = a32_at_el0(MRRC_UPPER, 0)?;
    check("PMCCNTR upper", upper, 1)?;
    a32_at_el0(MCRR, 9)?;
    let both = read(PMCCNTR_EL0)?;
    check("PMCCNTR after MCRR", both, 0x9_0000_0009)?;
    write(PMUSERENR_EL0, CR)?;
    a32_at_el0(MRRC_LOWER, 0)?;
    let class = a32_at_el0(MCRR, 0).err().map_or(0, Fault::class);
    check("class of a refused MCRR", class, MCRR_CLASS)?;
    Ok(Pass::Ok)
}

/// Checks an event counter that AArch32 sets up, lets count and reads.
fn counter() -> Result<(), Failure> {
    write(PMUSERENR_EL0, EN)?;
    write(PMCR_EL0, 1)?;
    a32_at_el0(mcr(pmevtyper(0)), FILTER_P | u64::from(event::CPU_CYCLES))?;
    a32_at_el0(mcr(pmevcntr(0)), 100)?;
    let set = a32_at_el0(mrc(pmevcntr(0)), 0)?;
    check("PMEVCNTR0", set, 100)?;
    a32_at_el0(mcr(PMCNTENSET_EL0), 1)?;
    // Each access takes a few instructions, which count, too.
    for _ in 0..100 {
        a32_at_el0(mrc(PMSELR_EL0), 0)?;
    }
    a32_at_el0(mcr(PMCNTENCLR_EL0), 1)?;
    let counted = read(pmevcntr(0))?;
    check(
        format_args!("counted at EL0, of 100 runs {counted}"),
        (counted > 200).into(),
        1,
    )
}

/// Checks that accesses that PMUSERENR does not permit trap to EL1 with the class of the
/// instruction.
fn refused() -> Result<(), Failure> {
    const MCR_CLASS: u64 = 0x03;
    for (userenr, instruction, wanted) in [
        (0, mrc(PMCR_EL0), Some(MCR_CLASS)),
        (0, mcr(PMCNTENSET_EL0), Some(MCR_CLASS)),
        (CR, mrc(PMCCNTR_EL0), None),
        (CR, mrc(PMCR_EL0), Some(MCR_CLASS)),
        (0, mrc(PMUSERENR_EL0), None),
    ] {
        write(PMUSERENR_EL0, userenr)?;
        let class = a32_at_el0(instruction, 0).err().map(Fault::class);
        check(
            format_args!("class of {instruction:#x} with PMUSERENR {userenr:#x}"),
            class.unwrap_or(0),
            wanted.unwrap_or(0),
        )?;
    }
    Ok(())
}

/// Checks that an instruction whose condition fails does nothing, whether it is trapped or not.
fn failed_condition() -> Result<(), Failure> {
    const CONDITION: u32 = 0xf << 28;
    write(PMUSERENR_EL0, EN)?;
    write(PMSELR_EL0, 3)?;
    // The condition is EQ, and Z is clear when EL0 is entered.
    let never = mcr(PMSELR_EL0) & !CONDITION;
    a32_at_el0(never, 31)?;
    check("PMSELR", read(PMSELR_EL0)?, 3)
}

/// Checks that EL1's registers are UNDEFINED, whatever PMUSERENR says.
fn not_for_el0() -> Result<(), Failure> {
    write(PMUSERENR_EL0, EN)?;
    for instruction in [
        mrc(Encoding::op0_3(3, 9, 14, 1)),
        mcr(Encoding::op0_3(3, 9, 14, 2)),
        mcr(PMUSERENR_EL0),
    ] {
        let fault = a32_at_el0(instruction, 0).err();
        check(
            format_args!("{instruction:#x} is UNDEFINED"),
            fault.map_or(0, |fault| fault.syndrome),
            Fault::UNDEFINED.syndrome,
        )?;
    }
    Ok(())
}
