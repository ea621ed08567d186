//! Forged saved machines: the sums are right, and all else may be anything.
//!
//! Each is refused, or becomes a machine that can be saved again; nothing panics, and no file asks for more than its
//! own length and the largest guest.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use vpmu_vmm::forged;

static BLANK: LazyLock<Vec<u8>> = LazyLock::new(forged::blank);

/// Where most fields begin: the rest is pages of registers.
const HEAD: usize = 64;

fuzz_target!(|data: &[u8]| {
    let _ = forged::read(data);
    if let Ok(file) = forge(&mut Unstructured::new(data)) {
        let _ = forged::read(&file);
    }
});

/// The blank machine with some bytes of its state changed, and some memory.
fn forge(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut state = BLANK.clone();
    for _ in 0..input.int_in_range(0..=12)? {
        let last = match input.arbitrary()? {
            true => state.len(),
            false => HEAD.min(state.len()),
        };
        let mut at = input.int_in_range(0..=last)?;
        // From the end: the ports.
        if input.ratio(1, 4)? {
            at = state.len() - at;
        }
        match input.int_in_range(0..=3)? {
            0 => state.truncate(at),
            1 => {
                let end = state.len().min(at + input.int_in_range(1..=8)?);
                state.drain(at..end);
            }
            2 => {
                let more: [u8; 5] = input.arbitrary()?;
                let count = input.int_in_range(1..=5)?;
                state.splice(at..at, more[..count].iter().copied());
            }
            _ => {
                let value = input.arbitrary()?;
                state.get_mut(at).map(|byte| *byte = value);
            }
        }
    }
    let mut pages = Vec::new();
    for _ in 0..input.int_in_range(0..=4)? {
        let page = u64::from(input.arbitrary::<u32>()?) << 12;
        let at = match input.int_in_range(0..=7)? {
            0 => input.arbitrary()?,
            1 => page,
            _ => page & 0x3ff_ffff,
        };
        // A page, or what is none.
        let length = match input.int_in_range(0..=7)? {
            0 => input.int_in_range(0..=0x4000)?,
            _ => 0x1000,
        };
        pages.push((at, vec![0x5a; length]));
    }
    Ok(forged::file(&state, &pages))
}
