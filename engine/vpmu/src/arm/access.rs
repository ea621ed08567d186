//! Who may touch which register: the part of each register page's access pseudocode (DDI 0487,
//! D24.5) that depends on nothing but the register, the exception level and PMUSERENR_EL0.

use super::{ExceptionLevel, Outcome, Register, pmuserenr};

/// Why an access must not be performed, or `None` when it may go on. `pmuserenr` is the guest's.
///
/// Hardware decides most of this itself, before it traps to EL2. It is needed where the hardware
/// does not hold the guest's PMUSERENR_EL0, and for callers that are no hardware at all.
pub(super) const fn refusal(
    register: Register,
    write: bool,
    el: ExceptionLevel,
    pmuserenr: u64,
) -> Option<Outcome> {
    // Before the exception level: what is not encoded is undefined for EL1, too.
    if !register.is_accessible(write) {
        return Some(Outcome::Undefined);
    }
    if matches!(el, ExceptionLevel::El1) {
        return None;
    }
    let permission = match register {
        // Registers of EL1 (op1 is 0): PMUSERENR_EL0 says nothing about them.
        Register::PmintenSet | Register::PmintenClr | Register::Pmmir => {
            return Some(Outcome::Undefined);
        }
        // EL0 may always read what it is allowed, and never allow itself more.
        Register::Pmuserenr if write => return Some(Outcome::Undefined),
        Register::Pmuserenr => return None,
        // To read counters by PMXEVCNTR_EL0 takes a selection first, so ER permits that in both directions.
        Register::Pmselr => pmuserenr::ER,
        // ER and CR are for reads: only EN lets EL0 write a counter.
        Register::Pmevcntr(_) | Register::Pmxevcntr if !write => pmuserenr::ER,
        Register::Pmccntr if !write => pmuserenr::CR,
        Register::Pmswinc => pmuserenr::SW,
        _ => 0,
    };
    if pmuserenr & (pmuserenr::EN | permission) == 0 {
        return Some(Outcome::TrapToEl1);
    }
    None
}

impl Register {
    /// Returns whether an instruction of this direction exists: PMSWINC_EL0 cannot be read, and PMCEID0/1_EL0 and
    /// PMMIR_EL1 cannot be written, at any exception level.
    pub const fn is_accessible(self, write: bool) -> bool {
        match self {
            Self::Pmswinc => write,
            Self::Pmceid0 | Self::Pmceid1 | Self::Pmmir => !write,
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn el0(register: Register, write: bool, pmuserenr: u64) -> Option<Outcome> {
        refusal(register, write, ExceptionLevel::El0, pmuserenr)
    }

    #[test]
    fn el0_gets_what_pmuserenr_gives() {
        use Register::{Pmccntr, Pmcr, Pmevcntr, Pmselr, Pmswinc, Pmuserenr, Pmxevcntr};
        let granted = [
            (Pmccntr, false, pmuserenr::CR),
            (Pmevcntr(3), false, pmuserenr::ER),
            (Pmxevcntr, false, pmuserenr::ER),
            (Pmselr, false, pmuserenr::ER),
            (Pmselr, true, pmuserenr::ER),
            (Pmswinc, true, pmuserenr::SW),
        ];
        for (register, write, bit) in granted {
            let others = pmuserenr::MASK & !(pmuserenr::EN | bit);
            assert_eq!(el0(register, write, bit), None, "{register:?}");
            assert_eq!(el0(register, write, pmuserenr::EN), None, "{register:?}");
            assert_eq!(
                el0(register, write, others),
                Some(Outcome::TrapToEl1),
                "{register:?}"
            );
        }
        let only_en = pmuserenr::MASK & !pmuserenr::EN;
        for (register, write) in [(Pmccntr, true), (Pmevcntr(0), true), (Pmcr, false)] {
            assert_eq!(el0(register, write, only_en), Some(Outcome::TrapToEl1));
            assert_eq!(el0(register, write, pmuserenr::EN), None);
        }
        assert_eq!(el0(Pmuserenr, false, 0), None);
        assert_eq!(
            el0(Pmuserenr, true, pmuserenr::MASK),
            Some(Outcome::Undefined)
        );
    }

    #[test]
    fn registers_of_el1_are_undefined_at_el0() {
        for register in [Register::PmintenSet, Register::PmintenClr, Register::Pmmir] {
            let refused = el0(register, false, pmuserenr::MASK);
            assert_eq!(refused, Some(Outcome::Undefined));
        }
    }

    #[test]
    fn directions_that_do_not_exist_are_undefined() {
        for register in Register::all() {
            for write in [false, true] {
                let refused = refusal(register, write, ExceptionLevel::El1, 0);
                assert_eq!(refused.is_none(), register.is_accessible(write));
            }
        }
    }
}
