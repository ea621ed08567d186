//! PEBS records of a guest that does anything with its DS save area and buffer, while its counters overflow.
//!
//! The engine must leave the guest's memory, its registers and its statistics as the reference model of its tests does.
//! And nothing may panic.
#![no_main]

#[path = "../../engine/vpmu/tests/x86/guest.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod guest;
#[path = "../../engine/vpmu/tests/x86/pair.rs"]
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

use guest::FakeGuest;
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use pair::Step;
use support::Happening;
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::{ArchEvent, Ring, pebs};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    use Version::{V2, V3, V4, V5};
    let capability = Capability {
        pebs: Some(pebs::Capability {
            linear_address_bits: *input.choose(&[48, 57])?,
        }),
        ..Capability::new(*input.choose(&[V2, V3, V4, V5])?)
    };
    let policy = steps::policy(input)?;
    let mut pair = steps::pair::<reference::Reference>(policy, capability, input)?;
    for step in begin() {
        pair.step(&step);
    }
    while !input.is_empty() {
        pair.step(&step(input)?);
    }
    Ok(())
}

/// A buffer for some records, and two counters that soon write there.
fn begin() -> impl Iterator<Item = Step> {
    const AREA: u64 = FakeGuest::RAM;
    const BUFFER: u64 = AREA + 0x100;
    let fields = [
        (0x20, BUFFER),
        (0x28, BUFFER),
        (0x30, BUFFER + 0x800),
        (0x38, BUFFER + 0x400),
    ];
    let resets = [(0x40, 10_u64.wrapping_neg()), (0x80, 7_u64.wrapping_neg())];
    let stores = fields.into_iter().chain(resets);
    let writes = [
        (0x600, AREA),
        (0x4c1, (1 << 48) - 10),
        (0x309, (1 << 48) - 7),
        (0x186, 0x4_0043_00c0),
        (0x38d, 0x1_0000_0003),
        (0x3f1, 0x1_0000_0001),
        (0x38f, 0x1_0000_0001),
    ];
    let stores = stores.map(|(offset, value)| Step::Store(AREA + offset, value));
    stores.chain(writes.map(|(address, value)| Step::Write(address, value)))
}

fn step(input: &mut Unstructured<'_>) -> Result<Step> {
    const FIELDS: [u64; 8] = [0x20, 0x28, 0x30, 0x38, 0x40, 0x48, 0x80, 0x88];
    const MSRS: [u32; 10] = [
        0x600, 0x3f1, 0x3f2, 0x38d, 0x38f, 0x390, 0x186, 0x187, 0x4c1, 0x309,
    ];
    Ok(match input.int_in_range(0..=20)? {
        0..=4 => Step::Happen(
            *input.choose(&[Happening::Instructions, Happening::Cycles])?,
            steps::ring(input)?,
            input.arbitrary::<u8>()?.into(),
        ),
        5..=7 => Step::Store(FakeGuest::RAM + input.choose(&FIELDS)?, value(input)?),
        8 => Step::Store(value(input)?, value(input)?),
        9..=11 => Step::Write(*input.choose(&MSRS)?, value(input)?),
        12 => match input.int_in_range(0..=3)? {
            0 => Step::Mute(input.ratio(1, 4)?),
            1 => Step::Read(*input.choose(&MSRS)?),
            2 => Step::Rdpmc(*input.choose(&[0, 1, 0x4000_0000])?, Ring::Kernel, false),
            _ => {
                let times = input.arbitrary::<u8>()?.into();
                Step::Emulate(ArchEvent::Instructions, steps::ring(input)?, times)
            }
        },
        kind => steps::any(kind, input)?,
    })
}

/// Addresses near the ends of what there is, masks, resets, and any.
fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    let small = u64::from(input.arbitrary::<u8>()?);
    Ok(match input.int_in_range(0..=9)? {
        0..=2 => FakeGuest::RAM + 8 * small,
        3 => FakeGuest::RAM + 0xc00 - small,
        4 => FakeGuest::ROM + small,
        5 => FakeGuest::TOP + 4 * small,
        6 => small.wrapping_neg(),
        7 => (small & 0xf) << 32 | small >> 4,
        8 => small << 30 | 0x0043_00c0,
        _ => input.arbitrary()?,
    })
}
