//! The monitor's locks, of two kinds, neither of which is held while a CPU waits.
//!
//! What one CPU alone uses is [`Own`] to it: nobody waits for that lock, and another CPU that reports figures only
//! [peeks](Own::peek). What all CPUs use is [`Shared`], for as long as a closure runs that only reads and writes the value.
//! So the order is `Own` before `Shared`, and nothing after `Shared`.
//!
//! Each exception begins with its CPU's one [`Unlocked`]. An [`Own`] lock borrows it, so the compiler refuses a second one
//! beside the first, and whatever takes `&mut Unlocked` to wait:
//!
//! ```
//! # use vpmu_monitor::lock::{Own, Unlocked};
//! fn wait(_: &mut Unlocked) {}
//! let (turns, mut unlocked) = (Own::new(0), Unlocked::at_exception());
//! let mut held = turns.lock(&mut unlocked);
//! *held += 1;
//! drop(held);
//! wait(&mut unlocked);
//! ```
//!
//! ```compile_fail,E0499
//! # use vpmu_monitor::lock::{Own, Unlocked};
//! fn wait(_: &mut Unlocked) {}
//! let (turns, mut unlocked) = (Own::new(0), Unlocked::at_exception());
//! let mut held = turns.lock(&mut unlocked);
//! wait(&mut unlocked);
//! *held += 1;
//! ```
//!
//! ```compile_fail,E0499
//! # use vpmu_monitor::lock::{Own, Unlocked};
//! let (one, other, mut unlocked) = (Own::new(0), Own::new(0), Unlocked::at_exception());
//! let held = one.lock(&mut unlocked);
//! let also = other.lock(&mut unlocked);
//! drop(held);
//! ```

use core::marker::PhantomData;

use spin::{Mutex, MutexGuard};

/// This CPU holds no [`Own`] lock.
#[derive(Debug)]
pub struct Unlocked(PhantomData<*const ()>);

impl Unlocked {
    /// Returns the proof for a CPU that has just come to EL2, by an exception or because it starts. The caller makes one for each
    /// such entry.
    pub const fn at_exception() -> Self {
        Self(PhantomData)
    }
}

/// What one CPU alone uses.
#[derive(Debug)]
pub struct Own<T>(Mutex<T>);

impl<T> Own<T> {
    /// Makes a lock that holds `value`.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// The value, on its CPU, until the guard is dropped.
    pub fn lock<'a>(&'a self, _: &'a mut Unlocked) -> MutexGuard<'a, T> {
        self.0.lock()
    }

    /// This value and another of the same CPU.
    pub fn lock_with<'a, U>(
        &'a self,
        other: &'a Own<U>,
        _: &'a mut Unlocked,
    ) -> (MutexGuard<'a, T>, MutexGuard<'a, U>) {
        // In this order everywhere: a CPU has its pair of guests before its own state.
        (self.0.lock(), other.0.lock())
    }

    /// The value, from any CPU; `None` while its own CPU uses it.
    pub fn peek(&self) -> Option<MutexGuard<'_, T>> {
        // Whoever reports figures must not wait for a CPU that never comes back.
        self.0.try_lock()
    }
}

/// What all CPUs use.
#[derive(Debug)]
pub struct Shared<T>(Mutex<T>);

impl<T> Shared<T> {
    /// Makes a lock that holds `value`.
    pub const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }

    /// What `work` makes of the value. `work` neither takes a lock nor waits for anything.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        work(&mut self.0.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_in_use_is_not_peeked_at() {
        let (own, other) = (Own::new(1), Own::new(2));
        let mut unlocked = Unlocked::at_exception();
        let (held, _) = own.lock_with(&other, &mut unlocked);
        assert!(own.peek().is_none());
        assert_eq!(*held, 1);
        drop(held);
        assert_eq!(own.peek().as_deref(), Some(&1));
    }
}
