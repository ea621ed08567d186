//! System registers by name.
//!
//! UNSAFETY: MRS and MSR have no safe form. Reads here change no memory; a write needs an `unsafe` block.

/// Reads a system register.
macro_rules! read_sysreg {
    ($name:expr) => {{
        let value: u64;
        // SAFETY: reading a system register that exists at EL2 changes no memory.
        unsafe {
            core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack));
        }
        value
    }};
}

/// Writes a system register; needs an `unsafe` block.
macro_rules! write_sysreg {
    ($name:expr, $value:expr) => {
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) u64::from($value), options(nostack))
    };
}

/// Waits until earlier system-register writes have taken effect.
pub(crate) fn isb() {
    // SAFETY: a barrier only orders.
    unsafe { core::arch::asm!("isb", options(nostack)) }
}

pub(crate) use {read_sysreg, write_sysreg};
