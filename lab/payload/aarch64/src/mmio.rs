//! Device registers. The accesses are spelled out as single instructions
//! without write-back. A monitor can complete a trapped access only when the
//! CPU describes it (ESR_EL2.ISV), which the compiler's choice of instruction
//! may prevent.

// UNSAFETY: device registers.
#![expect(unsafe_code, reason = "device registers")]

use core::arch::asm;

use crate::fault::Fault;
use crate::percpu;

/// Runs `access`, and returns the exception that it raised; its instruction is skipped.
pub(crate) fn fault_of(access: impl FnOnce()) -> Option<Fault> {
    let cpu = percpu::this();
    cpu.expect_exception();
    access();
    cpu.exception().map(|syndrome| Fault { syndrome })
}

/// Reads 32 bits. Callers take the address from the device tree.
pub(crate) fn read32(address: u64) -> u32 {
    let value: u32;
    // SAFETY: a load from a device changes no memory of the program.
    unsafe { asm!("ldr {0:w}, [{1}]", out(reg) value, in(reg) address, options(nostack)) }
    value
}

/// Reads 64 bits.
pub(crate) fn read64(address: u64) -> u64 {
    let value: u64;
    // SAFETY: as above.
    unsafe { asm!("ldr {0}, [{1}]", out(reg) value, in(reg) address, options(nostack)) }
    value
}

/// Writes 32 bits.
pub(crate) fn write32(address: u64, value: u32) {
    // SAFETY: a store to a device changes no memory of the program.
    unsafe { asm!("str {0:w}, [{1}]", in(reg) value, in(reg) address, options(nostack)) }
}

/// Writes 8 bits.
pub(crate) fn write8(address: u64, value: u8) {
    // SAFETY: as above.
    unsafe {
        asm!("strb {0:w}, [{1}]", in(reg) u32::from(value), in(reg) address, options(nostack));
    }
}

/// Writes 64 bits.
pub(crate) fn write64(address: u64, value: u64) {
    // SAFETY: as above.
    unsafe { asm!("str {0}, [{1}]", in(reg) value, in(reg) address, options(nostack)) }
}
