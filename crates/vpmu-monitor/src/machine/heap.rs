//! Memory for boot, and none after it.
//!
//! Reading the device tree and building page tables need a heap; serving exits must not. So this
//! heap only ever hands out, and is sealed before the guest starts: an allocation after that fails.
//!
//! UNSAFETY: implements `GlobalAlloc`, an unsafe trait.

use core::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    ptr,
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

const SIZE: usize = 512 * 1024;

#[repr(align(4096))]
struct BootHeap {
    memory: UnsafeCell<[u8; SIZE]>,
    used: AtomicUsize,
}

#[global_allocator]
static HEAP: BootHeap = BootHeap {
    memory: UnsafeCell::new([0; SIZE]),
    used: AtomicUsize::new(0),
};

// SAFETY: only the boot CPU allocates, and each byte is handed out once.
unsafe impl Sync for BootHeap {}

// SAFETY: a returned block lies in `memory`, is aligned, and overlaps no other.
unsafe impl GlobalAlloc for BootHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // One CPU allocates, before the others start and partly with caches off, where exclusive
        // accesses are not to be had: a load and a store.
        let start = self.memory.get() as usize;
        let begin = (start + self.used.load(Relaxed)).next_multiple_of(layout.align()) - start;
        match begin.checked_add(layout.size()) {
            Some(end) if end <= SIZE => {
                self.used.store(end, Relaxed);
                self.memory.get().cast::<u8>().wrapping_add(begin)
            }
            _ => ptr::null_mut(),
        }
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

/// No allocation succeeds from here on.
pub(crate) fn seal() {
    HEAP.used.store(SIZE, Relaxed);
}
