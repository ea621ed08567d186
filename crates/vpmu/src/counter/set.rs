use core::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, Sub, SubAssign};

/// A set of counters as a register holds it: bit *n* is counter *n*; on Arm bit 31 is the cycle
/// counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CounterSet(u32);

impl CounterSet {
    /// No counter.
    pub const EMPTY: Self = Self(0);

    /// The set whose members are the set bits of `bits`.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// The set of one counter. A number above 31 is in no set.
    pub const fn of(counter: u8) -> Self {
        match 1_u32.checked_shl(counter as u32) {
            Some(bit) => Self(bit),
            None => Self::EMPTY,
        }
    }

    /// Counters `0..count`.
    pub const fn first(count: u8) -> Self {
        match 1_u32.checked_shl(count as u32) {
            Some(bit) => Self(bit - 1),
            None => Self(u32::MAX),
        }
    }

    /// Bit *n* set for each member *n*.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether `counter` is a member.
    pub const fn contains(self, counter: u8) -> bool {
        self.0 & Self::of(counter).0 != 0
    }

    /// Whether no counter is a member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many counters are members: 0 to 32.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Makes `counter` a member.
    pub const fn insert(&mut self, counter: u8) {
        self.0 |= Self::of(counter).0;
    }

    /// Makes `counter` a member or none.
    pub(crate) const fn put(&mut self, counter: u8, member: bool) {
        if member {
            self.insert(counter);
        } else {
            self.remove(counter);
        }
    }

    /// Makes `counter` no member.
    pub const fn remove(&mut self, counter: u8) {
        self.0 &= !Self::of(counter).0;
    }

    /// The members, lowest first.
    pub const fn iter(self) -> Iter {
        Iter(self.0)
    }
}

impl BitOr for CounterSet {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for CounterSet {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl BitAnd for CounterSet {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitAndAssign for CounterSet {
    fn bitand_assign(&mut self, other: Self) {
        self.0 &= other.0;
    }
}

impl Sub for CounterSet {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

impl SubAssign for CounterSet {
    fn sub_assign(&mut self, other: Self) {
        self.0 &= !other.0;
    }
}

impl IntoIterator for CounterSet {
    type Item = u8;
    type IntoIter = Iter;
    fn into_iter(self) -> Iter {
        self.iter()
    }
}

/// Iterates over the members of a [`CounterSet`], lowest first.
#[derive(Clone, Debug)]
pub struct Iter(u32);

impl Iterator for Iter {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.0 == 0 {
            return None;
        }
        let counter = self.0.trailing_zeros() as u8;
        // Clears the lowest set bit.
        self.0 &= self.0 - 1;
        Some(counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_lowest_first() {
        assert!(CounterSet::from_bits(0x8000_0011).iter().eq([0_u8, 4, 31]));
    }

    #[test]
    fn numbers_above_31_are_in_no_set() {
        let mut set = CounterSet::from_bits(u32::MAX);
        assert!(!set.contains(32) && !set.contains(255));
        set.remove(32);
        assert_eq!(set.len(), 32);
        assert_eq!(CounterSet::of(40), CounterSet::EMPTY);
    }

    #[test]
    fn first_counts_from_zero() {
        assert_eq!(CounterSet::first(0), CounterSet::EMPTY);
        assert_eq!(CounterSet::first(6).bits(), 0x3f);
        assert_eq!(CounterSet::first(32).bits(), u32::MAX);
        assert_eq!(CounterSet::first(200).bits(), u32::MAX);
    }
}
