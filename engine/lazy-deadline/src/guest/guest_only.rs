//! The guest's half that needs no host's half: it works on any hypervisor.

use super::{GuestCpu, GuestStatistics, Request};
use crate::count;

/// One CPU's timer in the *guest-only* mode: nothing is shared, and the host does not know.
///
/// The driver notes the deadline that IA32_TSC_DEADLINE is armed for. A later deadline is only noted. When the
/// interrupt comes too early, the driver arms the timer for the noted deadline instead of running its handler. An early
/// interrupt costs more than a write (it wakes a halted CPU), so the mode pays where deadlines are moved often between
/// two early interrupts.
///
/// All calls are made on the CPU that the timer belongs to, with interrupts off. Nothing here is shared with another
/// CPU or with the host, so no barrier is needed.
#[derive(Clone, Debug, Default)]
pub struct GuestOnlyTimer {
    /// What IA32_TSC_DEADLINE was last written with; 0: it is disarmed, or nobody knows.
    armed: u64,
    /// The deadline in force; 0: none. Never before `armed`, if both are there.
    wanted: u64,
    statistics: GuestStatistics,
}

/// What the driver does about a timer interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a handler that is not run is a lost deadline"]
pub enum Interrupt {
    /// The deadline has passed: run the handler.
    Run,
    /// Too early: return. The timer is armed for the deadline in force.
    Early,
    /// No deadline is in force: return.
    Stray,
}

impl GuestOnlyTimer {
    /// Makes a disarmed timer.
    pub const fn new() -> Self {
        Self::adopt(0)
    }

    /// Takes over a timer that another driver has armed: `deadline` is what RDMSR of
    /// IA32_TSC_DEADLINE returns, with interrupts off. If it returns 0, that driver's interrupt may
    /// be on its way: ask for its deadline again with [`set`](Self::set).
    pub const fn adopt(deadline: u64) -> Self {
        Self {
            armed: deadline,
            wanted: deadline,
            statistics: GuestStatistics::ZERO,
        }
    }

    /// Asks for the handler to run when the TSC reaches `deadline`, in place of an earlier wish.
    /// 0 disarms, always with an exit.
    pub fn set(&mut self, deadline: u64, cpu: &mut impl GuestCpu) -> Request {
        count(&mut self.statistics.asked);
        self.wanted = deadline;
        // A deadline that has passed is not trusted to bring an interrupt: it may have come and
        // gone while the LVT was masked or the CPU asleep. If it is on its way, this write is one
        // too many and nothing else.
        if deadline != 0 && self.armed <= deadline && cpu.tsc() < self.armed {
            count(&mut self.statistics.avoided);
            return Request::Avoided;
        }
        self.armed = deadline;
        cpu.write_deadline(deadline);
        count(&mut self.statistics.written);
        Request::Written
    }

    /// Cancels the deadline in force, without an exit. The interrupt of an armed timer will be [`Interrupt::Stray`].
    pub fn cancel(&mut self) {
        count(&mut self.statistics.asked);
        count(&mut self.statistics.avoided);
        self.wanted = 0;
    }

    /// Handles a timer interrupt. Returns what the driver does about it.
    pub fn interrupt(&mut self, cpu: &mut impl GuestCpu) -> Interrupt {
        let now = cpu.tsc();
        // Spent, even if its time is still to come: hypervisors keep time with another clock and
        // may be early. If it is not, because this interrupt was on its way when the timer was last
        // written, the second one finds nothing to do.
        self.armed = 0;
        if self.wanted == 0 {
            count(&mut self.statistics.stray);
            return Interrupt::Stray;
        }
        if self.wanted <= now {
            self.wanted = 0;
            return Interrupt::Run;
        }
        count(&mut self.statistics.early);
        self.armed = self.wanted;
        cpu.write_deadline(self.wanted);
        count(&mut self.statistics.rearmed);
        Interrupt::Early
    }

    /// Forgets the timer's state, which other code may have written, or which may be lost: after another timer mode, a
    /// masked LVT, an offline CPU, or sleep (where the TSC may start anew). No deadline is in force until the next
    /// [`set`](Self::set), which writes.
    pub fn forget(&mut self) {
        self.armed = 0;
        self.wanted = 0;
    }

    /// Returns the deadline in force; 0: none. RDMSR of IA32_TSC_DEADLINE would return the same if every deadline had
    /// been written there.
    pub fn deadline(&self) -> u64 {
        self.wanted
    }

    /// Returns what this timer did.
    pub fn statistics(&self) -> GuestStatistics {
        self.statistics
    }
}
