//! Last branch records of a guest that writes anything into their registers, while its embedder hands over any branches.
//!
//! The engine must stay equal to the reference model of its tests. And nothing may panic.
#![no_main]

#[path = "../../engine/vpmu/tests/x86/guest.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod guest;
#[path = "../../engine/vpmu/tests/x86/lbr/pair.rs"]
mod pair;
#[path = "../../engine/vpmu/tests/x86/pebs_reference.rs"]
mod pebs_reference;
#[path = "../../engine/vpmu/tests/x86/lbr/reference.rs"]
mod reference;
#[path = "../../engine/vpmu/tests/x86/samples.rs"]
mod samples;
#[path = "../../engine/vpmu/tests/x86/support.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod support;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use pair::{Pair, Step, addresses, globals, has_pebs};
use vpmu::x86::lbr::{self, Branch, Kind};
use vpmu::x86::{Capability, Ring, amd, intel};

fuzz_target!(|data: &[u8]| {
    // An input ends where its bytes do.
    let _ = run(&mut Unstructured::new(data));
});

fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let capability = capability(input)?;
    let mut pair = Pair::new(capability, input.arbitrary()?);
    while !input.is_empty() {
        pair.step(&step(&capability, input)?);
    }
    Ok(())
}

fn capability(input: &mut Unstructured<'_>) -> Result<Capability> {
    if input.ratio(1, 3)? {
        return Ok(Capability::Amd(amd::Capability {
            lbr: Some(lbr::amd::Capability::default()),
            ..amd::Capability::new(amd::Interface::V2)
        }));
    }
    let lbr = lbr::intel::Capability {
        depths: input.int_in_range(1..=15)?,
        call_stack: input.arbitrary()?,
        mispredict: input.arbitrary()?,
        cycles: input.arbitrary()?,
        linear_address_bits: *input.choose(&[48, 57])?,
    };
    let version = *input.choose(&[intel::Version::V4, intel::Version::V5])?;
    Ok(Capability::Intel(intel::Capability {
        lbr: Some(lbr),
        pebs: input.arbitrary::<bool>()?.then(Default::default),
        ..intel::Capability::new(version)
    }))
}

fn step(capability: &Capability, input: &mut Unstructured<'_>) -> Result<Step> {
    const STATUS: u64 = 1 << 58 | 1 << 59 | 1;
    let [control, _, clear, set] = globals(capability);
    if has_pebs(capability) && input.ratio(1, 3)? {
        return step_of_pebs(input);
    }
    Ok(match input.int_in_range(0..=21)? {
        0..=9 => Step::Branch(branch(input)?),
        10..=13 => {
            let all = addresses(capability);
            Step::Write(*input.choose(&all)?, value(input)?)
        }
        14 => Step::Read(*input.choose(&addresses(capability))?),
        15 => match input.int_in_range(0..=2)? {
            0 => Step::Write(control, input.arbitrary::<bool>()?.into()),
            1 => Step::Write(clear, STATUS & input.arbitrary::<u64>()?),
            _ => Step::Write(set, STATUS & input.arbitrary::<u64>()?),
        },
        16 => Step::Overflow,
        17 => Step::EndFollowing,
        18 => Step::TakePmi,
        19 => Step::Migrate,
        20 => Step::Lose,
        _ if input.ratio(1, 4)? => Step::Reset,
        _ => Step::Disable,
    })
}

fn step_of_pebs(input: &mut Unstructured<'_>) -> Result<Step> {
    const STATUS: u64 = 1 << 62 | 2;
    Ok(match input.int_in_range(0..=7)? {
        0..=2 => Step::Count(input.int_in_range(1..=1 << 48)?),
        3 => Step::GoOn(
            *input.choose(&[Ring::User, Ring::Kernel])?,
            input.arbitrary()?,
        ),
        4 => Step::EmptyBuffer,
        5 => Step::Write(0x3f2, input.arbitrary::<u64>()? & 0x1f00_000f),
        6 => Step::Write(0x3f1, input.arbitrary::<u64>()? & 2),
        _ => Step::Write(0x390, input.arbitrary::<u64>()? & STATUS),
    })
}

fn branch(input: &mut Unstructured<'_>) -> Result<Branch> {
    const KINDS: [Kind; 8] = [
        Kind::Conditional,
        Kind::RelativeJump,
        Kind::IndirectJump,
        Kind::RelativeCall,
        Kind::NextCall,
        Kind::IndirectCall,
        Kind::Return,
        Kind::Other,
    ];
    const RINGS: [Ring; 2] = [Ring::User, Ring::Kernel];
    Ok(Branch {
        from: input.arbitrary()?,
        to: input.arbitrary()?,
        kind: *input.choose(&KINDS)?,
        from_ring: *input.choose(&RINGS)?,
        to_ring: *input.choose(&RINGS)?,
        mispredicted: input.arbitrary()?,
        cycles: input.arbitrary()?,
    })
}

fn value(input: &mut Unstructured<'_>) -> Result<u64> {
    let small = u64::from(input.arbitrary::<u8>()?);
    Ok(match input.int_in_range(0..=6)? {
        0 => 0x7f_0007,
        1 => small << 16 | 0xf,
        2 => small,
        3 => 8 * (small & 7),
        4 => (small & 3) << 11,
        5 => 1 << (small & 63),
        _ => input.arbitrary()?,
    })
}
