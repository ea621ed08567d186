//! Trials of what perf events promise: something must count, and something must not.
//!
//! An event that no manual names may count nothing, or something else.
//!
//! `exclude_host` is taken by kernels on which nothing keeps it. A hypervisor below this one may drop the bit by which AMD's
//! counters leave the host out (amd_pmu_refresh of KVM has bits 40 and 41 among those that it masks), and then a count
//! has the hypervisor's time in it. A counter that is dead keeps the promise, and counts nothing. Only both halves together say
//! something: a thread that works for itself counts nothing, and a guest counts.

use std::io;

use perf_event_open_sys::bindings::PERF_TYPE_RAW;

use crate::event::PerfEvent;
use crate::kernel::Kernel;
use crate::kind::{Kind, Rings, probe};
use crate::options::Backing;
use crate::processor::P0_CYCLES;

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

/// Returns the cycles that an event of guests counts while the calling thread does `work`, and while it runs a `guest`.
pub(crate) fn count_guests_only(
    kernel: &'static dyn Kernel,
    work: impl FnOnce(),
    guest: impl FnOnce(),
) -> io::Result<GuestsOnly> {
    let event = PerfEvent::open_here(kernel, probe(Backing::Hardware, true))?;
    if !event.enable() {
        return Err(io::Error::last_os_error());
    }
    work();
    // One event for both halves: a second might get a counter that the first half has not tried.
    let host = event.read()?.value;
    guest();
    let both = event.read()?.value;
    Ok(GuestsOnly {
        host,
        guest: both.wrapping_sub(host),
    })
}

/// Returns whether [`P0_CYCLES`] counts while the calling thread does `work`.
pub(crate) fn p0_cycles_count(kernel: &'static dyn Kernel, work: impl FnOnce()) -> bool {
    let kind = Kind {
        type_: PERF_TYPE_RAW,
        config: P0_CYCLES,
        // User space alone, which every user may count.
        rings: Some(Rings {
            user: true,
            kernel: false,
            guest: false,
        }),
    };
    let Ok(event) = PerfEvent::open_for_host(kernel, kind) else {
        return false;
    };
    if !event.enable() {
        return false;
    }
    work();
    event.read().is_ok_and(|total| total.value > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake::{Fake, Machine};

    fn found(machine: Machine) -> GuestsOnly {
        let kernel = Fake::new(machine);
        let run = || {
            kernel.run(1_000_000);
        };
        count_guests_only(kernel, || kernel.pass(1_000_000), run).unwrap()
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

    #[test]
    fn an_event_that_no_manual_names_has_to_count() {
        for (machine, counts) in [
            (Machine::default(), true),
            (
                Machine {
                    dead: Some(P0_CYCLES),
                    ..Machine::default()
                },
                false,
            ),
            // Without a counter the trial proves nothing.
            (
                Machine {
                    counters: 1,
                    pinned: 1,
                    ..Machine::default()
                },
                false,
            ),
        ] {
            let kernel = Fake::new(machine);
            let found = p0_cycles_count(kernel, || kernel.pass(1_000_000));
            assert_eq!(found, counts, "{machine:?}");
        }
    }
}
