//! The status flags, computed where they are asked for (SDM vol. 1, 3.4.3.1 and appendix A).

use iced_x86::ConditionCode;

use crate::word::Word;

const CARRY: u64 = 1 << 0;
const PARITY: u64 = 1 << 2;
const ADJUST: u64 = 1 << 4;
const ZERO: u64 = 1 << 6;
const SIGN: u64 = 1 << 7;
const OVERFLOW: u64 = 1 << 11;
/// All of them.
pub(crate) const STATUS: u64 = CARRY | PARITY | ADJUST | ZERO | SIGN | OVERFLOW;

/// Returns the bits of a number of `size` bytes.
#[inline]
pub(crate) const fn mask(size: u8) -> u64 {
    u64::MAX >> (64 - 8 * size as u32)
}

#[inline]
const fn sign_bit(size: u8) -> u32 {
    8 * size as u32 - 1
}

/// Returns `bit` where it is set, else 0.
#[inline]
const fn flag(bit: u64, is_set: bool) -> u64 {
    if is_set { bit } else { 0 }
}

/// The flags after an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flags {
    /// Their bits of RFLAGS.
    pub(crate) bits: u64,
    /// Flags that the manual leaves undefined after the instruction. Nobody may see them.
    pub(crate) undefined: u64,
}

const UNKNOWN: Flags = Flags {
    undefined: STATUS,
    ..Flags::of(0)
};

/// A result and the flags with it.
pub(crate) type Computed = (u64, Flags);

impl Flags {
    #[inline]
    pub(crate) const fn of(rflags: u64) -> Self {
        Self {
            bits: rflags & STATUS,
            undefined: 0,
        }
    }

    /// Returns the flags that a result has whatever it was computed by, with `others`: the carry, overflow and adjust flags.
    #[inline]
    const fn after(result: u64, size: u8, others: u64) -> Self {
        Self::of(
            others
                | flag(PARITY, (result as u8).count_ones() & 1 == 0)
                | flag(ZERO, result == 0)
                | flag(SIGN, result >> sign_bit(size) & 1 != 0),
        )
    }

    /// Returns a flag; `None`: it is undefined.
    #[inline]
    fn flag(&self, bit: u64) -> Option<bool> {
        (self.undefined & bit == 0).then_some(self.bits & bit != 0)
    }

    #[inline]
    pub(crate) fn carry(&self) -> Option<bool> {
        self.flag(CARRY)
    }

    /// Returns whether `condition` holds; `None`: a flag is undefined.
    #[inline]
    pub(crate) fn holds(&self, condition: ConditionCode) -> Option<bool> {
        use ConditionCode::{a, ae, b, be, e, g, ge, l, le, ne, no, np, ns, o, p, s};
        let less = || Some(self.flag(SIGN)? != self.flag(OVERFLOW)?);
        let holds = match condition {
            o | no => self.flag(OVERFLOW)?,
            b | ae => self.flag(CARRY)?,
            e | ne => self.flag(ZERO)?,
            be | a => self.flag(CARRY)? | self.flag(ZERO)?,
            s | ns => self.flag(SIGN)?,
            p | np => self.flag(PARITY)?,
            l | ge => less()?,
            le | g => self.flag(ZERO)? | less()?,
            ConditionCode::None => return None,
        };
        let is_opposite = matches!(condition, no | ae | ne | a | ns | np | ge | g);
        Some(holds != is_opposite)
    }

    /// Returns the flags of INC or DEC, which leave CF, and with it whether CF is defined: `carry`, which may be
    /// [`UNDEFINED_CARRY`].
    #[inline]
    const fn keeping_carry(self, carry: u64) -> Self {
        Self {
            bits: self.bits & !CARRY | carry & CARRY,
            undefined: flag(CARRY, carry == UNDEFINED_CARRY),
        }
    }
}

/// ADD and ADC. The operands have no bits beyond `size`.
#[inline]
pub(crate) fn add(a: u64, b: u64, carry: bool, size: u8) -> Computed {
    let (sum, out) = a.overflowing_add(b);
    // Two steps, of which at most one carries out of 64 bits.
    let (sum, out_again) = sum.overflowing_add(carry.into());
    let result = sum & mask(size);
    // Below 64 bits the carry is a bit of the sum beyond the operands.
    let others = flag(CARRY, out | out_again | (sum != result))
        // The operands have one sign, and the result has the other.
        | flag(OVERFLOW, ((a ^ result) & (b ^ result)) >> sign_bit(size) & 1 != 0)
        | (a ^ b ^ result) & ADJUST;
    (result, Flags::after(result, size, others))
}

/// SUB, SBB, CMP, NEG. The operands have no bits beyond `size`.
#[inline]
pub(crate) fn subtract(a: u64, b: u64, borrow: bool, size: u8) -> Computed {
    let (difference, out) = a.overflowing_sub(b);
    let (difference, out_again) = difference.overflowing_sub(borrow.into());
    let result = difference & mask(size);
    // A borrow goes through all 64 bits whatever the size is, so that the subtraction of 64 bits shows it.
    let others = flag(CARRY, out | out_again)
        // The operands have two signs, and the result has that of the second.
        | flag(OVERFLOW, ((a ^ b) & (a ^ result)) >> sign_bit(size) & 1 != 0)
        | (a ^ b ^ result) & ADJUST;
    (result, Flags::after(result, size, others))
}

/// What the flags come from, where nobody has asked for them yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// They are known, or were asked for at once.
    Known,
    Add,
    Subtract,
    /// AND, OR, XOR, TEST: the first number is the result.
    Logic,
    /// The second number is a count other than 0.
    Shift(Shift),
    /// INC and DEC: the second number is the carry flag before, or [`UNDEFINED_CARRY`].
    Increment,
    Decrement,
}

const UNDEFINED_CARRY: u64 = 2;

/// The flags, computed once they are asked for: most are asked for by nobody. The numbers have no bits beyond `size`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lazy<W> {
    source: Source,
    size: u8,
    a: W,
    b: W,
    known: Flags,
    /// Whether the known ones are firm ([`Word::is_firm`]).
    firm: bool,
}

impl<W: Word> Lazy<W> {
    pub(crate) fn of(rflags: u64, firm: bool) -> Self {
        Self {
            source: Source::Known,
            size: 8,
            a: W::of(0),
            b: W::of(0),
            known: Flags::of(rflags),
            firm,
        }
    }

    pub(crate) fn set_known(&mut self, flags: Flags, firm: bool) {
        self.source = Source::Known;
        self.known = flags;
        self.firm = firm;
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, source: Source, a: W, b: W, size: u8) {
        (self.source, self.a, self.b, self.size) = (source, a, b, size);
    }

    /// Makes all flags undefined: an instruction changes them in a way that is not known.
    pub(crate) fn forget(&mut self) {
        self.set_known(UNKNOWN, false);
    }

    /// Returns whether the flags come from registers alone.
    pub(crate) fn is_firm(&self) -> bool {
        match self.source {
            Source::Known => self.firm,
            // A shift may keep the flags before.
            Source::Shift(_) => self.a.is_firm() && self.b.is_firm() && self.firm,
            _ => self.a.is_firm() && self.b.is_firm(),
        }
    }

    /// Returns the carry flag as the second number of [`Source::Increment`].
    pub(crate) fn kept_carry(&self) -> W {
        match self.source {
            Source::Increment | Source::Decrement => self.b,
            _ => W::computed(
                self.carry().map_or(UNDEFINED_CARRY, u64::from),
                self.is_firm(),
            ),
        }
    }

    /// Returns the carry flag; `None`: it is undefined.
    pub(crate) fn carry(&self) -> Option<bool> {
        match self.source {
            // Not by all flags: SBB and Jcc behind a CMP ask for the carry alone.
            Source::Subtract => Some(self.a.bits()? < self.b.bits()?),
            Source::Logic => Some(false),
            _ => self.get().carry(),
        }
    }

    /// Returns the flags. What comes from values that are not known is undefined.
    pub(crate) fn get(&self) -> Flags {
        if self.source == Source::Known {
            return self.known;
        }
        let (Some(a), Some(b)) = (self.a.bits(), self.b.bits()) else {
            // A flag that one known operand would decide is not looked for.
            return UNKNOWN;
        };
        let size = self.size;
        match self.source {
            Source::Known => self.known,
            Source::Add => add(a, b, false, size).1,
            Source::Subtract => subtract(a, b, false, size).1,
            Source::Logic => Flags {
                // CF and OF are cleared, AF is undefined (SDM vol. 2A, "AND").
                undefined: ADJUST,
                ..Flags::after(a, size, 0)
            },
            Source::Shift(way) => shift(a, b, size, way, &self.known).1,
            Source::Increment => add(a, 1, false, size).1.keeping_carry(b),
            Source::Decrement => subtract(a, 1, false, size).1.keeping_carry(b),
        }
    }

    /// Returns whether `condition` holds; `None`: a flag is undefined, or not known.
    #[inline(always)]
    pub(crate) fn holds(&self, condition: ConditionCode) -> Option<bool> {
        use ConditionCode::{a, ae, b, be, e, ne};
        let (x, y) = (self.a.bits(), self.b.bits());
        Some(match (self.source, condition) {
            // These pairs are nearly all branches of a kernel. Their flags need not be made for them.
            (Source::Subtract, e) => x? == y?,
            (Source::Subtract, ne) => x? != y?,
            (Source::Subtract, b) => x? < y?,
            (Source::Subtract, ae) => x? >= y?,
            (Source::Subtract, be) => x? <= y?,
            (Source::Subtract, a) => x? > y?,
            (Source::Logic, e) => x? == 0,
            (Source::Logic, ne) => x? != 0,
            // The operand is kept, not the result.
            (Source::Decrement, e) => x? == 1,
            (Source::Decrement, ne) => x? != 1,
            _ => return self.get().holds(condition),
        })
    }

    /// Returns whether no flag is undefined, where all values are known.
    pub(crate) fn are_defined(&self) -> bool {
        match self.source {
            Source::Add | Source::Subtract => true,
            // AF is undefined behind both.
            Source::Logic | Source::Shift(_) => false,
            Source::Increment | Source::Decrement => self.b.bits() != Some(UNDEFINED_CARRY),
            Source::Known => self.known.undefined == 0,
        }
    }
}

/// The direction of a shift.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shift {
    Left,
    Right,
    /// To the right, with copies of the sign.
    Signed,
}

/// SHL, SHR, SAR. A count of 0 keeps the flags of `before`. `a` has no bits beyond `size`.
pub(crate) fn shift(a: u64, count: u64, size: u8, way: Shift, before: &Flags) -> Computed {
    let n = (count & if size == 8 { 0x3f } else { 0x1f }) as u32;
    if n == 0 {
        return (a, *before);
    }
    let width = 8 * u32::from(size);
    // The operand's sign fills the 64 bits, so that one shift serves each size.
    let signed = (a << (64 - width)).cast_signed() >> (64 - width);
    let (result, out) = match way {
        // Counts of 9 to 31 are not cut to 8 and 16 bits; `width - n` would be negative.
        Shift::Left if n > width => (0, 0),
        Shift::Left => (a << n, a >> (width - n)),
        Shift::Right => (a >> n, a >> (n - 1)),
        Shift::Signed => ((signed >> n).cast_unsigned(), (signed >> (n - 1)) as u64),
    };
    let result = result & mask(size);
    let carry = out & 1 != 0;
    let is_signed_bit = |bits: u64| bits >> (width - 1) & 1 != 0;
    let overflow = match way {
        // Of a shift by 1; by more, OF is undefined, and what stands here is not read.
        Shift::Left => is_signed_bit(result) != carry,
        Shift::Right => is_signed_bit(a),
        Shift::Signed => false,
    };
    let others = flag(CARRY, carry) | flag(OVERFLOW, overflow);
    let flags = Flags {
        undefined: ADJUST
            | flag(OVERFLOW, n != 1)
            // SAR's carry is a copy of the sign then, which is defined.
            | flag(CARRY, n >= width && way != Shift::Signed),
        ..Flags::after(result, size, others)
    };
    (result, flags)
}

/// ROL and ROR. A count of 0 keeps the flags of `before`; others keep what no bit is rotated into.
pub(crate) fn rotate(a: u64, count: u64, size: u8, way: Shift, before: &Flags) -> Computed {
    let n = (count & if size == 8 { 0x3f } else { 0x1f }) as u32;
    if n == 0 {
        return (a, *before);
    }
    let width = 8 * u32::from(size);
    let left = match way {
        // A count of 8 for a byte moves no bit and sets CF all the same: only a count of 0 keeps it, above.
        Shift::Left => n % width,
        _ => (width - n % width) % width,
    };
    let result = match left {
        0 => a,
        _ => (a << left | a >> (width - left)) & mask(size),
    };
    let bit = |at: u32| result >> at & 1 != 0;
    let top = bit(width - 1);
    let (carry, overflow) = match way {
        Shift::Left => (bit(0), top != bit(0)),
        _ => (top, top != bit(width - 2)),
    };
    const CHANGED: u64 = CARRY | OVERFLOW;
    let flags = Flags {
        bits: before.bits & !CHANGED | flag(CARRY, carry) | flag(OVERFLOW, overflow),
        // The others are kept, undefined ones as well.
        undefined: before.undefined & !CHANGED | flag(OVERFLOW, n != 1),
    };
    (result, flags)
}

/// BT: the flags after a test of the bit `n` of `a`. ZF stays (SDM vol. 2A, "BT").
pub(crate) fn bit_test(a: u64, n: u64, size: u8, before: &Flags) -> Flags {
    let bit = a >> (n % (8 * u64::from(size))) & 1;
    Flags {
        bits: before.bits & ZERO | flag(CARRY, bit != 0),
        undefined: before.undefined & ZERO | PARITY | ADJUST | SIGN | OVERFLOW,
    }
}

/// IMUL with two or three operands.
pub(crate) fn multiply(a: u64, b: u64, size: u8) -> Computed {
    let unused = 64 - 8 * u32::from(size);
    let signed = |bits: u64| i128::from((bits << unused).cast_signed() >> unused);
    // 64 bits each: 128 bits hold any product.
    let product = signed(a) * signed(b);
    let result = product as u64 & mask(size);
    // CF and OF say that the result, extended by its sign, is another number.
    let is_cut = product != signed(result);
    let flags = Flags {
        bits: flag(CARRY | OVERFLOW, is_cut),
        undefined: PARITY | ADJUST | ZERO | SIGN,
    };
    (result, flags)
}
