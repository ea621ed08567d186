//! Gives an exception to EL1.
//!
//! UNSAFETY: writes EL1's exception registers.

use crate::access::Vcpu;
use crate::exception::ExceptionEntry;
use crate::sysreg::{HCR_E2H, el1, read_sysreg, write_sysreg};

/// Gives the guest on this CPU a synchronous exception with syndrome `esr`: writes ESR_EL1, ELR_EL1 and SPSR_EL1, and the
/// PC and the state in which the guest goes on.
pub fn inject(esr: u64, vcpu: Vcpu<'_>) {
    // ID_AA64PFR1_EL1.MTE.
    let mte = read_sysreg!("id_aa64pfr1_el1") >> 8 & 0xf != 0;
    let e2h = read_sysreg!("hcr_el2") & HCR_E2H != 0;
    let (vbar, sctlr) = (el1!(e2h, read_sysreg, vbar), el1!(e2h, read_sysreg, sctlr));
    let entry = ExceptionEntry::synchronous(*vcpu.pstate, vbar, sctlr, mte);
    // SAFETY: EL1's own exception registers, as the processor would write them.
    unsafe {
        el1!(e2h, write_sysreg, esr, esr);
        el1!(e2h, write_sysreg, elr, *vcpu.pc);
        el1!(e2h, write_sysreg, spsr, *vcpu.pstate);
    }
    *vcpu.pc = entry.pc;
    *vcpu.pstate = entry.pstate;
}
