//! System registers by name.
//!
//! UNSAFETY: MRS and MSR have no safe form. Reads here change no memory; a write needs an `unsafe` block.

/// Reads a system register.
#[doc(hidden)]
#[macro_export]
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
#[doc(hidden)]
#[macro_export]
macro_rules! write_sysreg {
    ($name:expr, $value:expr) => {
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) u64::from($value), options(nostack))
    };
}

/// Reads, or writes a value to, the register of a name with the number `$n` in it, of the numbers behind the semicolon. Of another
/// number there is none: it reads as zero, and a write does nothing.
#[doc(hidden)]
#[macro_export]
macro_rules! numbered_sysreg {
    (read $before:expr, $n:expr, $after:literal; $($number:literal)*) => {
        match $n {
            $($number => $crate::read_sysreg!(concat!($before, $number, $after)),)*
            _ => 0,
        }
    };
    (write $before:expr, $n:expr, $after:literal, $value:expr; $($number:literal)*) => {
        match $n {
            $($number => $crate::write_sysreg!(concat!($before, $number, $after), $value),)*
            _ => {}
        }
    };
}

/// HCR_EL2.E2H, which is always set where FEAT_E2H0 is missing: at EL2 the names of EL1's registers are then those of EL2's own, and
/// EL1's have other names.
pub(crate) const HCR_E2H: u64 = 1 << 34;

/// Registers of EL1 by their two names, the second where `e2h`: SCTLR_EL12 and so on, which assemblers may not know.
macro_rules! el1 {
    ($e2h:expr, $access:ident, sctlr $(, $value:expr)?) => { el1!($e2h, $access, "sctlr_el1", "s3_5_c1_c0_0" $(, $value)?) };
    ($e2h:expr, $access:ident, vbar $(, $value:expr)?) => { el1!($e2h, $access, "vbar_el1", "s3_5_c12_c0_0" $(, $value)?) };
    ($e2h:expr, $access:ident, esr $(, $value:expr)?) => { el1!($e2h, $access, "esr_el1", "s3_5_c5_c2_0" $(, $value)?) };
    ($e2h:expr, $access:ident, elr $(, $value:expr)?) => { el1!($e2h, $access, "elr_el1", "s3_5_c4_c0_1" $(, $value)?) };
    ($e2h:expr, $access:ident, spsr $(, $value:expr)?) => { el1!($e2h, $access, "spsr_el1", "s3_5_c4_c0_0" $(, $value)?) };
    ($e2h:expr, $access:ident, $name:literal, $other:literal $(, $value:expr)?) => {
        if $e2h { $access!($other $(, $value)?) } else { $access!($name $(, $value)?) }
    };
}

/// Waits until earlier system-register writes have taken effect.
pub fn isb() {
    // SAFETY: a barrier only orders.
    unsafe { core::arch::asm!("isb", options(nostack)) }
}

pub(crate) use {crate::numbered_sysreg, crate::read_sysreg, crate::write_sysreg, el1};
