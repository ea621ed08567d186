//! The settings of a host.

use crate::kick::Kick;

/// The backing that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// The processor's counters.
    Hardware,
    /// The thread's time on the CPU.
    Clock,
}

impl Backing {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::Hardware, Self::Clock];

    /// Returns the name that options and statistics have for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Clock => "clock",
        }
    }
}

/// The time that a clock counts for a guest. Hardware counters count the guest alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Freeze {
    /// The guest's time, and the host's time for the guest: an operation that exits takes the time that the guest sees
    /// pass.
    #[default]
    Vm,
    /// The guest's time alone: its counters stand still while the host completes an exit. Samples of the thread, some
    /// 10,000 a second while something counts, show the guest's portion of the clock's time.
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
    /// [`Host::begin_sampling`](vpmu::x86::pebs::Host::begin_sampling).
    pub sampling: bool,
    /// The time that a clock counts.
    pub freeze: Freeze,
}

impl PerfOptions {
    /// Returns the real-time signal by which overflows are reported.
    pub fn overflow_signal(&self) -> i32 {
        // Not the first of the real-time signals, by which VMMs take a vCPU out of the guest.
        self.signal.unwrap_or_else(|| libc::SIGRTMIN() + 1)
    }
}
