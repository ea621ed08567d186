use core::array;
use core::ops::{Index, IndexMut};

use super::Counter;

/// A `T` for each counter, whether or not a PMU has it.
#[derive(Clone, Debug, Default)]
// All 32, although most PMUs have fewer: every `Counter` is then an index in range, and no access can panic.
pub struct Slots<T>([T; Counter::COUNT]);

impl<T: Copy> Slots<T> {
    /// Returns the same `T` for each.
    // Where nobody asks for them, as for a host without `pause_and_read`, they are then not even on the stack.
    #[inline(always)]
    pub const fn filled(with: T) -> Self {
        Self([with; Counter::COUNT])
    }
}

impl<T> Slots<T> {
    /// Returns what `with` returns, for each.
    pub fn from_fn(mut with: impl FnMut() -> T) -> Self {
        Self(array::from_fn(|_| with()))
    }

    /// Returns each counter with its `T`, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = (Counter, &T)> {
        Counter::all().zip(&self.0)
    }

    /// Returns each counter with its `T` to change, lowest first.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Counter, &mut T)> {
        Counter::all().zip(&mut self.0)
    }
}

impl<T> Index<Counter> for Slots<T> {
    type Output = T;
    fn index(&self, n: Counter) -> &T {
        &self.0[n.index()]
    }
}

impl<T> IndexMut<Counter> for Slots<T> {
    fn index_mut(&mut self, n: Counter) -> &mut T {
        &mut self.0[n.index()]
    }
}
