//! The descriptors that a guest's counters will take.
//!
//! A perf event is made when its guest first counts with the counter, which may be hours after the VM was made. Where the
//! process has no descriptor left then, the counter is lost, and only the guest sees that. So a vCPU's descriptors are
//! promised when the vCPU is made, and a promise that the limit of open files cannot keep is refused then. The descriptors
//! are not opened: a VMM may take them for something else meanwhile.
//!
//! UNSAFETY: getrlimit and fcntl are C functions.
#![expect(unsafe_code, reason = "see UNSAFETY above")]

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use crate::error::PerfError;
use crate::kernel::OPEN;
use crate::options::Backing;

/// Descriptors that live promises name, of which some may be open.
static PROMISED: Mutex<u64> = Mutex::new(0);

/// Beside those of counters: an event that tries another, and the event of the process that never counts.
const SPARE: u64 = 2;
/// With a clock: the leader of the group, and the samples that show the guest's ring.
const OF_A_CLOCK: u64 = 2;

/// The promise that a vCPU's perf events find descriptors, until it is dropped.
#[derive(Debug)]
#[must_use]
pub struct Descriptors(u64);

impl Descriptors {
    /// Promises the descriptors of a vCPU's `counters`, each of which has samples besides where `sampling`.
    ///
    /// # Errors
    ///
    /// When the limit of open files has no room for those that are promised so far, and these.
    pub fn promise(counters: usize, backing: Backing, sampling: bool) -> Result<Self, PerfError> {
        let needed = Self::needed(counters, backing, sampling);
        let mut promised = PROMISED.lock().unwrap_or_else(PoisonError::into_inner);
        let all = *promised + needed;
        let unopened = all.saturating_sub(OPEN.load(Ordering::Relaxed)) + SPARE;
        let limit = limit();
        let free = free(limit, unopened);
        if free < unopened {
            return Err(PerfError::Descriptors {
                needed,
                promised: *promised,
                // The spare ones are nobody's to count with.
                free: free.saturating_sub(SPARE),
                limit,
            });
        }
        *promised = all;
        Ok(Self(needed))
    }

    fn needed(counters: usize, backing: Backing, sampling: bool) -> u64 {
        let each = if sampling { 2 } else { 1 };
        let shared = match backing {
            Backing::Clock => OF_A_CLOCK,
            Backing::Hardware => 0,
        };
        counters as u64 * each + shared
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        let mut promised = PROMISED.lock().unwrap_or_else(PoisonError::into_inner);
        *promised -= self.0;
    }
}

/// Returns the number that no descriptor of this process reaches.
fn limit() -> u64 {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the call writes `limit`.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => limit.rlim_cur,
        // A jail that forbids the question is no reason to refuse.
        _ => u64::MAX,
    }
}

/// Returns the number of descriptors below `limit` that are not open, or `wanted` where there are more.
fn free(limit: u64, wanted: u64) -> u64 {
    let numbers = 0..libc::c_int::try_from(limit).unwrap_or(libc::c_int::MAX);
    let is_free = |fd: &libc::c_int| {
        // SAFETY: F_GETFD takes no memory, and changes nothing.
        unsafe { libc::fcntl(*fd, libc::F_GETFD) < 0 }
    };
    // The room is at the end as a rule, so that the search is as long as the list of open files.
    numbers.filter(is_free).take(wanted as usize).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const CHILD: &str = "VPMU_DESCRIPTORS_CHILD";

    #[test]
    fn a_vcpu_needs_what_its_counters_open() {
        assert_eq!(Descriptors::needed(11, Backing::Hardware, false), 11);
        assert_eq!(Descriptors::needed(6, Backing::Clock, false), 8);
        assert_eq!(Descriptors::needed(11, Backing::Clock, true), 24);
    }

    /// In a process of its own, whose limit is near.
    #[test]
    fn promises_end_where_the_limit_does() {
        if std::env::var_os(CHILD).is_none() {
            let own = std::env::current_exe().unwrap();
            let name = "descriptors::tests::promises_end_where_the_limit_does";
            let child = Command::new(own)
                .args(["--exact", name, "--nocapture"])
                .env(CHILD, "1")
                .output()
                .unwrap();
            assert!(child.status.success(), "{child:?}");
            return;
        }
        let near = libc::rlimit {
            rlim_cur: 900,
            rlim_max: 900,
        };
        // SAFETY: the call reads `near`.
        let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const near) };
        assert_eq!(set, 0);
        let promise = || Descriptors::promise(11, Backing::Clock, false);
        let mut vcpus: Vec<Descriptors> = Vec::new();
        let refused = loop {
            match promise() {
                Ok(promise) => vcpus.push(promise),
                Err(error) => break error,
            }
        };
        // 13 each, and some are open: input, output, the test's own.
        assert!((60..=68).contains(&vcpus.len()), "{}", vcpus.len());
        let text = refused.to_string();
        for words in [
            "13 descriptors",
            "limit of 900",
            "RLIMIT_NOFILE",
            "ulimit -n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        // What is open already is not asked for twice.
        OPEN.fetch_add(13, Ordering::Relaxed);
        assert!(promise().is_ok());
        OPEN.fetch_sub(13, Ordering::Relaxed);
        assert!(promise().is_err());
        vcpus.pop();
        assert!(promise().is_ok(), "a vCPU that ends gives its promise back");
    }
}
