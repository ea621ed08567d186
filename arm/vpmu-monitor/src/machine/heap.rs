//! Memory for boot, and none after it.
//!
//! Reading the device tree and building page tables need a heap; serving exits must not. So this
//! heap only ever hands out, and is sealed before the guest starts: an allocation after that fails.
//!
//! UNSAFETY: implements `GlobalAlloc`, an unsafe trait.

use core::{
    alloc::{GlobalAlloc, Layout},
    ops::Range,
    ptr,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

struct BootHeap {
    next: AtomicUsize,
    end: AtomicUsize,
}

#[global_allocator]
static HEAP: BootHeap = BootHeap {
    next: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
};

/// Hands out `memory` from here on.
///
/// # Safety
///
/// Nobody else may use that memory.
pub(crate) unsafe fn open(memory: Range<u64>) {
    HEAP.next.store(memory.start as usize, Relaxed);
    HEAP.end.store(memory.end as usize, Relaxed);
}

// SAFETY: a returned block lies in the memory that `open` was given, is aligned, and overlaps no other.
unsafe impl GlobalAlloc for BootHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // One CPU allocates, before the others start and partly with caches off, where exclusive
        // accesses are not to be had: a load and a store.
        let end = self.end.load(Relaxed);
        let block = self
            .next
            .load(Relaxed)
            .checked_next_multiple_of(layout.align())
            .and_then(|begin| Some((begin, begin.checked_add(layout.size())?)));
        match block {
            Some((begin, next)) if next <= end => {
                self.next.store(next, Relaxed);
                begin as *mut u8
            }
            _ => ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

/// No allocation succeeds from here on.
pub(crate) fn seal() {
    HEAP.end.store(0, Relaxed);
}
