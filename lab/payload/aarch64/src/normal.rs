//! Device frames reached through a mapping of Normal memory, which lets unaligned accesses through.
//!
//! Stage 1 decides whether an unaligned access faults before the access is made (Arm ARM DDI 0487,
//! B2.5 "Alignment support"). With the MMU off, everything is Device memory and such an access
//! always faults.

// UNSAFETY: switches the MMU on and makes accesses of any alignment.
#![expect(unsafe_code, reason = "switches the MMU on")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::encoding::ID_AA64MMFR0_EL1;
use crate::fault::Fault;
use crate::{cell, percpu};

/// A table of 512 blocks of 1 GiB.
#[repr(align(4096))]
struct Table([AtomicU64; 512]);

static TABLE: Table = Table([const { AtomicU64::new(0) }; 512]);

/// AF, inner shareable, attribute 0, block.
const BLOCK: u64 = 1 << 10 | 3 << 8 | 1;
/// Attribute 0: Normal, non-cacheable.
const MAIR: u64 = 0x44;
/// 39 bits, 4 KiB granule, no walks of the upper half.
const TCR: u64 = 1 << 23 | 25;

/// Runs `body` with the first 512 GiB mapped onto themselves as Normal memory. `body` must not print.
pub(crate) fn mapped<T>(body: impl FnOnce() -> T) -> Result<T, Fault> {
    for (index, entry) in TABLE.0.iter().enumerate() {
        entry.store((index as u64) << 30 | BLOCK, Relaxed);
    }
    // PARange and IPS have the same encoding. For sizes beyond 48 bits, 48 suffice.
    let size = (cell::read(ID_AA64MMFR0_EL1)? & 0xf).min(5);
    // SAFETY: everything stays where it was.
    unsafe {
        asm!(
            "msr mair_el1, {mair}",
            "msr tcr_el1, {tcr}",
            "msr ttbr0_el1, {table}",
            "dsb sy",
            "isb",
            "tlbi vmalle1",
            "dsb sy",
            "mrs {old}, sctlr_el1",
            "orr {old}, {old}, #1",
            "msr sctlr_el1, {old}",
            "isb",
            mair = in(reg) MAIR,
            tcr = in(reg) TCR | size << 32,
            table = in(reg) &raw const TABLE,
            old = out(reg) _,
        );
    }
    let result = body();
    // SAFETY: as above.
    unsafe {
        asm!(
            "dsb sy",
            "mrs {old}, sctlr_el1",
            "bic {old}, {old}, #1",
            "msr sctlr_el1, {old}",
            "isb",
            old = out(reg) _,
        );
    }
    Ok(result)
}

/// Stores all ones to `bytes` bytes (1, 2, 4 or 8) at `address`, and returns the exception that the store raised.
pub(crate) fn store_ones(address: u64, bytes: u8) -> Option<Fault> {
    let cpu = percpu::this();
    cpu.expect_exception();
    // SAFETY: the callers pass device registers; an exception is noted and skipped.
    unsafe {
        match bytes {
            1 => asm!("strb {0:w}, [{1}]", "dsb sy", in(reg) u64::MAX, in(reg) address),
            2 => asm!("strh {0:w}, [{1}]", "dsb sy", in(reg) u64::MAX, in(reg) address),
            4 => asm!("str {0:w}, [{1}]", "dsb sy", in(reg) u64::MAX, in(reg) address),
            _ => asm!("str {0}, [{1}]", "dsb sy", in(reg) u64::MAX, in(reg) address),
        }
    }
    cpu.exception().map(|syndrome| Fault { syndrome })
}
