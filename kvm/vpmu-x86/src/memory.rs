//! The guest's memory, as an embedder hands it over.

/// The guest's RAM by physical addresses. The guest chooses the addresses; other vCPUs and devices write there at any time.
pub trait Memory {
    /// Fills `bytes` from `address` on. `false`: not all of that is RAM; `bytes` may be anything.
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;

    /// Returns whether the page at `address` is RAM that the guest may write.
    fn is_writable(&self, address: u64) -> bool;

    /// Makes stores to one page, one after the other as other vCPUs see it, each at once and without a change of the bits
    /// beside it.
    fn store(&self, stores: &[Store]);
}

/// A store to an aligned word of 64 bits, or a part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store {
    /// The physical address of the word.
    pub at: u64,
    /// The bits that are written.
    pub mask: u64,
    /// Their values; other bits are 0.
    pub value: u64,
}
