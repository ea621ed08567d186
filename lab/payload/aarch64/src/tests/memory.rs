//! The RAM that the device tree promises. Small kernels and test programs refuse RAM in pieces, and expect to be loaded
//! near its beginning.

use super::{Context, Test};
use crate::entry;
use crate::mmio::{read32, write32};
use vpmu_payload_harness::{Pass, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("memory.one_piece", one_piece),
    ("memory.both_ends", both_ends),
];

/// A kernel's image is loaded within this distance of RAM's beginning.
const NEAR: u64 = 8 << 20;

fn one_piece(cx: &Context) -> Verdict {
    let ram = &cx.machine.ram;
    check(
        format_args!("pieces of RAM"),
        cx.machine.pieces_of_ram as u64,
        1,
    )?;
    let image = entry::image_address();
    check(
        format_args!("image at {image:#x} near the beginning"),
        (ram.start..ram.start + NEAR).contains(&image).into(),
        1,
    )?;
    // Nothing is missing at the beginning.
    check(
        format_args!("beginning's alignment"),
        ram.start % (1 << 27),
        0,
    )?;
    Ok(Pass::Ok)
}

/// Checks that the first and the last word can be written.
fn both_ends(cx: &Context) -> Verdict {
    for address in [cx.machine.ram.start, cx.machine.ram.end - 4] {
        let old = read32(address);
        write32(address, !old);
        let new = read32(address);
        write32(address, old);
        check(
            format_args!("word at {address:#x}"),
            new.into(),
            (!old).into(),
        )?;
    }
    Ok(Pass::Ok)
}
