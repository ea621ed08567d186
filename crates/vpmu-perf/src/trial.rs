//! A trial of the promise that an event counts guests alone.
//!
//! `exclude_host` is taken by kernels on which nothing keeps it. A hypervisor below this one may drop the bit by which AMD's
//! counters leave the host out (amd_pmu_refresh of KVM has bits 40 and 41 among those that it masks), and then a count
//! has the hypervisor's time in it. A counter that is dead keeps the promise, and counts nothing. Only both halves together say
//! something: a thread that works for itself counts nothing, and a guest counts.

use std::hint;
use std::io;

use crate::choose::{Backing, probe};
use crate::error::PerfError;
use crate::kernel::{Kernel, Linux, PerfEvent};

/// ns for which the calling thread works for itself.
const WORK: u64 = 3_000_000;

/// Cycles that an event of guests has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestsOnly {
    /// While the thread worked for itself. Each is one too many.
    pub host: u64,
    /// While the thread ran a guest.
    pub guest: u64,
}

impl GuestsOnly {
    /// Returns whether the promise holds.
    pub const fn holds(&self) -> bool {
        self.host == 0 && self.guest > 0
    }
}

/// Counts guests by the processor's counters while the calling thread works for itself, for some ms, and while it calls
/// `guest`, which runs a guest. Takes no resources.
///
/// # Errors
///
/// Says why hardware events are not available.
pub fn guests_only(guest: impl FnOnce()) -> Result<GuestsOnly, PerfError> {
    let work = || {
        let end = Linux.now() + WORK;
        while Linux.now() < end {
            hint::spin_loop();
        }
    };
    measure(&Linux, work, guest).map_err(|error| PerfError::from_open(&error))
}

fn measure(
    kernel: &'static dyn Kernel,
    work: impl FnOnce(),
    guest: impl FnOnce(),
) -> io::Result<GuestsOnly> {
    let event = PerfEvent::open_here(kernel, probe(Backing::Hardware, true))?;
    if !event.enable() {
        return Err(io::Error::last_os_error());
    }
    work();
    let host = event.read()?.value;
    guest();
    let both = event.read()?.value;
    Ok(GuestsOnly {
        host,
        guest: both.wrapping_sub(host),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{Fake, Machine};

    fn found(machine: Machine) -> GuestsOnly {
        let kernel = Fake::new(machine);
        let run = || {
            kernel.run(1_000_000);
        };
        measure(kernel, || kernel.pass(1_000_000), run).unwrap()
    }

    #[test]
    fn a_host_that_keeps_the_promise_holds() {
        assert!(found(Machine::default()).holds());
    }

    #[test]
    fn a_hypervisors_time_in_the_count_is_seen() {
        let found = found(Machine {
            counts_host: true,
            ..Machine::default()
        });
        assert!(found.host > 0 && found.guest > 0 && !found.holds());
    }

    #[test]
    fn a_dead_counter_passes_for_none() {
        // Somebody else has the only counter.
        let found = found(Machine {
            counters: 1,
            pinned: 1,
            ..Machine::default()
        });
        assert_eq!(found, GuestsOnly { host: 0, guest: 0 });
        assert!(!found.holds());
    }
}
