//! A guest's memory for tests, and comparisons with this processor.

#[cfg(feature = "interpreter")]
mod native;

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cpu::System;
use crate::memory::{Memory, Store};
use crate::paging::PAGE;

/// RAM from address 0 on.
pub(crate) struct Ram(Vec<Frame>);

/// Aligned, so that KVM can give it to a guest.
#[repr(align(4096))]
struct Frame([AtomicU64; 512]);

impl Ram {
    pub(crate) fn new(size: u64) -> Self {
        let frame = |_| Frame([const { AtomicU64::new(0) }; 512]);
        Self((0..size / PAGE).map(frame).collect())
    }

    fn word(&self, at: u64) -> Option<&AtomicU64> {
        let frame = self.0.get(usize::try_from(at / PAGE).ok()?)?;
        frame.0.get((at % PAGE / 8) as usize)
    }

    pub(crate) fn host_address(&self) -> u64 {
        self.0.as_ptr().addr() as u64
    }

    /// Writes an aligned word.
    pub(crate) fn write(&self, at: u64, value: u64) {
        self.word(at).unwrap().store(value, Ordering::Relaxed);
    }

    pub(crate) fn write_bytes(&self, at: u64, bytes: &[u8]) {
        if at.is_multiple_of(8) && bytes.len().is_multiple_of(8) {
            for (n, word) in (0..).zip(bytes.as_chunks().0) {
                self.write(at + 8 * n, u64::from_le_bytes(*word));
            }
            return;
        }
        for (at, &byte) in (at..).zip(bytes) {
            let by = 8 * (at % 8);
            let word = self.word(at).unwrap();
            let rest = word.load(Ordering::Relaxed) & !(0xff << by);
            word.store(rest | u64::from(byte) << by, Ordering::Relaxed);
        }
    }
}

impl Memory for Ram {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        if address.is_multiple_of(8) && bytes.len().is_multiple_of(8) {
            return (0..).zip(bytes.as_chunks_mut().0).all(|(n, bytes)| {
                let word = address.checked_add(8 * n).and_then(|at| self.word(at));
                word.map(|word| *bytes = word.load(Ordering::Relaxed).to_le_bytes())
                    .is_some()
            });
        }
        for (n, byte) in bytes.iter_mut().enumerate() {
            let Some(at) = address.checked_add(n as u64) else {
                return false;
            };
            let Some(word) = self.word(at) else {
                return false;
            };
            *byte = (word.load(Ordering::Relaxed) >> (8 * (at % 8))) as u8;
        }
        true
    }

    fn is_writable(&self, address: u64) -> bool {
        self.word(address).is_some()
    }

    fn store(&self, stores: &[Store]) {
        for store in stores {
            let word = self.word(store.at).unwrap();
            let kept = word.load(Ordering::Relaxed) & !store.mask;
            word.store(kept | store.value, Ordering::Relaxed);
        }
    }
}

/// Where the tables of `map` begin; before them is their number.
const TABLES: u64 = 0x2000;
const USED: u64 = 0x100;
/// Present, writable, accessed, dirty.
#[cfg(feature = "interpreter")]
pub(crate) const KERNEL: u64 = 0x63;

/// Returns a kernel in 64-bit mode, with tables of four levels.
pub(crate) fn system() -> System {
    System {
        cr0: 0x8001_0001,
        cr3: TABLES,
        cr4: 0x20,
        efer: 0xd01,
        is_long: true,
        ..Default::default()
    }
}

/// Maps a page at `linear`.
pub(crate) fn map(ram: &Ram, linear: u64, entry: u64) {
    let word = |at| {
        let mut bytes = [0; 8];
        assert!(ram.read(at, &mut bytes));
        u64::from_le_bytes(bytes)
    };
    let mut table = TABLES;
    for level in (1..4).rev() {
        let at = table + 8 * (linear >> (12 + 9 * level) & 0x1ff);
        if word(at) == 0 {
            let used = word(USED) + 1;
            ram.write(USED, used);
            ram.write(at, (TABLES + PAGE * used) | KERNEL);
        }
        table = word(at) & !0xfff;
    }
    ram.write(table + 8 * (linear >> 12 & 0x1ff), entry);
}
