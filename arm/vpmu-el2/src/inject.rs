//! Gives an exception to EL1.
//!
//! UNSAFETY: writes EL1's exception registers.

use crate::access::Vcpu;
use crate::exception::ExceptionEntry;
use crate::sysreg::{read_sysreg, write_sysreg};

/// Gives the guest on this CPU a synchronous exception with syndrome `esr`: writes ESR_EL1, ELR_EL1 and SPSR_EL1, and the
/// PC and the state in which the guest goes on. HCR_EL2.E2H is 0.
pub fn inject(esr: u64, vcpu: Vcpu<'_>) {
    // ID_AA64PFR1_EL1.MTE.
    let mte = read_sysreg!("id_aa64pfr1_el1") >> 8 & 0xf != 0;
    let (vbar, sctlr) = (read_sysreg!("vbar_el1"), read_sysreg!("sctlr_el1"));
    let entry = ExceptionEntry::synchronous(*vcpu.pstate, vbar, sctlr, mte);
    // SAFETY: EL1's own exception registers, as the processor would write them.
    unsafe {
        write_sysreg!("esr_el1", esr);
        write_sysreg!("elr_el1", *vcpu.pc);
        write_sysreg!("spsr_el1", *vcpu.pstate);
    }
    *vcpu.pc = entry.pc;
    *vcpu.pstate = entry.pstate;
}
