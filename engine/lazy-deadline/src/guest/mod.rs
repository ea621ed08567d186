//! The guest's halves: what a clock event driver does in place of a write to IA32_TSC_DEADLINE.
//!
//! Each CPU has its own half, used on that CPU with interrupts off. The halves are written so that a driver in another
//! language can be transcribed from them line by line: `docs/how/lazy-deadline.md` has the same steps in C.

mod break_even;
mod guest_only;
mod paravirtual;

pub use break_even::{BreakEven, BreakEvenStatistics, Way};
pub use guest_only::{GuestOnlyTimer, Interrupt};
pub use paravirtual::ParavirtualTimer;

/// The CPU that a guest's half runs on.
pub trait GuestCpu {
    /// Executes RDTSC.
    fn tsc(&mut self) -> u64;

    /// Writes the register that arms the timer: IA32_TSC_DEADLINE, or the register that the host offers in its place.
    /// This WRMSR is the exit that the guest's half avoids.
    ///
    /// Before a write of IA32_TSC_DEADLINE, the implementation executes what the local APIC's mode asks for (an MFENCE
    /// in xAPIC mode).
    fn write_deadline(&mut self, deadline: u64);
}

/// What became of a deadline that the guest asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// The timer is armed early enough: no exit.
    Avoided,
    /// The MSR was written: one exit.
    Written,
}

/// What a guest's half did, since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestStatistics {
    /// Deadlines asked for, cancellations included.
    pub asked: u64,
    /// How many of these needed no exit.
    pub avoided: u64,
    /// How many wrote the MSR.
    pub written: u64,
    /// Timer interrupts that came before the deadline in force (guest-only).
    pub early: u64,
    /// How many of these wrote the MSR, to arm the timer again (guest-only).
    pub rearmed: u64,
    /// Timer interrupts while no deadline was in force (guest-only).
    pub stray: u64,
}

impl GuestStatistics {
    const ZERO: Self = Self {
        asked: 0,
        avoided: 0,
        written: 0,
        early: 0,
        rearmed: 0,
        stray: 0,
    };

    /// Returns the number of exits for writes of the MSR.
    pub fn exits(&self) -> u64 {
        self.written.wrapping_add(self.rearmed)
    }
}
