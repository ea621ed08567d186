//! The words of this process's vCPUs, in the file that [`publish`](crate::publish) describes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

/// The words before the first vCPU's.
pub(crate) const HEADER: usize = 8;
/// The place of the number of vCPUs' places that were ever taken.
pub(crate) const TAKEN_EVER: usize = 5;
/// The words of a vCPU. A multiple of a cache line, so that no two vCPUs share one.
pub(crate) const STRIDE: usize = 64;
/// All words of the file.
pub(crate) const WORDS: usize = HEADER + 1024 * STRIDE;

pub(crate) const STATE: usize = 0;
pub(crate) const THREAD: usize = 1;
pub(crate) const BACKING: usize = 2;
pub(crate) const MODEL: usize = 3;
/// The place of a vCPU's first count.
pub(crate) const COUNTS: usize = 4;

const FREE: u64 = 0;
pub(crate) const VALID: u64 = 1;
const TAKEN: u64 = 2;

/// The file of this process.
pub(crate) static FILE: OnceLock<Mapped> = OnceLock::new();

/// A mapped file, which no vCPU uses yet. It is locked as long as its descriptor is open.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) file: OwnedFd,
    pub(crate) words: &'static [AtomicU64],
    /// The places that the file system has given memory for.
    reserved: AtomicU64,
}

impl Mapped {
    pub(crate) fn new(file: OwnedFd, words: &'static [AtomicU64]) -> io::Result<Self> {
        let reserved = AtomicU64::new(0);
        let mapped = Self {
            file,
            words,
            reserved,
        };
        mapped.reserve(1)?;
        Ok(mapped)
    }

    /// Has the file system give memory for so many places. Where it had none, a store would end the process by SIGBUS.
    fn reserve(&self, places: u64) -> io::Result<()> {
        // Those of a page at once. All of them would take half a megabyte of each process.
        const OF_PAGE: u64 = 4096 / (8 * STRIDE as u64);
        if places > self.reserved.load(Ordering::Relaxed) {
            let places = places.next_multiple_of(OF_PAGE);
            let bytes = 8 * (HEADER as u64 + places * STRIDE as u64);
            fallocate(&self.file, FallocateFlags::empty(), 0, bytes)?;
            self.reserved.fetch_max(places, Ordering::Relaxed);
        }
        Ok(())
    }
}

pub(crate) fn put(words: &[AtomicU64], values: &[u64]) {
    for (word, value) in words.iter().zip(values) {
        // A store of a whole word; no order among them is promised.
        word.store(value.to_le(), Ordering::Relaxed);
    }
}

/// A vCPU's words in the file. A copy has none.
#[derive(Debug, Default)]
pub(crate) struct Slot(Option<&'static [AtomicU64]>);

impl Slot {
    /// Takes a free place, if there is a file.
    pub(crate) fn take(backing: u64, model: u64) -> Self {
        let Some(mapped) = FILE.get() else {
            return Self(None);
        };
        let (header, slots) = mapped.words.split_at(HEADER);
        let slots = (1_u64..).zip(slots.chunks_exact(STRIDE));
        let take = |(_, slot): &(u64, &[AtomicU64])| {
            let (relaxed, taken) = (Ordering::Relaxed, TAKEN.to_le());
            slot[STATE]
                .compare_exchange(FREE, taken, relaxed, relaxed)
                .is_ok()
        };
        let mut there = slots.take_while(|(number, _)| mapped.reserve(*number).is_ok());
        let Some((number, slot)) = there.find(take) else {
            return Self(None);
        };
        let mut words = [0; STRIDE];
        (words[BACKING], words[MODEL]) = (backing, model);
        put(&slot[THREAD..], &words[THREAD..]);
        slot[STATE].store(VALID.to_le(), Ordering::Release);
        header[TAKEN_EVER].fetch_max(number, Ordering::Relaxed);
        Self(Some(slot))
    }

    /// Names the calling thread as the vCPU's.
    pub(crate) fn show_thread(&self) {
        if let Some(slot) = self.0 {
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            put(&slot[THREAD..], &[u64::from(thread.unsigned_abs())]);
        }
    }

    /// Publishes the counts from the one with this index on.
    pub(crate) fn show<const N: usize>(&self, first: usize, counts: impl FnOnce() -> [u64; N]) {
        if let Some(slot) = self.0 {
            put(&slot[COUNTS + first..], &counts());
        }
    }
}

impl Clone for Slot {
    fn clone(&self) -> Self {
        Self(None)
    }
}

impl PartialEq for Slot {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Slot {}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            slot[STATE].store(FREE, Ordering::Release);
        }
    }
}
