use core::fmt;
use core::ops::{BitAnd, BitAndAssign, BitOr, BitOrAssign, Sub, SubAssign};

/// A guest's counter. There are at most [`COUNT`](Self::COUNT); which of them exist, the guest's PMU says. On Arm,
/// counter 31 is the cycle counter; on x86, 16 and above are Intel's fixed counters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Counter(u8);

impl Counter {
    /// The most counters that a PMU can have: as many as a [`CounterSet`] names.
    pub const COUNT: usize = u32::BITS as usize;

    /// Returns the counter of this number, or `None` if no PMU has one.
    pub const fn new(number: u8) -> Option<Self> {
        match (number as usize) < Self::COUNT {
            true => Some(Self(number)),
            false => None,
        }
    }

    /// Returns the counter of a number that is known when the program is compiled. A number above 31 is then an error.
    pub const fn at<const NUMBER: u8>() -> Self {
        // At compile time: a check at run time would be a place that can panic.
        const { assert!((NUMBER as usize) < Self::COUNT) };
        Self(NUMBER)
    }

    /// Returns all counters, lowest first.
    pub const fn all() -> Iter {
        CounterSet::from_bits(u32::MAX).iter()
    }

    /// Returns the counter's number: 0 to 31.
    pub const fn number(self) -> u8 {
        self.0
    }

    /// Returns the counter's place in an array of [`COUNT`](Self::COUNT).
    pub const fn index(self) -> usize {
        // The mask lets the compiler see that no index is out of range, so that no access of such an array can panic.
        (self.0 & 31) as usize
    }

    /// Returns the even counter of the pair that this counter is of.
    // Arm's CHAIN event and AMD's Merge event join counters 2n and 2n + 1.
    pub(crate) const fn even(self) -> Self {
        Self(self.0 & !1)
    }

    /// Returns the odd counter of the pair that this counter is of.
    pub(crate) const fn odd(self) -> Self {
        Self(self.0 | 1)
    }

    /// Returns the set of this counter alone.
    pub const fn alone(self) -> CounterSet {
        // The mask as in `index`: a shift by 32 or more would panic.
        CounterSet(1 << (self.0 & 31))
    }
}

/// The number alone, as a list of counters reads best.
impl fmt::Debug for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of counters as a register holds it: bit *n* is counter *n*; on Arm bit 31 is the cycle
/// counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CounterSet(u32);

impl CounterSet {
    /// No counter.
    pub const EMPTY: Self = Self(0);

    /// Returns the set whose members are the set bits of `bits`.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Returns the set of one counter.
    pub const fn of(counter: Counter) -> Self {
        counter.alone()
    }

    /// Returns the set of counters `0..count`.
    pub const fn first(count: u8) -> Self {
        match 1_u32.checked_shl(count as u32) {
            Some(bit) => Self(bit - 1),
            // All 32: there is no bit above the last one to subtract from.
            None => Self(u32::MAX),
        }
    }

    /// Returns the members as bits: bit *n* is counter *n*.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns whether `counter` is a member.
    pub const fn contains(self, counter: Counter) -> bool {
        self.0 & Self::of(counter).0 != 0
    }

    /// Returns whether no counter is a member.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of members: 0 to 32.
    pub const fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Makes `counter` a member.
    pub const fn insert(&mut self, counter: Counter) {
        self.0 |= Self::of(counter).0;
    }

    /// Makes `counter` a member or none.
    pub(crate) const fn put(&mut self, counter: Counter, member: bool) {
        if member {
            self.insert(counter);
        } else {
            self.remove(counter);
        }
    }

    /// Returns the members that `keep` accepts.
    pub fn filter(mut self, keep: impl Fn(Counter) -> bool) -> Self {
        for n in self {
            self.put(n, keep(n));
        }
        self
    }

    /// Removes `counter`.
    pub const fn remove(&mut self, counter: Counter) {
        self.0 &= !Self::of(counter).0;
    }

    /// Returns the members, lowest first.
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
    type Item = Counter;
    type IntoIter = Iter;
    fn into_iter(self) -> Iter {
        self.iter()
    }
}

/// Iterates over the members of a [`CounterSet`], lowest first.
#[derive(Clone, Debug)]
pub struct Iter(u32);

impl Iterator for Iter {
    type Item = Counter;

    fn next(&mut self) -> Option<Counter> {
        if self.0 == 0 {
            return None;
        }
        let counter = self.0.trailing_zeros() as u8;
        // Clears the lowest set bit.
        self.0 &= self.0 - 1;
        Some(Counter(counter))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_come_lowest_first() {
        assert!(
            CounterSet::from_bits(0x8000_0011)
                .iter()
                .map(Counter::number)
                .eq([0, 4, 31])
        );
    }

    #[test]
    fn no_counter_has_a_number_above_31() {
        assert_eq!(Counter::new(31), Some(Counter::at::<31>()));
        assert_eq!([32, 255].map(Counter::new), [None; 2]);
        let mut set = CounterSet::from_bits(u32::MAX);
        set.remove(Counter::at::<31>());
        assert_eq!((set.len(), set.contains(Counter::at::<31>())), (31, false));
    }

    #[test]
    fn first_counts_from_zero() {
        assert_eq!(CounterSet::first(0), CounterSet::EMPTY);
        assert_eq!(CounterSet::first(6).bits(), 0x3f);
        assert_eq!(CounterSet::first(32).bits(), u32::MAX);
        assert_eq!(CounterSet::first(200).bits(), u32::MAX);
    }
}
