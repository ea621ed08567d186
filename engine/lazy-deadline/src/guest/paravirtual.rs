//! The guest's half of the protocol with a host that reads `pending` itself.

use super::{GuestCpu, GuestStatistics, Request};
use crate::count;
use crate::slot::{Slot, SlotRef};
use crate::sync::{Fence, Ordering, full_fence, store_contended};

/// One CPU's half of the *paravirtual* mode.
///
/// The value holds no deadline: the slot does. A CPU uses it in this order:
///
/// 1. [`prepare`](Self::prepare), then tell the host where the slot is (one exit).
/// 2. [`set`](Self::set) and [`cancel`](Self::cancel), with interrupts off.
/// 3. Before the CPU goes offline or to sleep, before kexec and before another driver takes the
///    timer: `set` to 0, tell the host to let go of the slot (one exit; after it the host no
///    longer touches that memory), [`retire`](Self::retire).
///
/// A timer interrupt always runs the driver's handler: the host has checked that it is due. As on a processor, an
/// interrupt that was on its way while the deadline was moved may still arrive (Intel SDM, "TSC-Deadline Mode", on
/// spurious interrupts).
#[derive(Clone, Debug, Default)]
pub struct ParavirtualTimer {
    statistics: GuestStatistics,
}

impl ParavirtualTimer {
    /// Makes a half that has done nothing yet.
    pub const fn new() -> Self {
        Self {
            statistics: GuestStatistics::ZERO,
        }
    }

    /// Makes a slot out of memory that the host does not use yet.
    pub fn prepare(&mut self, slot: SlotRef<'_>) {
        slot.armed.store(0, Ordering::Relaxed);
        slot.pending.store(0, Ordering::Relaxed);
        slot.tag.store(Slot::TAG, Ordering::Relaxed);
    }

    /// Makes plain memory out of a slot that the host has let go of.
    pub fn retire(&mut self, slot: SlotRef<'_>) {
        slot.tag.store(0, Ordering::Relaxed);
        slot.pending.store(0, Ordering::Relaxed);
    }

    /// Asks for an interrupt when the TSC reaches `deadline`, in place of an earlier wish, as a write of
    /// IA32_TSC_DEADLINE would. 0 disarms, always with an exit: when the call returns, no interrupt is on its way
    /// except those that the local APIC has already accepted.
    pub fn set(&mut self, deadline: u64, slot: SlotRef<'_>, cpu: &mut impl GuestCpu) -> Request {
        count(&mut self.statistics.asked);
        store_contended(slot.pending, deadline);
        // The host clears `armed` and then reads `pending`. With a full barrier on both sides
        // either it sees this deadline or we see its zero.
        full_fence(Fence::Guest);
        let armed = slot.armed.load(Ordering::Relaxed);
        if deadline != 0 && armed != 0 && armed <= deadline {
            count(&mut self.statistics.avoided);
            return Request::Avoided;
        }
        cpu.write_deadline(deadline);
        count(&mut self.statistics.written);
        Request::Written
    }

    /// Takes back the last [`set`](Self::set), without an exit. The host finds out when the armed
    /// time comes; if that is just now, the interrupt may still be injected after this returns.
    pub fn cancel(&mut self, slot: SlotRef<'_>) {
        count(&mut self.statistics.asked);
        count(&mut self.statistics.avoided);
        store_contended(slot.pending, 0);
    }

    /// Returns what this half did.
    pub fn statistics(&self) -> GuestStatistics {
        self.statistics
    }
}
