//! A trapped access of a PMU register, in AArch64 or AArch32, from its syndrome to the state in which the guest goes on.

use vpmu::arm::{Encoding, ExceptionLevel, Outcome, Register};

use crate::aarch32::{self, Part};
use crate::exception::{ESR_UNDEFINED, stepped};

/// The registers of a vCPU that left its guest: x0 to x30, ELR_EL2 and SPSR_EL2.
#[derive(Debug)]
pub struct Vcpu<'a> {
    /// X0 to X30. An AArch32 guest's registers are their lower halves.
    pub x: &'a mut [u64; 31],
    /// Where the guest goes on.
    pub pc: &'a mut u64,
    /// The state in which it goes on, as SPSR_EL2 has it.
    pub pstate: &'a mut u64,
}

/// A trapped access of a PMU register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Which register.
    pub register: Register,
    /// Whether it is written.
    pub write: bool,
    esr: u64,
    form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    A64 { rt: usize },
    A32(aarch32::Access),
}

/// `ESR_EL2.EC`: MCR or MRC, MCRR or MRRC of coprocessor 15, and MSR or MRS.
const EC_MCR: u64 = 0x03;
const EC_MCRR: u64 = 0x04;
const EC_SYSTEM_REGISTER: u64 = 0x18;

impl Access {
    /// Decodes an `ESR_EL2`. `None`: no access of a PMU register.
    #[inline]
    pub fn decode(esr: u64) -> Option<Self> {
        let iss = esr as u32 & 0x01ff_ffff;
        let (register, write, form) = match esr >> 26 & 0x3f {
            EC_SYSTEM_REGISTER => {
                let rt = (iss >> 5 & 0x1f) as usize;
                let register = Register::decode(Encoding::from_iss(iss))?;
                (register, iss & 1 == 0, Form::A64 { rt })
            }
            class @ (EC_MCR | EC_MCRR) => {
                let access = if class == EC_MCR {
                    aarch32::Access::from_mcr(iss)
                } else {
                    aarch32::Access::from_mcrr(iss)
                };
                (access.register?, access.write, Form::A32(access))
            }
            _ => return None,
        };
        Some(Self {
            register,
            write,
            esr,
            form,
        })
    }

    /// Completes the access. `pmu` reads a register, or writes the value that it is given, at an exception level.
    ///
    /// `None`: the guest goes on behind the instruction. Else it gets the exception with this ESR_EL1, and nothing else has
    /// changed: `inject`, or [`ExceptionEntry`](crate::exception::ExceptionEntry), gives it to EL1.
    // A call through a pointer would be a good part of what the access costs. Who has several PMUs and wants one of this gives
    // it a `&mut dyn FnMut`.
    #[inline]
    pub fn complete(
        self,
        Vcpu { x, pc, pstate }: Vcpu<'_>,
        mut pmu: impl FnMut(Register, ExceptionLevel, Option<u64>) -> Outcome,
    ) -> Option<u64> {
        // 31 is XZR.
        let value_of = |x: &[u64; 31], n: usize| x.get(n).copied().unwrap_or(0);
        let level = level(*pstate);
        let written = match self.form {
            Form::A32(access) if !access.is_executed(*pstate) => {
                step(pc, pstate);
                return None;
            }
            _ if !self.write => None,
            Form::A64 { rt } => Some(value_of(x, rt)),
            Form::A32(access) => {
                let keeps = access.keeps_upper_half();
                let before = match keeps.then(|| pmu(self.register, ExceptionLevel::El1, None)) {
                    Some(Outcome::Value(before)) => before,
                    _ => 0,
                };
                let (rt, rt2) = (value_of(x, access.rt), value_of(x, access.rt2));
                Some(access.written(rt, rt2, before))
            }
        };
        let mut set = |n: usize, value: u64| {
            if let Some(to) = x.get_mut(n) {
                *to = value;
            }
        };
        match (pmu(self.register, level, written), self.form) {
            (Outcome::Value(value), Form::A64 { rt }) => set(rt, value),
            (Outcome::Value(value), Form::A32(access)) => {
                let (low, high) = access.halves(value);
                set(access.rt, low);
                if access.part == Part::Whole {
                    set(access.rt2, high);
                }
            }
            (Outcome::Done, _) => {}
            (Outcome::TrapToEl1, _) => return Some(self.esr),
            (Outcome::Undefined | Outcome::NotHandled, _) => return Some(ESR_UNDEFINED),
        }
        step(pc, pstate);
        None
    }
}

/// Returns the exception level of a guest in this state.
pub const fn level(pstate: u64) -> ExceptionLevel {
    if pstate & 0xc == 0 {
        ExceptionLevel::El0
    } else {
        ExceptionLevel::El1
    }
}

/// Steps over an instruction that has been completed. Each of them has 32 bits.
pub const fn step(pc: &mut u64, pstate: &mut u64) {
    *pc = pc.wrapping_add(4);
    *pstate = stepped(*pstate);
}

#[cfg(test)]
mod tests {
    use super::*;

    const EL1H: u64 = 0b0101;

    /// ESR_EL2 of an MRS or MSR of PMCCNTR_EL0 with Xt.
    const fn pmccntr(rt: u64, write: bool) -> u64 {
        0x18 << 26 | 1 << 25 | 3 << 20 | 3 << 14 | 9 << 10 | rt << 5 | 13 << 1 | !write as u64
    }

    /// Completes an access; returns x0 to x30, the PC and the exception.
    fn complete(
        esr: u64,
        pstate: u64,
        pmu: impl FnMut(Register, ExceptionLevel, Option<u64>) -> Outcome,
    ) -> ([u64; 31], u64, Option<u64>) {
        let (mut x, mut pc, mut pstate) = ([7; 31], 0x1000, pstate);
        let vcpu = Vcpu {
            x: &mut x,
            pc: &mut pc,
            pstate: &mut pstate,
        };
        let exception = Access::decode(esr)
            .expect("a PMU register")
            .complete(vcpu, pmu);
        (x, pc, exception)
    }

    #[test]
    fn a_read_puts_its_value_into_its_register_and_nowhere_for_xzr() {
        let pmu = |register, level, written| {
            assert_eq!(
                (register, level, written),
                (Register::Pmccntr, ExceptionLevel::El1, None)
            );
            Outcome::Value(42)
        };
        let (x, pc, exception) = complete(pmccntr(30, false), EL1H, pmu);
        assert_eq!((x[30], x[0], pc, exception), (42, 7, 0x1004, None));
        assert_eq!(complete(pmccntr(31, false), EL1H, pmu).0, [7; 31]);
    }

    #[test]
    fn a_write_of_xzr_is_of_zero() {
        let written = |rt| {
            let mut value = None;
            complete(pmccntr(rt, true), 0, |_, level, written| {
                assert_eq!(level, ExceptionLevel::El0);
                value = written;
                Outcome::Done
            });
            value
        };
        assert_eq!((written(3), written(31)), (Some(7), Some(0)));
    }

    #[test]
    fn a_refusal_leaves_the_guest_at_its_instruction() {
        let esr = pmccntr(0, false);
        let refused = complete(esr, 0, |_, _, _| Outcome::TrapToEl1);
        assert_eq!(refused, ([7; 31], 0x1000, Some(esr)));
        let undefined = complete(esr, 0, |_, _, _| Outcome::Undefined);
        assert_eq!(undefined, ([7; 31], 0x1000, Some(ESR_UNDEFINED)));
    }

    #[test]
    fn an_aarch32_write_of_a_counter_keeps_its_upper_half() {
        // MCR of PMCCNTR, condition always, Rt 3.
        let esr = EC_MCR << 26 | 1 << 24 | 0xe << 20 | 9 << 10 | 3 << 5 | 13 << 1;
        let mut accesses = 0;
        complete(esr, 1 << 4, |_, level, written| {
            accesses += 1;
            match written {
                None => {
                    assert_eq!(level, ExceptionLevel::El1);
                    Outcome::Value(5 << 32 | 9)
                }
                Some(value) => {
                    assert_eq!(value, 5 << 32 | 7);
                    Outcome::Done
                }
            }
        });
        assert_eq!(accesses, 2);
        // The same with a condition that fails, EQ without Z, accesses nothing.
        let never = esr & !(0xf << 20);
        let (_, pc, exception) = complete(never, 1 << 4, |_, _, _| unreachable!());
        assert_eq!((pc, exception), (0x1004, None));
    }

    #[test]
    fn other_exits_are_no_accesses() {
        for esr in [
            0,
            EC_SYSTEM_REGISTER << 26,
            0x16 << 26,
            0x24 << 26,
            EC_MCRR << 26,
        ] {
            assert_eq!(Access::decode(esr), None, "{esr:#x}");
        }
    }
}
