//! How a host counts, and what this machine can count.

use vpmu::x86::ArchEvent;

use crate::choose::{Backing, Chooser, Vendor};
use crate::error::PerfError;
use crate::kick::Kick;
use crate::notes;

/// How to count.
#[derive(Clone, Debug, Default)]
pub struct PerfOptions {
    /// The guest's TSC frequency, Hz: what a clock's cycles are.
    pub tsc_hz: u64,
    /// `None`: hardware if it is there, else a clock.
    pub backing: Option<Backing>,
    /// With a clock: instructions and branches too, one for each cycle. Their distribution is that
    /// of time, their number means nothing.
    pub approximate_instructions: bool,
    /// The real-time signal that reports overflows to the thread. `None`: SIGRTMIN+1.
    pub signal: Option<i32>,
    /// What else the signal does.
    pub kick: Kick,
    /// A period goes on after its report, until another is set: [`CounterHost::repeats`](vpmu::counter::CounterHost::repeats).
    pub repeating: bool,
}

/// What this machine can count for guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// What counts.
    pub backing: Backing,
    /// The architectural events that can be counted: bit [`ArchEvent::cpuid_bit`] for each.
    pub events: u32,
}

/// Finds out what this machine can count for guests. Takes nothing, from any thread: each event is opened
/// and closed again. `tsc_hz`, the signal and the kick do not matter.
///
/// # Errors
///
/// Says why perf events cannot be had, and what to do.
pub fn support(options: &PerfOptions) -> Result<Support, PerfError> {
    let chooser = Chooser::new(options.backing, true, options.approximate_instructions)?;
    let events = ArchEvent::ENUMERATED
        .into_iter()
        .filter(|&event| chooser.counts(event))
        .filter_map(ArchEvent::cpuid_bit)
        .fold(0, |bits, bit| bits | 1 << bit);
    Ok(Support {
        backing: chooser.backing,
        events,
    })
}

/// Does what a process does once for all its hosts: installs the handlers of the signal and of SIGIO, and
/// looks at /proc/cpuinfo. Whoever puts a thread into a jail calls this before; [`PerfHost::new`](crate::PerfHost::new) then makes
/// neither call.
///
/// # Errors
///
/// When the signal is no real-time signal, or the system refuses a handler.
pub fn prepare(options: &PerfOptions) -> Result<(), PerfError> {
    let signal = signal(options);
    if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
        return Err(PerfError::Signal(signal));
    }
    Vendor::of_host();
    notes::install(signal).map_err(|error| PerfError::Open(error.raw_os_error().unwrap_or(0)))
}

pub(crate) fn signal(options: &PerfOptions) -> i32 {
    options.signal.unwrap_or_else(notes::default_signal)
}
