//! What this machine can count for guests, and what a process does once for all its hosts.

use std::hint;
use std::io;
use std::sync::OnceLock;

use vpmu::x86::ArchEvent;

use crate::choose::Chooser;
use crate::error::{PerfError, paranoia};
use crate::kernel::{Kernel, Linux, PerfEvent};
use crate::kind::probe;
use crate::notes;
use crate::options::{Backing, PerfOptions};
use crate::sampler::{SAMPLES, Sampler};

/// The events that this machine can count for guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// The backing that counts.
    pub backing: Backing,
    /// The architectural events that can be counted: bit [`ArchEvent::cpuid_bit`] for each.
    pub events: u32,
    /// The number of general counters that no other user of the host's PMU has pinned. With more of them, the kernel
    /// would let each count for a part of the time. `None`: a clock counts any number.
    pub counters: Option<u8>,
    /// Whether another VM has the PMU for itself at the moment (a mediated vPMU). Until it ends, counters are
    /// [`Lost::Busy`](vpmu::counter::Lost::Busy), and asked for again each time the vCPU is loaded.
    pub mediated: bool,
}

/// Finds out which events this machine can count for guests. Keeps no resources: each event is opened and closed again.
/// Any thread may call this. `tsc_hz`, the signal and the kick do not matter.
///
/// # Errors
///
/// Says why perf events are not available, and what to do.
pub fn support(options: &PerfOptions) -> Result<Support, PerfError> {
    // For a later refusal, on a thread that may open no files.
    let _ = paranoia();
    let chooser = Chooser::new(&Linux, options, true)?;
    let events = ArchEvent::ENUMERATED
        .into_iter()
        .filter(|&event| chooser.counts(event))
        .filter_map(ArchEvent::cpuid_bit)
        .fold(0, |bits, bit| bits | 1 << bit);
    Ok(Support {
        backing: chooser.backing,
        events,
        counters: chooser.free_counters(),
        mediated: chooser.is_mediated(),
    })
}

/// Finds out whether the kernel can sample guests ([`PerfOptions::sampling`]). Takes no resources, from any thread.
///
/// # Errors
///
/// Says why not, and what to do.
pub fn check_sampling(options: &PerfOptions) -> Result<(), PerfError> {
    let chooser = Chooser::new(&Linux, options, true)?;
    let sampler = Sampler::open(&Linux, probe(chooser.backing, true), 0, SAMPLES)?;
    sampler.tsc(0).map(drop).ok_or(PerfError::NoTsc)
}

/// The placeholder: an event that stays open and never counts. A kernel without any event of a thread has switched off
/// the part of perf that switches events with threads. Switching that part on takes the kernel a grace period of RCU:
/// milliseconds, in which a guest's first counter would keep its vCPU waiting.
static SPARE: OnceLock<Option<PerfEvent>> = OnceLock::new();

/// Does the work that a process does once for all its hosts, so that [`PerfHost::new`](crate::PerfHost::new) makes none of
/// these calls: call this before a thread goes into a jail.
///
/// - Installs the handlers of the signal and of SIGIO.
/// - Finds out which processor this is. On AMD's Zen to Zen 3, an event that no manual names is tried for a few ms.
/// - Opens an event that never counts and stays open. The kernel is then ready when a guest's first counter begins to
///   count. Without that event the first counter is late, and all else is well.
///
/// # Errors
///
/// When the signal is no real-time signal, or the system refuses a handler.
pub fn prepare(options: &PerfOptions) -> Result<(), PerfError> {
    let signal = options.overflow_signal();
    if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
        return Err(PerfError::Signal(signal));
    }
    Linux.processor();
    // A process may count without it, only later: a failure is no reason to refuse.
    SPARE.get_or_init(|| PerfEvent::open_spare(&Linux).ok());
    notes::install(signal)
}

/// Checks that the overflows' signal reaches the calling thread: its handler is still this crate's, and the signal is not
/// blocked. A blocked signal is unblocked.
///
/// # Errors
///
/// When the handler has been replaced since [`prepare`].
pub fn reach_thread(options: &PerfOptions) -> Result<(), PerfError> {
    notes::reach_thread(options.overflow_signal())
}

/// ns for which the calling thread works for itself in [`guests_only`].
const WORK: u64 = 3_000_000;

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
    count_guests_only(&Linux, work, guest).map_err(|error| PerfError::from_open(&error))
}

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
// `exclude_host` is taken by kernels on which nothing keeps it. A hypervisor below this one may drop the bit by which AMD's
// counters leave the host out (amd_pmu_refresh of KVM has bits 40 and 41 among those that it masks), and then a count
// has the hypervisor's time in it. A counter that is dead keeps the promise, and counts nothing. Only both halves together say
// something: a thread that works for itself counts nothing, and a guest counts.
fn count_guests_only(
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
}
