//! The two registers that stand for IA32_TSC_DEADLINE.
//!
//! They are MSRs of our own, because KVM answers IA32_TSC_DEADLINE before it asks the MSR filter.

use lazy_deadline::Slot;
use vpmu::x86::Outcome;

use super::timer::Timer;
use super::{Deadline, State};
use crate::memory::with_slot;

/// A write shares the slot at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const DEADLINE_SLOT_MSR: u32 = 0x4b56_4d56;
/// The deadline register.
pub const DEADLINE_MSR: u32 = 0x4b56_4d57;
/// In a write of [`DEADLINE_SLOT_MSR`]: share the slot at this address.
const SLOT_ENABLE: u64 = 1;

impl Deadline {
    /// Performs RDMSR of one of the two.
    pub(crate) fn rdmsr(&self, index: u32) -> Outcome {
        let state = &mut *self.state();
        match index {
            DEADLINE_SLOT_MSR => Outcome::Value(state.slot.map_or(0, |at| at | SLOT_ENABLE)),
            DEADLINE_MSR => {
                let (deadline, at) = (&mut state.deadline, state.slot);
                let value = with_slot(&*self.memory, at, |slot| deadline.read(slot));
                Outcome::Value(value)
            }
            _ => Outcome::NotHandled,
        }
    }

    /// Performs WRMSR of one of the two. [`before_run`](Self::before_run) then sets the timer.
    pub(crate) fn wrmsr(&self, index: u32, value: u64) -> Outcome {
        let state = &mut *self.state();
        match index {
            DEADLINE_SLOT_MSR if self.share(state, value) => Outcome::Done,
            DEADLINE_SLOT_MSR => Outcome::GeneralProtection,
            DEADLINE_MSR => {
                // The guest's write is an exit that KVM has not completed: its LVT and TSC are read before the next run.
                state.written = Some(value);
                Outcome::Done
            }
            _ => Outcome::NotHandled,
        }
    }

    /// Shares the slot that `value` names, or none.
    fn share(&self, state: &mut State, value: u64) -> bool {
        let deadline = &mut state.deadline;
        if value == 0 {
            let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
            // An unloaded module's memory gets another use, so nothing may be stored there from now on.
            let at = state.slot.take();
            with_slot(&*self.memory, at, |slot| deadline.detach(slot, timer));
            return true;
        }
        let at = value & !SLOT_ENABLE;
        if value & SLOT_ENABLE == 0 || !at.is_multiple_of(Slot::SIZE as u64) {
            return false;
        }
        let shared = with_slot(&*self.memory, Some(at), |slot| {
            slot.is_some_and(|slot| deadline.attach(slot).is_ok())
        });
        if shared {
            state.slot = Some(at);
        }
        shared
    }
}
