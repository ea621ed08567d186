//! Code run at EL0. With the MMU off, that may be any code of the image.

// UNSAFETY: changes the exception level.
#![expect(unsafe_code, reason = "changes the exception level")]

use core::arch::naked_asm;

use crate::fault::Fault;
use crate::percpu;

/// `SVC #0`, in AArch64 and in AArch32.
const SVC: [u64; 2] = [0x15 << 26 | 1 << 25, 0x11 << 26 | 1 << 25];

/// PSTATE of EL0, interrupts masked: EL0t in AArch64; User mode, A32, in AArch32.
const STATE: [u64; 2] = [0x3c0, 0x1d0];

/// Runs `code` at EL0 with x0 = `argument`, interrupts masked, until it raises
/// an exception. `SVC #0` is a good end and gives x0. Any other exception is
/// the fault.
///
/// # Safety
///
/// `code` must be code that uses no stack and ends in an exception.
pub(crate) unsafe fn run(code: usize, argument: u64) -> Result<u64, Fault> {
    // SAFETY: the caller's duty.
    end(unsafe { enter(code, argument, STATE[0]) })
}

/// Runs A32 code like [`run`], with r0 = `argument`.
///
/// # Safety
///
/// As for [`run`]. EL0 must also have AArch32.
pub(crate) unsafe fn run_aarch32(code: usize, argument: u64) -> Result<u64, Fault> {
    // SAFETY: the caller's duty.
    end(unsafe { enter(code, argument, STATE[1]) })
}

fn end(syndrome: u64) -> Result<u64, Fault> {
    if SVC.contains(&syndrome) {
        Ok(percpu::this().el0_result())
    } else {
        Err(Fault { syndrome })
    }
}

/// Returns, through the vectors, with ESR_EL1.
#[unsafe(naked)]
unsafe extern "C" fn enter(code: usize, argument: u64, state: u64) -> u64 {
    naked_asm!(
        "stp x29, x30, [sp, #-96]!",
        "stp x19, x20, [sp, #16]",
        "stp x21, x22, [sp, #32]",
        "stp x23, x24, [sp, #48]",
        "stp x25, x26, [sp, #64]",
        "stp x27, x28, [sp, #80]",
        "msr elr_el1, x0",
        "msr spsr_el1, x2",
        "mov x0, x1",
        "eret",
    )
}
