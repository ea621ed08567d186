//! Sequences of Arm PMU register accesses, on each design.
//!
//! The first byte chooses the design. Emulated: the engine must stay equal to the reference model
//! of its tests, on a host that checks how it is called. Partitioned, and emulated on physical counters:
//! on a model of the hardware, no guest may reach a host counter or count outside the guest. And
//! nothing may panic.
#![no_main]

mod backed;
#[path = "../../engine/vpmu/tests/engine/pair.rs"]
mod pair;
mod partitioned;
#[path = "../../engine/vpmu/tests/engine/reference.rs"]
mod reference;
#[path = "../../engine/vpmu/tests/engine/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use pair::{Pair, Step};
use vpmu::arm::{ExceptionLevel, PmuVersion, Register};
use vpmu::counter::Policy;

fuzz_target!(|data: &[u8]| {
    let mut input = Unstructured::new(data);
    // An input ends where its bytes do.
    let _ = match input.int_in_range(0..=2) {
        Ok(0) => emulated(&mut input),
        Ok(1) => partitioned::run(&mut input),
        Ok(_) => backed::run(&mut input),
        Err(_) => Ok(()),
    };
});

fn emulated(input: &mut Unstructured<'_>) -> Result<()> {
    let counters = *input.choose(&[4, 4, 0, 1, 6, 31])?;
    let policy = *input.choose(&Policy::ALL)?;
    let mut pair = Pair::new(version(input)?, counters, input.arbitrary()?, policy);
    while !input.is_empty() {
        pair.step(&step(input)?);
    }
    Ok(())
}

fn step(input: &mut Unstructured<'_>) -> Result<Step> {
    Ok(match input.int_in_range(0..=15)? {
        0..=5 => Step::Write(register(input)?, level(input)?, value(input)?),
        6 => Step::Read(register(input)?, level(input)?),
        7..=9 => Step::Happen(event(input)?, level(input)?, value(input)? >> 20),
        10 => Step::Deliver(input.arbitrary()?),
        11 => Step::Early(input.arbitrary()?),
        12 => Step::Put,
        13 => Step::Load,
        14 if input.arbitrary()? => Step::Filter(input.arbitrary()?),
        14 => Step::Refuse(input.arbitrary()?),
        _ => Step::Migrate,
    })
}

fn version(input: &mut Unstructured<'_>) -> Result<PmuVersion> {
    use PmuVersion::{V3, V3p1, V3p4, V3p5};
    Ok(*input.choose(&[V3, V3p1, V3p4, V3p5])?)
}

fn level(input: &mut Unstructured<'_>) -> Result<ExceptionLevel> {
    Ok(if input.ratio(1, 8)? {
        ExceptionLevel::El0
    } else {
        ExceptionLevel::El1
    })
}

fn event(input: &mut Unstructured<'_>) -> Result<u16> {
    Ok(*input.choose(&[0x08, 0x11, 0x13])?)
}

/// Any register, those of the first counters more often.
fn register(input: &mut Unstructured<'_>) -> Result<Register> {
    use Register::*;
    const COMMON: [Register; 25] = [
        Pmcr,
        PmcntenSet,
        PmcntenClr,
        PmovsSet,
        PmovsClr,
        PmintenSet,
        PmintenClr,
        Pmswinc,
        Pmselr,
        Pmxevtyper,
        Pmxevcntr,
        Pmccntr,
        Pmccfiltr,
        Pmuserenr,
        Pmceid0,
        Pmceid1,
        Pmmir,
        Pmevtyper(0),
        Pmevtyper(1),
        Pmevtyper(2),
        Pmevtyper(3),
        Pmevcntr(0),
        Pmevcntr(1),
        Pmevcntr(2),
        Pmevcntr(3),
    ];
    let n = input.int_in_range(0..=31_u8)?;
    Ok(match COMMON.get(usize::from(n)) {
        Some(&register) => register,
        None if n & 1 == 0 => Pmevtyper(input.arbitrary()?),
        None => Pmevcntr(input.arbitrary()?),
    })
}

/// Values near which something happens, and any.
fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    let small = u64::from(input.arbitrary::<u8>()?);
    Ok(match input.int_in_range(0..=7)? {
        0..=1 => small,
        2 => (1 << 32) - small,
        3 => small.wrapping_neg(),
        4 => small << 24 | *input.choose(&[0, 0x08, 0x11, 0x13, 0x1e])?,
        5 => *input.choose(&[0, 0x08, 0x11, 0x13, 0x1e])?,
        6 => 1 << (small & 63),
        _ => input.arbitrary()?,
    })
}
