//! The guest's memory, as this crate needs it.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use lazy_deadline::{Slot, SlotRef};
use vpmu::paravirt::{PAGE_SIZE, Page};
use vpmu_x86::memory::Store;

/// The guest's RAM by its physical addresses. It includes neither the guest's devices nor memory that the guest may not
/// write: the guest chooses the addresses.
///
/// PEBS records, the page of a paravirtual PMU, the slot of a lazy deadline, and the code by which RDPMC reaches the
/// VMM ([`Rdpmc`](crate::Rdpmc)) are in this memory. Where the VMM logs the pages that its guest writes, it logs the
/// pages that are written here, too. The feature `vm-memory` implements the trait for `GuestMemoryMmap`, and for any
/// other `GuestRegionCollection`, of this crate's version of `vm-memory`.
pub trait GuestMemory: fmt::Debug + Send + Sync {
    /// Fills `bytes` from `address` on. `false`: not all of that is RAM; `bytes` may be anything.
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool;

    /// Writes `bytes` from `address` on, as the guest would. `false`: not all of that is RAM.
    fn write(&self, address: u64, bytes: &[u8]) -> bool;

    /// Calls `body` once with the `count` words of 64 bits from `address` on, a multiple of 8. Does not call `body`
    /// where not all of them are RAM. The words may be written. Every use of this memory except PEBS needs these words.
    /// Without them the guest finds no page, no slot, and, where RDPMC needs
    /// [`Vcpu::set_rdpmc`](crate::Vcpu::set_rdpmc), no PMU.
    fn with_words(&self, address: u64, count: usize, body: &mut dyn FnMut(&dyn Words));
}

/// Words of the guest's memory, which other vCPUs may write at any time.
pub trait Words {
    /// Returns the word of 64 bits with this index, or `None` behind the last.
    fn word(&self, index: usize) -> Option<&AtomicU64>;
}

/// What a guest's instructions reach that are executed for it.
impl vpmu_x86::memory::Memory for dyn GuestMemory + '_ {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        GuestMemory::read(self, address, bytes)
    }

    fn is_writable(&self, address: u64) -> bool {
        let mut is_ram = false;
        self.with_words(address, 1, &mut |_| is_ram = true);
        is_ram
    }

    fn store(&self, stores: &[Store]) {
        let first = stores.iter().map(|store| store.at).min().unwrap_or(0);
        let last = stores.iter().map(|store| store.at).max().unwrap_or(0);
        let count = (last - first) as usize / size_of::<u64>() + 1;
        self.with_words(first, count, &mut |words| {
            for store in stores {
                let index = (store.at - first) as usize / size_of::<u64>();
                let Some(word) = words.word(index) else {
                    continue;
                };
                if store.mask == u64::MAX {
                    word.store(store.value, Ordering::Release);
                    continue;
                }
                let part = |old| Some(old & !store.mask | store.value);
                // Neighbours in the word are other vCPUs' to write.
                let _ = word.fetch_update(Ordering::Release, Ordering::Relaxed, part);
            }
        });
    }
}

/// Calls `body` with the `count` words at `at`, or with `None` where there are none.
fn with_words<R>(
    memory: &dyn GuestMemory,
    at: Option<u64>,
    count: usize,
    body: impl FnOnce(Option<&dyn Words>) -> R,
) -> R {
    // The trait's `body` can be called by a trait object, so it cannot be consumed: `take` does.
    let (mut body, mut result) = (Some(body), None);
    if let Some(at) = at {
        memory.with_words(at, count, &mut |words| {
            result = result.take().or_else(|| Some(body.take()?(Some(words))));
        });
    }
    match (result, body) {
        (Some(result), _) => result,
        (None, Some(body)) => body(None),
        (None, None) => unreachable!("a body that was called has a result"),
    }
}

/// Hands over the page of a paravirtual PMU at `at`, or `None` where there is none.
pub(crate) fn with_page<R>(
    memory: &dyn GuestMemory,
    at: Option<u64>,
    body: impl FnOnce(Option<&SharedPage<'_>>) -> R,
) -> R {
    with_words(memory, at, PAGE_SIZE / size_of::<u64>(), |words| {
        let page = words.map(|words| SharedPage { words, memory });
        body(page.as_ref())
    })
}

/// Hands over the slot of a lazy deadline at `at`, or `None` where there is none.
pub(crate) fn with_slot<R>(
    memory: &dyn GuestMemory,
    at: Option<u64>,
    body: impl FnOnce(Option<SlotRef<'_>>) -> R,
) -> R {
    with_words(memory, at, Slot::SIZE / size_of::<u64>(), |words| {
        body(words.and_then(|words| {
            let word = |offset: usize| words.word(offset / size_of::<u64>());
            Some(SlotRef {
                armed: word(Slot::ARMED)?,
                pending: word(Slot::PENDING)?,
                tag: word(Slot::TAG_WORD)?,
            })
        }))
    })
}

/// A shared page of a paravirtual PMU.
pub(crate) struct SharedPage<'a> {
    words: &'a dyn Words,
    memory: &'a dyn GuestMemory,
}

impl Page for SharedPage<'_> {
    fn load(&self, word: usize) -> u64 {
        let word = self.words.word(word);
        // Acquire and release pair with the guest driver's: a generation that is seen comes with its wish.
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.words.word(word) {
            word.store(value, Ordering::Release);
        }
    }

    fn fence(&self) {
        // x86 lets a load pass an older store to another word, which would lose an interrupt (vpmu::paravirt).
        fence(Ordering::SeqCst);
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.memory.write(address, bytes)
    }
}

#[cfg(feature = "vm-memory")]
mod rust_vmm {
    use std::fmt::Debug;
    use std::sync::atomic::{AtomicU64, Ordering};

    use vm_memory::bitmap::{Bitmap, BitmapSlice};
    use vm_memory::{
        Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionCollection,
        VolatileMemory, VolatileSlice,
    };

    use super::{GuestMemory, Words};

    // GuestMemoryMmap is such a collection. VMMs with regions of their own (Firecracker) have another.
    impl<R: GuestMemoryRegion + Debug + Send + Sync + 'static> GuestMemory
        for GuestRegionCollection<R>
    {
        fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
            // An entry of a page table: the general way takes three times as many instructions.
            if let Ok(word) = <&mut [u8; 8]>::try_from(&mut *bytes)
                && address.is_multiple_of(8)
            {
                let loaded = self.load::<u64>(GuestAddress(address), Ordering::Relaxed);
                return loaded.map(|value| *word = value.to_ne_bytes()).is_ok();
            }
            self.read_slice(bytes, GuestAddress(address)).is_ok()
        }

        fn write(&self, address: u64, bytes: &[u8]) -> bool {
            self.write_slice(bytes, GuestAddress(address)).is_ok()
        }

        fn with_words(&self, address: u64, count: usize, body: &mut dyn FnMut(&dyn Words)) {
            let size = count * size_of::<u64>();
            if let Ok(slice) = self.get_slice(GuestAddress(address), size) {
                body(&Slice(&slice));
                // Atomic stores do not pass the bitmap.
                slice.bitmap().mark_dirty(0, size);
            }
        }
    }

    struct Slice<'a, 'b, B: BitmapSlice>(&'a VolatileSlice<'b, B>);

    impl<B: BitmapSlice> Words for Slice<'_, '_, B> {
        fn word(&self, index: usize) -> Option<&AtomicU64> {
            let at = index.checked_mul(size_of::<u64>())?;
            self.0.get_atomic_ref(at).ok()
        }
    }

    #[cfg(test)]
    mod tests {
        use super::super::{with_page, with_slot};
        use super::*;
        use lazy_deadline::Slot;
        use vm_memory::GuestMemoryMmap;
        use vm_memory::bitmap::AtomicBitmap;
        use vpmu::paravirt::Page;

        fn memory() -> GuestMemoryMmap {
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap()
        }

        #[test]
        fn a_slot_is_the_guests_memory() {
            let memory = memory();
            memory
                .write_obj(Slot::TAG, GuestAddress(64 + 0x10))
                .unwrap();
            with_slot(&memory, Some(64), |slot| {
                let slot = slot.unwrap();
                let order = Ordering::Relaxed;
                assert_eq!(slot.tag.load(order), Slot::TAG);
                slot.armed.store(7, order);
            });
            assert_eq!(memory.read_obj::<u64>(GuestAddress(64)).unwrap(), 7);
        }

        #[test]
        fn a_page_is_the_guests_memory_and_whole() {
            let memory = memory();
            with_page(&memory, Some(0), |page| {
                let page = page.unwrap();
                page.store(511, 9);
                assert_eq!(page.load(511), 9);
                assert_eq!(page.load(512), 0, "nothing is there");
            });
            assert_eq!(memory.read_obj::<u64>(GuestAddress(4088)).unwrap(), 9);
            for at in [None, Some(8), Some(4096), Some(1 << 52)] {
                assert!(with_page(&memory, at, |page| page.is_none()), "{at:x?}");
            }
        }

        #[test]
        fn a_vmm_that_logs_dirty_pages_sees_our_stores() {
            let ranges = [(GuestAddress(0), 3 * 4096)];
            let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&ranges).unwrap();
            let dirty = || {
                let (region, _) = memory.to_region_addr(GuestAddress(0)).unwrap();
                [0, 4096, 8192].map(|at| region.bitmap().dirty_at(at))
            };
            assert_eq!(dirty(), [false; 3]);
            with_slot(&memory, Some(4096), |slot| {
                slot.unwrap().armed.store(7, Ordering::Relaxed);
            });
            assert_eq!(dirty(), [false, true, false], "a slot");
            with_page(&memory, Some(8192), |page| page.unwrap().store(0, 9));
            assert_eq!(dirty(), [false, true, true], "a page");
            assert!(GuestMemory::write(&memory, 8, &[1]));
            assert_eq!(dirty(), [true; 3], "a record");
        }

        #[test]
        fn what_is_no_memory_is_no_slot() {
            for at in [
                None,
                Some(4096),
                Some(4096 - 32),
                Some(u64::MAX - 63),
                Some(1 << 52),
            ] {
                assert!(with_slot(&memory(), at, |slot| slot.is_none()), "{at:x?}");
            }
        }
    }
}
