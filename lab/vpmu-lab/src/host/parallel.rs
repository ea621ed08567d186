//! Several runs at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use itertools::Itertools;

/// Returns the number of runs at once: each run of QEMU takes a processor.
pub(crate) fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Locks what another thread may have left in the middle of its work.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Maps `items` by `work`, `at_once` of them at a time, beginning with the first.
/// Results are in the order of `items`.
pub(crate) fn map<T: Sync, R: Send>(
    items: &[T],
    at_once: usize,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let (sender, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..at_once.min(items.len()) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    // The receiver outlives this scope.
                    let _ = sender.send((index, work(item)));
                }
            });
        }
    });
    drop(sender);
    let results = results.into_iter().sorted_by_key(|(index, _)| *index);
    results.map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_done_once_and_in_its_place() {
        let items: Vec<u32> = (0..100).collect();
        for at_once in [1, 3, 1000] {
            let results = map(&items, at_once, |item| 2 * item);
            assert_eq!(results, (0..100).map(|item| 2 * item).collect::<Vec<_>>());
        }
        assert!(map(&[], 2, |(): &()| ()).is_empty());
    }

    #[test]
    fn no_more_than_asked_at_a_time() {
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        map(&[(); 50], 4, |()| {
            most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            now.fetch_sub(1, Ordering::SeqCst);
        });
        assert!((1..=4).contains(&most.into_inner()));
    }
}
