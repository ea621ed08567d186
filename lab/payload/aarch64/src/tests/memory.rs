//! The RAM that the device tree promises. Small kernels and test programs refuse RAM in pieces, and expect to be loaded
//! near its beginning.

// UNSAFETY: executes cache maintenance.
#![expect(unsafe_code, reason = "cache maintenance")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{Context, Test};
use crate::entry;
use crate::mmio::{read32, write32};
use vpmu_payload_harness::{Pass, Verdict, check};

pub(super) const TESTS: &[Test] = &[
    ("memory.one_piece", one_piece),
    ("memory.both_ends", both_ends),
    ("memory.set_way", set_way),
];

/// A kernel's image is loaded within this distance of RAM's beginning.
const NEAR: u64 = 8 << 20;

fn one_piece(cx: &Context) -> Verdict {
    let ram = &cx.machine.ram;
    check("pieces of RAM", cx.machine.pieces_of_ram as u64, 1)?;
    let image = entry::image_address();
    check(
        format_args!("image at {image:#x} near the beginning"),
        (ram.start..ram.start + NEAR).contains(&image).into(),
        1,
    )?;
    // Nothing is missing at the beginning.
    check("beginning's alignment", ram.start % (1 << 27), 0)?;
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

/// Checks that cache maintenance by set and way is executed, whichever line its operand names, and loses no data.
fn set_way(_: &Context) -> Verdict {
    let word = AtomicU64::new(0);
    for (instruction, operand) in (0..3).flat_map(|n| [0, 1 << 6, 2 << 1, !0].map(|o| (n, o))) {
        word.store(operand, Relaxed);
        // SAFETY: cleans and invalidates; with the MMU off, memory has what was written.
        unsafe {
            match instruction {
                0 => asm!("dc isw, {}", "dsb sy", in(reg) operand, options(nostack)),
                1 => asm!("dc csw, {}", "dsb sy", in(reg) operand, options(nostack)),
                _ => asm!("dc cisw, {}", "dsb sy", in(reg) operand, options(nostack)),
            }
        }
        check("the word", word.load(Relaxed), operand)?;
    }
    Ok(Pass::Ok)
}
