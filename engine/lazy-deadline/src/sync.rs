//! The atomics of the protocol, in one place, so that a model checker can put its own below it.
//!
//! Plain builds have `core`'s. `cargo test` with `--cfg loom` has loom's, whose loads return every
//! value that the memory model permits, and can leave out one of the fences to show that the check
//! would notice.

#[cfg(not(all(test, loom)))]
pub(super) use core::sync::atomic::{AtomicU64, Ordering};
#[cfg(all(test, loom))]
pub(super) use loom::sync::atomic::{AtomicU64, Ordering};

/// A full barrier: stores before it are visible before loads after it are performed.
#[cfg(not(all(test, loom)))]
#[inline]
pub(super) fn full_fence(_: Fence) {
    core::sync::atomic::fence(Ordering::SeqCst);
}

#[cfg(all(test, loom))]
pub(super) fn full_fence(fence: Fence) {
    if !mutation::omits(fence) {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// The guest's store to a word that the host may exchange at the same time.
#[cfg(not(all(test, loom)))]
#[inline]
pub(super) fn store_contended(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

// Loom does not know that a store made after an exchange of an older value also follows it in the
// word's modification order, and so lets the storing thread read the exchanged value later, which
// no machine does. Of two exchanges it knows. An exchange without an ordering makes nothing else
// visible.
#[cfg(all(test, loom))]
pub(super) fn store_contended(word: &AtomicU64, value: u64) {
    let _ = word.swap(value, Ordering::Relaxed);
}

/// Which of the protocol's two full barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fence {
    /// In the guest, between its store of `pending` and its load of `armed`.
    Guest,
    /// In the host, between its clearing of `armed` and its load of `pending`.
    Host,
}

#[cfg(all(test, loom))]
pub(super) mod mutation {
    extern crate std;

    use std::cell::Cell;

    use super::Fence;

    std::thread_local! {
        // Loom runs all threads of a model on the thread that called it.
        static OMITTED: Cell<Option<Fence>> = const { Cell::new(None) };
    }

    pub(super) fn omits(fence: Fence) -> bool {
        OMITTED.get() == Some(fence)
    }

    /// Runs `body` with this thread's `fence` left out.
    pub(crate) fn without<R>(fence: Option<Fence>, body: impl FnOnce() -> R) -> R {
        struct Restore;
        impl Drop for Restore {
            fn drop(&mut self) {
                OMITTED.set(None);
            }
        }
        let _restore = Restore;
        OMITTED.set(fence);
        body()
    }
}
