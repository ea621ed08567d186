//! Sequences of x86 PMU accesses, under every policy and capability.
//!
//! The engine must stay equal to the reference model of its tests, on a host that checks how it is
//! called. And nothing may panic.
#![no_main]

#[path = "../../engine/vpmu/tests/x86/guest.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod guest;
#[path = "../../engine/vpmu/tests/x86/pair.rs"]
#[expect(dead_code, reason = "what is about records is tried by another target")]
mod pair;
#[path = "../../engine/vpmu/tests/x86/pebs_reference.rs"]
mod pebs_reference;
#[path = "../../engine/vpmu/tests/x86/reference.rs"]
mod reference;
#[path = "../../engine/vpmu/tests/x86/samples.rs"]
mod samples;
#[path = "steps.rs"]
mod steps;
#[path = "../../engine/vpmu/tests/x86/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use pair::Step;
use support::Happening;
use vpmu::x86::ArchEvent;
use vpmu::x86::intel::{Capability, Msr, Version};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    // In this order, which the kept inputs know.
    let (policy, capability) = (steps::policy(input)?, capability(input)?);
    let mut pair = steps::pair::<reference::Reference>(policy, capability, input)?;
    while !input.is_empty() {
        pair.step(&step(input)?);
    }
    Ok(())
}

fn capability(input: &mut Unstructured<'_>) -> Result<Capability> {
    use Version::{V2, V3, V4, V5};
    let usual = Capability::new(*input.choose(&[V2, V3, V4, V5])?);
    if input.ratio(3, 4)? {
        return Ok(usual);
    }
    // Most of what can be asked for cannot be.
    let unusual = Capability {
        general: input.arbitrary()?,
        general_width: input.arbitrary()?,
        fixed: input.arbitrary::<u8>()?.into(),
        fixed_width: input.arbitrary()?,
        events: input.arbitrary::<u8>()?.into(),
        pdcm: input.arbitrary()?,
        full_width_writes: input.arbitrary()?,
        freeze_while_smm: input.arbitrary()?,
        leaf_23: input.arbitrary()?,
        other_debugctl: input.arbitrary::<u16>()?.into(),
        ..usual
    };
    Ok(match unusual.check() {
        Ok(()) => unusual,
        Err(_) => usual,
    })
}

fn step(input: &mut Unstructured<'_>) -> Result<Step> {
    Ok(match input.int_in_range(0..=20)? {
        0..=6 => Step::Write(address(input)?, value(input)?),
        7 => Step::Read(address(input)?),
        8 => {
            let kind = *input.choose(&[0_u32, 0x4000, 0x2000, 0x8000, 1])?;
            let index: u32 = input.int_in_range(0..=8)?;
            Step::Rdpmc(kind << 16 | index, steps::ring(input)?, input.arbitrary()?)
        }
        9..=11 => Step::Happen(happening(input)?, steps::ring(input)?, value(input)? >> 16),
        12 => {
            use ArchEvent::{Branches, CoreCycles, Instructions, TscCycles};
            let event = *input.choose(&[Instructions, CoreCycles, Branches, TscCycles])?;
            Step::Emulate(event, steps::ring(input)?, input.arbitrary::<u8>()?.into())
        }
        kind => steps::any(kind, input)?,
    })
}

fn happening(input: &mut Unstructured<'_>) -> Result<Happening> {
    use Happening::{Cycles, Instructions, Other, TscCycles};
    Ok(*input.choose(&[Instructions, Cycles, TscCycles, Other(0x34, 0x12)])?)
}

/// The MSRs of the PMU, and some of others.
fn address(input: &mut Unstructured<'_>) -> Result<u32> {
    let n = input.int_in_range(0..=47_usize)?;
    Ok(Msr::all().nth(n).map_or(0x3f1, Msr::address))
}

/// Values near which something happens, and any.
fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    let small = u64::from(input.arbitrary::<u8>()?);
    Ok(match input.int_in_range(0..=9)? {
        0 => small,
        1 => (1 << 32) - 1 - small,
        2..=3 => (1 << 48) - 1 - small,
        4..=5 => small << 16 | *input.choose(&[0xc0, 0x3c, 0xc4, 0x1234])?,
        6 => 0x0053_0000 | *input.choose(&[0xc0, 0x3c, 0xc4, 0x1234])?,
        7 => (small & 0xf) << 32 | small >> 4,
        8 => 1 << (small & 63),
        _ => input.arbitrary()?,
    })
}
