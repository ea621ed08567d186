//! PMSWINC_EL0 performed for a guest.
//!
//! It cannot be passed on: written at EL2 it would count at EL2, where the guest's counters do not
//! count. So the increment, the overflow and the carry into a CHAIN counter are done here (DDI
//! 0487, J1: `AArch64.PMUSwIncrement` and `AArch64.IncrementEventCounter`, which carries only out
//! of counters that overflow at 2^32).

use super::{Plan, PmuRegisters};
use crate::arm::{
    CHAIN, EventKind, ExceptionLevel, PmuVersion, RawPmevtyper, Register, SW_INCR, pmcr,
};
use crate::counter::{Counter, CounterSet};

/// Increments each of `written`, a value for PMSWINC_EL0, that is the guest's, enabled, and counts
/// SW_INCR at `el`.
pub(super) fn increment<R: PmuRegisters>(
    plan: &Plan,
    written: u64,
    el: ExceptionLevel,
    regs: &mut R,
) {
    let control = regs.read(Register::Pmcr);
    if control & pmcr::E == 0 {
        return;
    }
    let long = plan.version() >= PmuVersion::V3p5 && control & pmcr::LP != 0;
    let enabled = CounterSet::from_bits(regs.read(Register::PmcntenSet) as u32)
        // At EL2 the register shows the host's counters, too, and a guest's value may name them.
        & CounterSet::first(plan.hpmn());
    let counts = |n: Counter, event: u16, regs: &mut R| {
        enabled.contains(n) && {
            let config =
                RawPmevtyper(regs.read(Register::Pmevtyper(n.number()))).config(plan.version());
            let here = match el {
                ExceptionLevel::El0 => config.el0,
                ExceptionLevel::El1 => config.el1,
            };
            here && config.event == EventKind::Event(event)
        }
    };
    for n in enabled & CounterSet::from_bits(written as u32) {
        if counts(n, SW_INCR, regs)
            && overflows(n, long, regs)
            && !long
            && n != n.odd()
            && counts(n.odd(), CHAIN, regs)
        {
            // Its own overflow goes no further: CHAIN joins two counters, not a row of them.
            overflows(n.odd(), long, regs);
        }
    }
}

/// Adds one to an event counter. True, and noted in PMOVS, if that overflows it.
fn overflows<R: PmuRegisters>(n: Counter, long: bool, regs: &mut R) -> bool {
    let value = regs.read(Register::Pmevcntr(n.number())).wrapping_add(1);
    regs.write(Register::Pmevcntr(n.number()), value);
    let overflowed = if long { value == 0 } else { value as u32 == 0 };
    if overflowed {
        let bit = n.alone().bits();
        regs.write(Register::PmovsSet, u64::from(bit));
    }
    overflowed
}
