//! The guest's memory, which holds the slots of the lazy deadlines, the pages of paravirtual PMUs, and PEBS records.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use lazy_deadline::{Slot, SlotRef};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory, VolatileSlice,
};
use vpmu_kvm::{GuestMemory, PAGE_SIZE, Page, PageMemory, SlotMemory, VcpuDeadline};

/// A vCPU's lazy deadline, which its own thread shares with the thread that waits for it.
pub(super) type Deadline = Arc<VcpuDeadline<Memory>>;

/// The guest's memory, which holds its slots.
#[derive(Clone, Debug)]
pub(super) struct Memory(pub(super) GuestMemoryMmap);

impl SlotMemory for Memory {
    fn with_slot<R>(&self, at: Option<u64>, body: impl FnOnce(Option<SlotRef<'_>>) -> R) -> R {
        let slice = at.and_then(|at| self.0.get_slice(GuestAddress(at), Slot::SIZE).ok());
        let word = |offset| slice.as_ref()?.get_atomic_ref::<AtomicU64>(offset).ok();
        let slot = word(Slot::ARMED)
            .zip(word(Slot::PENDING))
            .zip(word(Slot::TAG_WORD));
        body(slot.map(|((armed, pending), tag)| SlotRef {
            armed,
            pending,
            tag,
        }))
    }
}

/// A shared page of a paravirtual PMU.
struct SharedPage<'a, B: BitmapSlice>(VolatileSlice<'a, B>);

impl<B: BitmapSlice> SharedPage<'_, B> {
    fn word(&self, word: usize) -> Option<&AtomicU64> {
        self.0.get_atomic_ref(word * size_of::<u64>()).ok()
    }
}

impl<B: BitmapSlice> Page for SharedPage<'_, B> {
    fn load(&self, word: usize) -> u64 {
        self.word(word)
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    fn store(&self, word: usize, value: u64) {
        if let Some(word) = self.word(word) {
            word.store(value, Ordering::Release);
        }
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

impl PageMemory for Memory {
    fn with_page<R>(&self, at: Option<u64>, body: impl FnOnce(Option<&dyn Page>) -> R) -> R {
        let slice = at.and_then(|at| self.0.get_slice(GuestAddress(at), PAGE_SIZE).ok());
        match slice.map(SharedPage) {
            None => body(None),
            Some(page) => body(Some(&page)),
        }
    }
}

impl GuestMemory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.0.read_slice(bytes, GuestAddress(address)).is_ok()
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.0.write_slice(bytes, GuestAddress(address)).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        Memory(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap())
    }

    #[test]
    fn a_slot_is_the_guests_memory() {
        let memory = memory();
        memory
            .0
            .write_obj(Slot::TAG, GuestAddress(64 + 0x10))
            .unwrap();
        memory.with_slot(Some(64), |slot| {
            let slot = slot.unwrap();
            let order = Ordering::Relaxed;
            assert_eq!(slot.tag.load(order), Slot::TAG);
            slot.armed.store(7, order);
        });
        assert_eq!(memory.0.read_obj::<u64>(GuestAddress(64)).unwrap(), 7);
    }

    #[test]
    fn a_page_is_the_guests_memory_and_whole() {
        let memory = memory();
        memory.with_page(Some(0), |page| {
            let page = page.unwrap();
            page.store(511, 9);
            assert_eq!(page.load(511), 9);
            assert_eq!(page.load(512), 0, "nothing is there");
        });
        assert_eq!(memory.0.read_obj::<u64>(GuestAddress(4088)).unwrap(), 9);
        for at in [None, Some(8), Some(4096), Some(1 << 52)] {
            assert!(memory.with_page(at, |page| page.is_none()), "{at:x?}");
        }
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
            assert!(memory().with_slot(at, |slot| slot.is_none()), "{at:x?}");
        }
    }
}
