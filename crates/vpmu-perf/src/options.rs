//! The settings of a host, and the events that this machine can count.

use std::sync::OnceLock;

use vpmu::x86::ArchEvent;

use crate::choose::{Backing, Chooser, probe};
use crate::error::PerfError;
use crate::kernel::{Kernel, Linux, PerfEvent};
use crate::kick::Kick;
use crate::notes;
use crate::sampler::Sampler;
use crate::samplers;

/// The time that a clock counts for a guest. Hardware counters count the guest alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Freeze {
    /// The guest's time, and the host's time for the guest: an operation that exits takes the time that the guest sees
    /// pass.
    #[default]
    Vm,
    /// The guest's time alone: its counters stand still while the host completes an exit. Samples of the thread, some
    /// 10,000 a second while something counts, tell the guest's part of the clock's time.
    Guest,
}

/// The settings of a host.
#[derive(Clone, Debug, Default)]
pub struct PerfOptions {
    /// The guest's TSC frequency, Hz: the rate of a clock's cycles.
    pub tsc_hz: u64,
    /// `None`: hardware if it is there, else a clock.
    pub backing: Option<Backing>,
    /// With a clock: instructions and branches too, one for each cycle. Their distribution is that
    /// of time, their number means nothing.
    pub approximate_instructions: bool,
    /// The real-time signal that reports overflows to the thread. `None`: SIGRTMIN+1.
    pub signal: Option<i32>,
    /// The signal's further effect.
    pub kick: Kick,
    /// Whether a period goes on after its report, until another is set:
    /// [`CounterHost::repeats`](vpmu::counter::CounterHost::repeats).
    pub repeating: bool,
    /// Whether the kernel samples the guest where that is asked for:
    /// [`CounterHost::sample`](vpmu::counter::CounterHost::sample).
    pub sampling: bool,
    /// The time that a clock counts.
    pub freeze: Freeze,
}

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
    let chooser = Chooser::new(
        &Linux,
        options.backing,
        true,
        options.approximate_instructions,
    )?;
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
    let chooser = Chooser::new(
        &Linux,
        options.backing,
        true,
        options.approximate_instructions,
    )?;
    Sampler::try_open(&Linux, probe(chooser.backing, true), samplers::SAMPLES)
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
    let signal = signal(options);
    if !(libc::SIGRTMIN()..=libc::SIGRTMAX()).contains(&signal) {
        return Err(PerfError::Signal(signal));
    }
    Linux.processor();
    SPARE.get_or_init(|| PerfEvent::open_spare(&Linux).ok());
    notes::install(signal)
}

pub(crate) fn signal(options: &PerfOptions) -> i32 {
    options.overflow_signal()
}

impl PerfOptions {
    /// Returns the real-time signal by which overflows are reported.
    pub fn overflow_signal(&self) -> i32 {
        self.signal.unwrap_or_else(notes::default_signal)
    }
}
