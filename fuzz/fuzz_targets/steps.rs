//! A PMU of any vendor beside its reference, and what happens to its guest. Not a target by itself.

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use vpmu::counter::{Lost, Policy, Report};
use vpmu::x86::{Capability, PmuConfig, Ring};

use crate::pair::{Pair, Reference, Step};

pub fn policy(input: &mut Unstructured<'_>) -> Result<Policy> {
    Ok(*input.choose(&Policy::ALL)?)
}

pub fn pair<R: Reference>(
    policy: Policy,
    capability: impl Into<Capability>,
    input: &mut Unstructured<'_>,
) -> Result<Pair<R>> {
    let config = PmuConfig {
        policy,
        ..PmuConfig::new(capability.into())
    };
    let [atomic, prompt, repeats] = input.arbitrary()?;
    Ok(Pair::new(config, atomic, prompt, repeats))
}

pub fn ring(input: &mut Unstructured<'_>) -> Result<Ring> {
    Ok(*input.choose(&[Ring::User, Ring::Kernel])?)
}

/// The step of this number, 13 or above.
pub fn any(kind: i32, input: &mut Unstructured<'_>) -> Result<Step> {
    Ok(match kind {
        13 => {
            let report = *input.choose(&[Report::Due, Report::Moved, Report::Unsure])?;
            Step::Deliver(input.arbitrary()?, report)
        }
        14 => Step::Early(input.arbitrary()?),
        15 => Step::Put,
        16 => Step::Load,
        17 if input.arbitrary()? => Step::EndSlice,
        17 => Step::Filter(input.arbitrary()?),
        18 => Step::Refuse(*input.choose(&[None, Some(Lost::Busy), Some(Lost::Unsupported)])?),
        19 => Step::TakePmi,
        _ => Step::Migrate,
    })
}
