//! A guest's code by its linear addresses, read and changed.
//!
//! The guest chooses every address here, and other vCPUs change the bytes and the tables meanwhile. So each range is
//! looked up again for each use, and a change is one compare-and-exchange of an aligned word: a processor that executes
//! the code sees the bytes before or the bytes after.

use std::sync::atomic::Ordering;

use kvm_bindings::kvm_sregs;

use crate::guest::system;
use crate::memory::GuestMemory;
use vpmu_x86::paging::{Access, Mode, PAGE, Paging, each_page};

/// A guest's memory under the page tables that one of its vCPUs uses.
#[derive(Clone, Copy)]
pub(super) struct Code<'a> {
    pub(super) paging: Paging,
    pub(super) memory: &'a dyn GuestMemory,
}

impl<'a> Code<'a> {
    /// Returns the code of a vCPU with these registers.
    pub(super) const fn of(sregs: &kvm_sregs, memory: &'a dyn GuestMemory) -> Self {
        let paging = Paging::of(&system(sregs));
        Self { paging, memory }
    }

    /// Returns the `N` bytes at `address`, where each may be accessed so.
    pub(super) fn bytes<const N: usize>(
        &self,
        address: u64,
        access: Access,
        mode: Mode,
    ) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let read = each_page(address, N, |at, part| {
            let place = self.place(at, access, mode);
            place.is_some_and(|place| self.memory.read(place, &mut bytes[part]))
        });
        read.then_some(bytes)
    }

    /// Returns the physical address of the byte at `address`, where it may be accessed so.
    pub(super) fn place(&self, address: u64, access: Access, mode: Mode) -> Option<u64> {
        // Anew for each use: the guest's other vCPUs may have changed the tables.
        let page = self.paging.translate(self.memory, address)?;
        let is_permitted = self.paging.permits(address, &page, access, mode, || None);
        is_permitted.then_some(page.physical + address % PAGE)
    }

    /// Returns the `N` bytes of the kernel's code at `address`.
    pub(super) fn kernels<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        self.kernels_place(address)?;
        self.bytes(address, Access::Fetch, Mode::Implicit)
    }

    /// Returns the physical address of the byte of the kernel's code at `address`. Code that a kernel has taken from a
    /// process, without SMEP, is not its own with SMAP.
    pub(super) fn kernels_place(&self, address: u64) -> Option<u64> {
        self.place(address, Access::Load, Mode::Implicit)?;
        self.place(address, Access::Fetch, Mode::Implicit)
    }

    /// Writes `bytes` at `address`, as the supervisor does.
    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> bool {
        // The linear page that follows may be any other physical one, or none.
        let fits = address % PAGE + bytes.len() as u64 <= PAGE;
        let place = self.place(address, Access::Store, Mode::Implicit);
        fits && place.is_some_and(|at| self.memory.write(at, bytes))
    }
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
