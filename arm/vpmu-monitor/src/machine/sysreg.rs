//! System registers by name.
//!
//! UNSAFETY: MRS and MSR have no safe form. Reads here have no side effects on memory; a write's
//! effect on the machine is its caller's responsibility, so [`write_sysreg!`] needs an `unsafe` block.

use vpmu_monitor::lock::Unlocked;

/// Waits until a physical interrupt is pending, which wakes the CPU even though EL2 masks interrupts.
pub(crate) fn wait_for_interrupt(_: &mut Unlocked) {
    // SAFETY: waits.
    unsafe { core::arch::asm!("wfi", options(nostack)) }
}

pub(crate) use vpmu_el2::{isb, numbered_sysreg, read_sysreg, write_sysreg};

/// `CNTPCT_EL0`: the system counter.
pub(crate) fn now() -> u64 {
    read_sysreg!("cntpct_el0")
}

/// Reads the ID register S3_0_C0_C`crm`_`op2`; 0 where `crm` is not 1 to 7. Those without a name read as zero
/// (DDI 0487, D24.2).
pub(crate) fn read_id_register(crm: u8, op2: u8) -> u64 {
    macro_rules! by_op2 {
        ($crm:literal) => {
            numbered_sysreg!(read concat!("s3_0_c0_c", $crm, "_"), op2, ""; 0 1 2 3 4 5 6 7)
        };
    }
    match crm {
        1 => by_op2!(1),
        2 => by_op2!(2),
        3 => by_op2!(3),
        4 => by_op2!(4),
        5 => by_op2!(5),
        6 => by_op2!(6),
        7 => by_op2!(7),
        _ => 0,
    }
}
