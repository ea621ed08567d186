//! The registers and the memory that a vCPU will have, as far as they are known before it has them.

use iced_x86::{ConditionCode, Register};
use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;

use super::space::Space;

/// A known value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) bits: u64,
    /// Nobody but this vCPU can make the value another one: it comes from registers alone. Memory may be written by other
    /// vCPUs and by devices before this vCPU reads it.
    pub(super) firm: bool,
}

/// A value; `None`: it is not known.
pub(super) type Value = Option<Known>;

pub(super) const fn firm(bits: u64) -> Value {
    Some(Known { bits, firm: true })
}

/// The general registers, in the order of their numbers.
pub(super) type General = [Value; 16];

const RSP: usize = 4;

/// The status flags that conditions read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flags {
    pub(super) carry: Option<bool>,
    pub(super) parity: Option<bool>,
    pub(super) zero: Option<bool>,
    pub(super) sign: Option<bool>,
    pub(super) overflow: Option<bool>,
    pub(super) firm: bool,
}

impl Flags {
    const CARRY: u64 = 1 << 0;
    const PARITY: u64 = 1 << 2;
    const ZERO: u64 = 1 << 6;
    const SIGN: u64 = 1 << 7;
    const OVERFLOW: u64 = 1 << 11;

    pub(super) const UNKNOWN: Self = Self {
        carry: None,
        parity: None,
        zero: None,
        sign: None,
        overflow: None,
        firm: true,
    };

    pub(super) fn of(rflags: Known) -> Self {
        let flag = |bit| Some(rflags.bits & bit != 0);
        Self {
            carry: flag(Self::CARRY),
            parity: flag(Self::PARITY),
            zero: flag(Self::ZERO),
            sign: flag(Self::SIGN),
            overflow: flag(Self::OVERFLOW),
            firm: rflags.firm,
        }
    }

    /// Returns whether `condition` holds, and whether that is firm.
    pub(super) fn holds(&self, condition: ConditionCode) -> Option<(bool, bool)> {
        let less = || Some(self.sign? != self.overflow?);
        let below_or_equal = || Some(self.carry? || self.zero?);
        let less_or_equal = || Some(self.zero? || less()?);
        let not = |flag: Option<bool>| flag.map(|flag| !flag);
        let holds = match condition {
            ConditionCode::o => self.overflow,
            ConditionCode::no => not(self.overflow),
            ConditionCode::b => self.carry,
            ConditionCode::ae => not(self.carry),
            ConditionCode::e => self.zero,
            ConditionCode::ne => not(self.zero),
            ConditionCode::be => below_or_equal(),
            ConditionCode::a => not(below_or_equal()),
            ConditionCode::s => self.sign,
            ConditionCode::ns => not(self.sign),
            ConditionCode::p => self.parity,
            ConditionCode::np => not(self.parity),
            ConditionCode::l => less(),
            ConditionCode::ge => not(less()),
            ConditionCode::le => less_or_equal(),
            ConditionCode::g => not(less_or_equal()),
            _ => None,
        };
        holds.map(|holds| (holds, self.firm))
    }
}

/// A word that this vCPU writes before others can see it.
struct Written {
    at: u64,
    bytes: [u8; 8],
    /// Bits for bytes: written; of these, known; of these, firm.
    written: u8,
    known: u8,
    firm: u8,
}

/// The vCPU at a moment to come.
pub(super) struct Shadow {
    pub(super) general: General,
    pub(super) flags: Flags,
    pub(super) ring: Ring,
    fs: u64,
    gs: u64,
    written: Vec<Written>,
}

impl Shadow {
    /// Returns the vCPU as it is now.
    pub(super) fn now(regs: &kvm_regs, sregs: &kvm_sregs, ring: Ring) -> Self {
        Self {
            general: general(regs),
            flags: Flags::of(Known {
                bits: regs.rflags,
                firm: true,
            }),
            ring,
            fs: sregs.fs.base,
            gs: sregs.gs.base,
            written: Vec::new(),
        }
    }

    /// Returns a part of a general register.
    pub(super) fn register(&self, register: Register) -> Value {
        if !register.is_gpr() {
            return None;
        }
        let whole = self.general[register.full_register().number()]?;
        let bits = match is_high(register) {
            true => whole.bits >> 8 & 0xff,
            false => whole.bits & mask(register.size()),
        };
        Some(Known { bits, ..whole })
    }

    /// Sets a part of a general register, as an instruction of 64-bit code does.
    pub(super) fn set_register(&mut self, register: Register, value: Value) {
        if !register.is_gpr() {
            return;
        }
        let size = register.size();
        let whole = &mut self.general[register.full_register().number()];
        // A write of 32 bits clears the upper half; one of 8 or 16 keeps the rest.
        if size >= 4 {
            *whole = value.map(|value| Known {
                bits: value.bits & mask(size),
                ..value
            });
            return;
        }
        let shift = if is_high(register) { 8 } else { 0 };
        let kept = !(mask(size) << shift);
        *whole = match (*whole, value) {
            (Some(old), Some(new)) => Some(Known {
                bits: old.bits & kept | (new.bits & mask(size)) << shift,
                firm: old.firm && new.firm,
            }),
            _ => None,
        };
    }

    /// Forgets a register that an instruction writes, in whatever way.
    pub(super) fn forget(&mut self, register: Register) {
        if register.is_gpr() {
            self.general[register.full_register().number()] = None;
        }
    }

    /// Returns what an address is made of: a register, or the base of a segment.
    pub(super) fn part_of_address(&self, register: Register) -> Option<u64> {
        match register {
            Register::FS => Some(self.fs),
            Register::GS => Some(self.gs),
            register if register.is_segment_register() => Some(0),
            register => self.register(register).map(|value| value.bits),
        }
    }

    pub(super) fn stack_pointer(&self) -> Value {
        self.general[RSP]
    }

    pub(super) fn set_stack_pointer(&mut self, value: Value) {
        self.general[RSP] = value;
    }

    /// Returns what a load finds; `None`: it is not known.
    pub(super) fn load(&self, space: &mut Space<'_>, address: u64, size: usize) -> Value {
        let mut bytes = [0; 8];
        if size > bytes.len() || !space.read(address, &mut bytes[..size]) {
            return None;
        }
        let mut is_firm = true;
        for (n, byte) in bytes[..size].iter_mut().enumerate() {
            let at = address.wrapping_add(n as u64);
            match self.byte(at) {
                Some(written) => {
                    let (value, firm) = written?;
                    *byte = value;
                    is_firm &= firm;
                }
                None => is_firm = false,
            }
        }
        Some(Known {
            bits: u64::from_le_bytes(bytes),
            firm: is_firm,
        })
    }

    /// Returns the byte that was written at `at`, if one was, and if it is known.
    fn byte(&self, at: u64) -> Option<Option<(u8, bool)>> {
        let bit = 1 << (at % 8);
        let word = self.written.iter().find(|word| word.at == at & !7)?;
        if word.written & bit == 0 {
            return None;
        }
        let known = word.known & bit != 0;
        Some(known.then(|| (word.bytes[(at % 8) as usize], word.firm & bit != 0)))
    }

    /// Notes a store.
    pub(super) fn store(&mut self, address: u64, size: usize, value: Value) {
        for n in 0..size {
            let at = address.wrapping_add(n as u64);
            let (index, bit) = ((at % 8) as usize, 1_u8 << (at % 8));
            let found = self.written.iter().position(|word| word.at == at & !7);
            let found = found.unwrap_or_else(|| {
                self.written.push(Written {
                    at: at & !7,
                    bytes: [0; 8],
                    written: 0,
                    known: 0,
                    firm: 0,
                });
                self.written.len() - 1
            });
            let word = &mut self.written[found];
            word.written |= bit;
            // A store of an unknown value makes what was known before wrong.
            word.known &= !bit;
            word.firm &= !bit;
            // A store of more than a register is not known.
            if let Some(value) = value.filter(|_| n < 8) {
                word.bytes[index] = value.bits.to_le_bytes()[n];
                word.known |= bit;
                word.firm |= if value.firm { bit } else { 0 };
            }
        }
    }
}

/// Returns the general registers in the order of their numbers.
pub(super) fn general(regs: &kvm_regs) -> General {
    [
        regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
        regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
    ]
    .map(firm)
}

/// Returns the bits that `size` bytes have.
pub(super) const fn mask(size: usize) -> u64 {
    match size {
        0 => 0,
        1..8 => (1 << (8 * size)) - 1,
        _ => u64::MAX,
    }
}

fn is_high(register: Register) -> bool {
    matches!(
        register,
        Register::AH | Register::CH | Register::DH | Register::BH
    )
}
