//! The guest's memory, as a VMM in C gives it.

use core::ffi::c_void;
use core::slice;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use vpmu_kvm::{GuestMemory, Words};

/// The guest's RAM by its physical addresses, which the guest chooses: neither devices, nor memory that the guest may not
/// write. The functions are called from any thread until the VM's last PMU has been detached and the VM is closed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuKvmMemory {
    /// Handed to both functions.
    pub context: *mut c_void,
    /// Returns where `length` bytes of the guest's RAM from `address` on are mapped, or NULL where not all of them are
    /// RAM in one piece. They stay mapped until the VM's last vCPU has stopped.
    pub map: Option<
        unsafe extern "C" fn(context: *mut c_void, address: u64, length: usize) -> *mut c_void,
    >,
    /// Called with bytes that were written, for a log of pages; may be NULL.
    pub written: Option<unsafe extern "C" fn(context: *mut c_void, address: u64, length: usize)>,
}

/// Memory with a way to map it. Without `map`, the guest has none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory(pub(crate) VpmuKvmMemory);

// SAFETY: `VpmuKvmMemory` asks for functions that any thread may call with the context.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Returns the bytes at `address`.
    fn bytes(&self, address: u64, length: usize) -> Option<&[AtomicU8]> {
        let map = self.0.map?;
        let _end = address.checked_add(length as u64)?;
        // SAFETY: the caller of `vpmu_kvm_open` promised a function that may be called with its context.
        let at = unsafe { map(self.0.context, address, length) };
        // SAFETY: so many bytes are mapped there, as the function says. Others write them: they are atomics.
        (!at.is_null()).then(|| unsafe { slice::from_raw_parts(at.cast::<AtomicU8>(), length) })
    }

    fn tell(&self, address: u64, length: usize) {
        if let Some(written) = self.0.written {
            // SAFETY: as in `bytes`.
            unsafe { written(self.0.context, address, length) }
        }
    }
}

impl GuestMemory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let Some(from) = self.bytes(address, bytes.len()) else {
            return false;
        };
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = from.load(Ordering::Relaxed);
        }
        true
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some(to) = self.bytes(address, bytes.len()) else {
            return false;
        };
        for (to, from) in to.iter().zip(bytes) {
            to.store(*from, Ordering::Relaxed);
        }
        self.tell(address, bytes.len());
        true
    }

    fn with_words(&self, address: u64, count: usize, body: &mut dyn FnMut(&dyn Words)) {
        let length = count * size_of::<u64>();
        let Some(bytes) = self.bytes(address, length) else {
            return;
        };
        let words = bytes.as_ptr().cast::<AtomicU64>();
        // A mapping that begins askew has no atomic words.
        if words.is_aligned() {
            // SAFETY: aligned, as many bytes as `bytes` has, and atomics like these.
            body(&Slice(unsafe { slice::from_raw_parts(words, count) }));
            self.tell(address, length);
        }
    }
}

struct Slice<'a>(&'a [AtomicU64]);

impl Words for Slice<'_> {
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        self.0.get(index)
    }
}
