//! The programs' heap: a fixed piece of memory, of which the kernel provides only pages that are touched.

// UNSAFETY: the allocator takes its memory by a raw pointer.
#![expect(unsafe_code, reason = "memory by a raw pointer")]

use linked_list_allocator::LockedHeap;

/// Bytes. A program fails when it needs more.
const SIZE: usize = 4 << 20;

static mut MEMORY: [u128; SIZE / size_of::<u128>()] = [0; SIZE / size_of::<u128>()];

#[global_allocator]
static HEAP: LockedHeap = LockedHeap::empty();

/// Makes the heap usable.
///
/// # Safety
///
/// Called once, before anything is allocated.
pub(crate) unsafe fn open() {
    // SAFETY: nothing else refers to the memory, which exists as long as the process.
    unsafe { HEAP.lock().init((&raw mut MEMORY).cast(), SIZE) };
}
