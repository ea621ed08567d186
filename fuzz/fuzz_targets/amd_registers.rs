//! Sequences of AMD PMU accesses, under every policy and interface.
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
#[expect(dead_code, reason = "AMD's counters have no records")]
mod pebs_reference;
#[path = "../../engine/vpmu/tests/x86/amd/reference.rs"]
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
use pair::{Reference as _, Step};
use reference::Reference;
use support::Happening;
use vpmu::x86::ArchEvent;
use vpmu::x86::amd::{Capability, Interface};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    use Interface::{Core, Legacy, V2};
    let mut capability = Capability::new(*input.choose(&[Legacy, Core, V2])?);
    if input.ratio(1, 4)? {
        capability.events = input.arbitrary()?;
    }
    let policy = steps::policy(input)?;
    let mut pair = steps::pair::<Reference>(policy, capability, input)?;
    let addresses = Reference::addresses();
    while !input.is_empty() {
        pair.step(&step(input, &addresses)?);
    }
    Ok(())
}

fn step(input: &mut Unstructured<'_>, addresses: &[u32]) -> Result<Step> {
    Ok(match input.int_in_range(0..=20)? {
        0..=6 => Step::Write(*input.choose(addresses)?, value(input)?),
        7 => Step::Read(*input.choose(addresses)?),
        8 => {
            let ecx = *input.choose(&[0, 1, 2, 3, 4, 5, 6, 10, 0x100, 1 << 30, 1 << 31])?;
            Step::Rdpmc(ecx, steps::ring(input)?, input.arbitrary()?)
        }
        9..=11 => {
            use Happening::{Cycles, Instructions, Other, TscCycles};
            let what = *input.choose(&[Instructions, Cycles, TscCycles, Other(0x34, 0x12)])?;
            Step::Happen(what, steps::ring(input)?, value(input)? >> 16)
        }
        12 => {
            use ArchEvent::{Branches, CoreCycles, Instructions, ReferenceCycles};
            let event = *input.choose(&[Instructions, CoreCycles, Branches, ReferenceCycles])?;
            Step::Emulate(event, steps::ring(input)?, input.arbitrary::<u8>()?.into())
        }
        kind => steps::any(kind, input)?,
    })
}

/// Values near which something happens, and any.
fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    const EVENTS: [u64; 5] = [0xc0, 0x76, 0x1_0000_0120, 0xc2, 0xf_0000_00ff];
    let small = u64::from(input.arbitrary::<u8>()?);
    Ok(match input.int_in_range(0..=8)? {
        0 => small,
        1..=3 => (1 << 48) - 1 - small,
        4..=5 => small << 16 | *input.choose(&EVENTS)?,
        6 => 0x0053_0000 | *input.choose(&EVENTS)?,
        7 => 1 << (small & 63),
        _ => input.arbitrary()?,
    })
}
