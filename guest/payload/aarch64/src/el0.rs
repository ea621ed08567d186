//! Code run at EL0. With the MMU off it may be any code of the image.

// UNSAFETY: changes the exception level.
#![expect(unsafe_code, reason = "changes the exception level")]

use core::arch::naked_asm;

use crate::fault::Fault;
use crate::percpu;

/// `SVC #0`
const SVC: u64 = 0x15 << 26 | 1 << 25;

/// Runs `code` at EL0 with x0 = `argument`, interrupts masked, until it raises
/// an exception. `SVC #0` ends it well, with x0; anything else is the fault.
///
/// # Safety
///
/// `code` must be code that uses no stack and ends in an exception.
pub(crate) unsafe fn run(code: usize, argument: u64) -> Result<u64, Fault> {
    // SAFETY: the caller's duty.
    let syndrome = unsafe { enter(code, argument) };
    if syndrome == SVC {
        Ok(percpu::this().el0_result())
    } else {
        Err(Fault { syndrome })
    }
}

/// Returns, through the vectors, with ESR_EL1.
#[unsafe(naked)]
unsafe extern "C" fn enter(code: usize, argument: u64) -> u64 {
    naked_asm!(
        "stp x29, x30, [sp, #-96]!",
        "stp x19, x20, [sp, #16]",
        "stp x21, x22, [sp, #32]",
        "stp x23, x24, [sp, #48]",
        "stp x25, x26, [sp, #64]",
        "stp x27, x28, [sp, #80]",
        "msr elr_el1, x0",
        // EL0t, interrupts masked.
        "mov x9, #0x3c0",
        "msr spsr_el1, x9",
        "mov x0, x1",
        "eret",
    )
}
