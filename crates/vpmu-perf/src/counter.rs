//! A guest's counter as a type, and a value for each counter.

use std::ops::{Index, IndexMut};

use vpmu::counter::CounterSet;

/// The number of counters that a host can have: as many as a [`CounterSet`] names.
pub(crate) const COUNTERS: usize = u32::BITS as usize;

/// A guest's counter, of [`COUNTERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Counter(u8);

impl Counter {
    /// Returns the counter of this number, if there can be one.
    pub(crate) const fn new(number: u8) -> Option<Self> {
        match (number as usize) < COUNTERS {
            true => Some(Self(number)),
            false => None,
        }
    }

    /// Returns the members of a set, lowest first.
    pub(crate) fn each(counters: CounterSet) -> impl Iterator<Item = Self> + Clone {
        // A set has no member that is not one.
        counters.iter().map(Self)
    }

    pub(crate) const fn number(self) -> u8 {
        self.0
    }

    /// Returns the counter's place in an array of [`COUNTERS`].
    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the set of this counter alone.
    pub(crate) const fn alone(self) -> CounterSet {
        CounterSet::of(self.0)
    }

    pub(crate) const fn is_in(self, counters: CounterSet) -> bool {
        counters.contains(self.0)
    }
}

/// A `T` for each counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PerCounter<T>([T; COUNTERS]);

impl<T> PerCounter<T> {
    pub(crate) fn new(value: impl Fn() -> T) -> Self {
        Self(std::array::from_fn(|_| value()))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Counter, &T)> {
        (0..).map(Counter).zip(&self.0)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Counter, &mut T)> {
        (0..).map(Counter).zip(&mut self.0)
    }
}

impl<T> Index<Counter> for PerCounter<T> {
    type Output = T;
    fn index(&self, counter: Counter) -> &T {
        &self.0[counter.index()]
    }
}

impl<T> IndexMut<Counter> for PerCounter<T> {
    fn index_mut(&mut self, counter: Counter) -> &mut T {
        &mut self.0[counter.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_counter_is_outside_the_values() {
        assert_eq!(Counter::new(31).map(Counter::number), Some(31));
        assert_eq!([32, 255].map(Counter::new), [None; 2]);
        let all = CounterSet::from_bits(u32::MAX);
        let values = PerCounter::new(|| true);
        assert!(Counter::each(all).all(|counter| values[counter]));
    }
}
