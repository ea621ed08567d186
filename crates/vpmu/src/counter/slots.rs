use core::ops::{Index, IndexMut};

/// A `T` for each bit of a [`CounterSet`](super::CounterSet). An index is taken modulo 32, so none
/// is out of range; a PMU itself only uses those of counters that exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots<T>([T; 32]);

impl<T: Copy> Slots<T> {
    /// The same `T` for each.
    pub(crate) const fn filled(with: T) -> Self {
        Self([with; 32])
    }
}

impl<T> Index<u8> for Slots<T> {
    type Output = T;
    fn index(&self, n: u8) -> &T {
        // The mask lets the compiler see that no index is out of range, so that nothing here can panic.
        &self.0[usize::from(n & 31)]
    }
}

impl<T> IndexMut<u8> for Slots<T> {
    fn index_mut(&mut self, n: u8) -> &mut T {
        &mut self.0[usize::from(n & 31)]
    }
}
