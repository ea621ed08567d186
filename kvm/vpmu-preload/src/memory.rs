//! The guest's memory, as the program has registered it with KVM.

use std::fmt;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use vpmu_kvm::{GuestMemory, Words};

/// Slots of other address spaces than the processor's own (SMM) have a number here.
const SPACE: u32 = 0xffff << 16;

/// RAM of the guest in the program's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Region {
    slot: u32,
    physical: u64,
    size: u64,
    here: u64,
}

/// The slots of one VM.
#[derive(Default)]
pub(crate) struct Memory(RwLock<Vec<Region>>);

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

/// The slots while the program changes one: nobody reads memory meanwhile that may be unmapped thereafter.
pub(crate) struct Changing<'a>(RwLockWriteGuard<'a, Vec<Region>>);

impl Memory {
    pub(crate) fn change(&self) -> Changing<'_> {
        Changing(self.0.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `body` with the address of `size` bytes at `physical`, while they are there. Returns whether they are.
    fn with(&self, physical: u64, size: u64, body: impl FnOnce(u64)) -> bool {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let found = regions.iter().find_map(|region| {
            let offset = physical.checked_sub(region.physical)?;
            let fits = offset.checked_add(size)? <= region.size;
            fits.then(|| region.here + offset)
        });
        found.map(body).is_some()
    }
}

impl Changing<'_> {
    /// Notes a slot that KVM has taken.
    pub(crate) fn set(&mut self, new: &kvm_userspace_memory_region) {
        if new.slot & SPACE != 0 {
            return;
        }
        self.0.retain(|region| region.slot != new.slot);
        // What the guest may not write is no RAM.
        if new.memory_size != 0 && new.flags & KVM_MEM_READONLY == 0 {
            self.0.push(Region {
                slot: new.slot,
                physical: new.guest_phys_addr,
                size: new.memory_size,
                here: new.userspace_addr,
            });
        }
    }
}

/// Returns the byte at this address of the program's.
fn byte<'a>(address: u64) -> &'a AtomicU8 {
    let pointer: *mut u8 = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: the callers have the address from `Memory::with`, under whose lock the program is kept from taking the slot
    // from KVM, and so from unmapping it. All accesses here are atomic, and those of the guest and the program are not
    // Rust's.
    unsafe { AtomicU8::from_ptr(pointer) }
}

impl GuestMemory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        self.with(address, bytes.len() as u64, |here| {
            for (to, at) in bytes.iter_mut().zip(here..) {
                *to = byte(at).load(Ordering::Relaxed);
            }
        })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        self.with(address, bytes.len() as u64, |here| {
            for (from, at) in bytes.iter().zip(here..) {
                byte(at).store(*from, Ordering::Relaxed);
            }
        })
    }

    fn with_words(&self, address: u64, count: usize, body: &mut dyn FnMut(&dyn Words)) {
        let size = count as u64 * size_of::<u64>() as u64;
        self.with(address, size, |here| {
            if here.is_multiple_of(size_of::<u64>() as u64) {
                body(&Here { here, count });
            }
        });
    }
}

/// Words in the program's memory, as long as `Memory::with` runs.
struct Here {
    here: u64,
    count: usize,
}

impl Words for Here {
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let address = self.here as usize + index * size_of::<u64>();
        let pointer: *mut u64 = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: as in `byte`; `with_words` has seen to the alignment and to the length.
        (index < self.count).then(|| unsafe { AtomicU64::from_ptr(pointer) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_what_kvm_was_told() {
        let mut words = [0_u64; 4];
        let here = words.as_mut_ptr().expose_provenance() as u64;
        let memory = Memory::default();
        let slot = |slot, flags, guest_phys_addr, memory_size| kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr,
            memory_size,
            userspace_addr: here,
        };
        memory.change().set(&slot(1, 0, 0x1000, 32));
        memory.change().set(&slot(2, KVM_MEM_READONLY, 0x2000, 32));
        memory.change().set(&slot(1 << 16, 0, 0x3000, 32));
        assert!(memory.write(0x1008, &[1, 2]));
        let mut bytes = [0; 2];
        assert!(memory.read(0x1008, &mut bytes));
        assert_eq!(bytes, [1, 2]);
        for (at, size) in [
            (0x1018, 9),
            (0xfff, 2),
            (0x2000, 1),
            (0x3000, 1),
            (u64::MAX, 1),
        ] {
            assert!(!memory.read(at, &mut vec![0; size]), "{at:#x}");
        }
        let mut seen = None;
        memory.with_words(0x1008, 3, &mut |words| {
            let word = words.word(0).map(|word| word.load(Ordering::Relaxed));
            seen = Some((word, words.word(3).is_some()));
        });
        assert_eq!(seen, Some((Some(0x201), false)));
        // Moved, and then taken away.
        memory.change().set(&slot(1, 0, 0x4000, 32));
        assert!(!memory.read(0x1008, &mut bytes) && memory.read(0x4008, &mut bytes));
        memory.change().set(&slot(1, 0, 0x4000, 0));
        assert!(!memory.read(0x4008, &mut bytes));
    }
}
