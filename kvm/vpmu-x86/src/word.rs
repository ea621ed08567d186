//! What is known of a value.

use std::fmt::Debug;

use crate::cpu::Stop;

/// A value of up to 64 bits: known (`u64`), or known in part ([`Masked`]).
pub trait Word: Copy + Debug {
    /// Returns a value that is known, from the code or from a register of a guest that stands still.
    #[inline(always)]
    fn of(bits: u64) -> Self {
        Self::computed(bits, true)
    }

    /// Returns what was computed from values whose bits are all known. `firm`: these were.
    fn computed(bits: u64, firm: bool) -> Self;

    /// Returns a value of which nothing is known.
    ///
    /// # Errors
    ///
    /// Fails for a kind of word whose values are always known: the instruction is then not executed.
    fn unknown() -> Result<Self, Stop>;

    /// Returns all bits, if they are known.
    fn bits(self) -> Option<u64>;

    /// Returns whether nobody but this vCPU can make the value another one: it comes from registers alone.
    fn is_firm(self) -> bool;

    /// Returns `f` of the value, where `f` moves bits or clears them, and computes none.
    #[must_use]
    fn bitwise(self, f: impl Fn(u64) -> u64) -> Self;

    /// Returns the bits of `mask`; others are 0.
    #[must_use]
    #[inline(always)]
    fn cut(self, mask: u64) -> Self {
        self.bitwise(|bits| bits & mask)
    }

    /// Returns this value with the bits of `mask` from `other`.
    #[must_use]
    fn merge(self, other: Self, mask: u64) -> Self;

    /// Returns `f` of both values, where both are known as a whole. Bits of the result beyond the operands are `f`'s.
    #[must_use]
    fn with(self, other: Self, f: impl FnOnce(u64, u64) -> u64) -> Self;

    /// Returns `f` of the value.
    #[must_use]
    fn map(self, f: impl FnOnce(u64) -> u64) -> Self {
        self.with(self, |bits, _| f(bits))
    }

    /// Returns `a` where the condition holds, and `b` where it does not. `None`: nobody knows.
    ///
    /// # Errors
    ///
    /// Fails if `holds` is `None` and this kind of word has no unknown values.
    fn choose(holds: Option<bool>, firm: bool, a: Self, b: Self) -> Result<Self, Stop>;
}

impl Word for u64 {
    #[inline(always)]
    fn computed(bits: u64, _: bool) -> Self {
        bits
    }

    #[inline(always)]
    fn unknown() -> Result<Self, Stop> {
        Err(Stop)
    }

    #[inline(always)]
    fn bits(self) -> Option<u64> {
        Some(self)
    }

    #[inline(always)]
    fn is_firm(self) -> bool {
        true
    }

    #[inline(always)]
    fn bitwise(self, f: impl Fn(u64) -> u64) -> Self {
        f(self)
    }

    #[inline(always)]
    fn merge(self, other: Self, mask: u64) -> Self {
        self & !mask | other & mask
    }

    #[inline(always)]
    fn with(self, other: Self, f: impl FnOnce(u64, u64) -> u64) -> Self {
        f(self, other)
    }

    #[inline(always)]
    fn choose(holds: Option<bool>, _: bool, a: Self, b: Self) -> Result<Self, Stop> {
        // An undefined flag decides nothing here: the processor's own choice is not known.
        holds.map(|holds| if holds { a } else { b }).ok_or(Stop)
    }
}

/// A value of which some bits may be unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Masked {
    /// The known bits; others are 0.
    bits: u64,
    unknown: u64,
    firm: bool,
}

impl Masked {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        bits: 0,
        unknown: u64::MAX,
        firm: false,
    };

    /// Returns a value of which these bits are unknown.
    pub(crate) const fn new(bits: u64, unknown: u64, firm: bool) -> Self {
        Self {
            // So that two values of which the same is known are equal.
            bits: bits & !unknown,
            unknown,
            firm,
        }
    }

    /// Returns this value as one that others can change.
    pub(crate) const fn not_firm(self) -> Self {
        Self {
            firm: false,
            ..self
        }
    }

    /// Returns whether the value may be `bits`.
    pub const fn may_be(self, bits: u64) -> bool {
        bits & !self.unknown == self.bits
    }
}

impl Word for Masked {
    fn computed(bits: u64, firm: bool) -> Self {
        Self::new(bits, 0, firm)
    }

    fn unknown() -> Result<Self, Stop> {
        Ok(Self::UNKNOWN)
    }

    fn bits(self) -> Option<u64> {
        (self.unknown == 0).then_some(self.bits)
    }

    fn is_firm(self) -> bool {
        self.firm
    }

    fn bitwise(self, f: impl Fn(u64) -> u64) -> Self {
        // `f` moves bits: it moves those that are not known to the same places.
        Self::new(f(self.bits), f(self.unknown), self.firm)
    }

    fn merge(self, other: Self, mask: u64) -> Self {
        let bits = self.bits & !mask | other.bits & mask;
        let unknown = self.unknown & !mask | other.unknown & mask;
        Self::new(bits, unknown, self.firm && other.firm)
    }

    fn with(self, other: Self, f: impl FnOnce(u64, u64) -> u64) -> Self {
        match (self.bits(), other.bits()) {
            (Some(a), Some(b)) => Self::new(f(a, b), 0, self.firm && other.firm),
            // One unknown bit may carry into all above it. Nothing is kept, which is right for any `f`.
            _ => Self::UNKNOWN,
        }
    }

    fn choose(holds: Option<bool>, firm: bool, a: Self, b: Self) -> Result<Self, Stop> {
        Ok(match holds {
            Some(holds) => {
                let value = if holds { a } else { b };
                Self::new(value.bits, value.unknown, value.firm && firm)
            }
            // What both values have in common would be known, too; no prediction has needed it.
            None => Self::UNKNOWN,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_are_not_known_make_no_result_known() {
        let half = Masked::of(0x1234).merge(Masked::UNKNOWN, 0xff00);
        assert_eq!((half.bits(), half.cut(0xff).bits()), (None, Some(0x34)));
        assert!(half.may_be(0x5634) && !half.may_be(0x5635));
        let sum = |a: Masked, b| a.with(b, u64::wrapping_add).bits();
        assert_eq!(sum(half, Masked::of(1)), None);
        assert_eq!(sum(half.cut(0xff), Masked::of(1)), Some(0x35));
        assert!(!half.cut(0xff).is_firm(), "an unknown value is nobody's");
    }
}
