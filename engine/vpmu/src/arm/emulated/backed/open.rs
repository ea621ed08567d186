//! What traps while the guest's registers are open, and why the rest is safe.

use crate::arm::Register;

/// Whether an access traps while the guest's values are in the physical counters. The one decision
/// of this design; while they are not, everything traps.
///
/// The physical counter *n* < MDCR_EL2.HPMN is guest counter *n*'s alone, and so is the cycle
/// counter. What decides *what* counts, *whether*, and *whom an overflow interrupts* stays the
/// engine's and traps:
///
/// | register | trapped | because |
/// |---|---|---|
/// | PMEVTYPERn_EL0, PMXEVTYPER_EL0, PMCCFILTR_EL0 | both | the hardware holds what the engine makes of them: denied events count nothing, and no counter counts at EL2 or for other threads |
/// | PMCNTENSET_EL0, PMCNTENCLR_EL0 | both | a counter that the engine counts itself, or does not count, is not enabled in the hardware |
/// | PMINTENSET_EL1, PMINTENCLR_EL1 | both | the hardware's bit is the hypervisor's: it is off while the guest's overflow bit is set |
/// | PMOVSSET_EL0, PMOVSCLR_EL0 | writes | the guest's interrupt line is computed, and may move |
/// | PMCR_EL0 | writes | the same; P and C are performed counter by counter |
/// | PMSWINC_EL0 | writes | the engine counts software increments |
/// | PMCEID0/1_EL0, PMMIR_EL1 | reads | they describe the guest's PMU, not the machine's |
///
/// Why each untrapped access is safe, and answers as the architecture does:
///
/// | register | untrapped | safe, because |
/// |---|---|---|
/// | PMEVCNTRn_EL0, PMXEVCNTR_EL0, n < HPMN | both | the counter is the guest's alone and holds its value: it counts what the guest's does and overflows where it does, as PMCR_EL0.{LC, LP, D} are the guest's. The engine reads the value when it needs it |
/// | the same, n >= HPMN | both | trap to EL2 (FEAT_FGT) without being asked, and are undefined for the guest |
/// | PMCCNTR_EL0 | both | as the event counters |
/// | PMOVSSET_EL0, PMOVSCLR_EL0 | reads | the bits below HPMN are the guest's, since the hypervisor clears none: it takes the interrupt back by PMINTENCLR_EL1. Host counters' bits read as zero below EL2 |
/// | PMCR_EL0 | reads | E, D, DP, LC, LP are as the guest wrote them, or RES1; N reads as HPMN below EL2; IMP and IDCODE are compared before anything is opened |
/// | PMSELR_EL0 | both | selects; what the selected access may do is decided there. The engine reads the selection when it needs it |
/// | PMUSERENR_EL0 | both | gives EL0 what the guest's EL1 has, no more: what traps at EL1 traps at EL0 (HDFGRTR_EL2 and HDFGWTR_EL2 ask nobody's permission). It is saved and zeroed on a put |
///
/// The registers are not opened
///
/// - where single accesses cannot trap (no FEAT_FGT), or the machine is not proven to isolate host
///   counters that there are: the plan decides that;
/// - where the guest finds another version, number of counters or identity than the hardware has;
/// - while an event type is CHAIN, which the engine counts itself, so that not all values are in the
///   hardware;
/// - while PMCR_EL0.X is set, which would export the machine's events.
///
/// A guest that closes its registers by one of the last two has all accesses trapped, as before.
pub(super) const fn stays_trapped(register: Register, write: bool) -> bool {
    // Without a `_` arm: a register that is added has to be decided here.
    match register {
        Register::Pmevcntr(_)
        | Register::Pmxevcntr
        | Register::Pmccntr
        | Register::Pmselr
        | Register::Pmuserenr => false,
        Register::Pmcr | Register::PmovsSet | Register::PmovsClr => write,
        Register::Pmevtyper(_)
        | Register::Pmxevtyper
        | Register::Pmccfiltr
        | Register::PmcntenSet
        | Register::PmcntenClr
        | Register::PmintenSet
        | Register::PmintenClr
        | Register::Pmswinc
        | Register::Pmceid0
        | Register::Pmceid1
        // An access that does not exist is undefined without a trap.
        | Register::Pmmir => register.is_accessible(write),
    }
}
