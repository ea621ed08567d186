//! A guest's code by its linear addresses, read and changed.
//!
//! The guest chooses every address here, and other vCPUs change the bytes and the tables meanwhile. So each range is
//! looked up again for each use, and a change is one compare-and-exchange of an aligned word: a processor that executes
//! the code sees the bytes before or the bytes after.

use std::sync::atomic::Ordering;

use crate::guest::paging::{PAGE, Page, Paging};
use crate::memory::GuestMemory;

/// A guest's memory under the page tables that one of its vCPUs uses.
#[derive(Clone, Copy)]
pub(super) struct Code<'a> {
    pub(super) paging: Paging,
    pub(super) memory: &'a dyn GuestMemory,
}

impl Code<'_> {
    /// Returns the `N` bytes at `address`, all of them on pages that are `allowed`.
    pub(super) fn bytes<const N: usize>(
        &self,
        address: u64,
        allowed: impl Fn(Page) -> bool,
    ) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let mut done = 0;
        while done < N {
            let at = address.checked_add(done as u64)?;
            let physical = self.place(at, &allowed)?;
            let end = N.min(done + (PAGE - at % PAGE) as usize);
            self.memory
                .read(physical, &mut bytes[done..end])
                .then_some(())?;
            done = end;
        }
        Some(bytes)
    }

    /// Returns the physical address of the byte at `address`, on a page that is `allowed`.
    pub(super) fn place(&self, address: u64, allowed: impl Fn(Page) -> bool) -> Option<u64> {
        // Anew for each use: the guest's other vCPUs may have changed the tables.
        let page = self.paging.translate(self.memory, address)?;
        allowed(page).then_some(page.physical + address % PAGE)
    }

    /// Writes `bytes` at `address`, as the supervisor does.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> bool {
        // The linear page that follows may be any other physical one, or none.
        let fits = address % PAGE + bytes.len() as u64 <= PAGE;
        let place = self.place(address, |page| page.writable);
        fits && place.is_some_and(|at| self.memory.write(at, bytes))
    }
}

/// Returns whether the supervisor may execute this page. Where it may not reach pages of user space (SMAP), it finds none.
pub(super) fn is_kernels(page: Page) -> bool {
    page.executable
}

/// Replaces `from` by `to` at the physical address `at`, where `from` is there, and all of it in one aligned word.
pub(super) fn exchange<const N: usize>(
    memory: &dyn GuestMemory,
    at: u64,
    from: [u8; N],
    to: [u8; N],
) -> bool {
    const WORD: u64 = size_of::<u64>() as u64;
    let (word, offset) = (at - at % WORD, (at % WORD) as usize);
    let mut exchanged = false;
    memory.with_words(word, 1, &mut |words| {
        let Some(word) = words.word(0) else {
            return;
        };
        // The guest's other vCPUs may write other bytes of the word meanwhile: then this is done again.
        let changed = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |current| {
            let mut bytes = u64::from_le(current).to_le_bytes();
            let place = bytes.get_mut(offset..offset + N)?;
            (*place == from).then(|| place.copy_from_slice(&to))?;
            Some(u64::from_le_bytes(bytes).to_le())
        });
        exchanged = changed.is_ok();
    });
    exchanged
}
