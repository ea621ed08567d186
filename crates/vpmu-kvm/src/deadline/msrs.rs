//! The two registers that stand for IA32_TSC_DEADLINE.
//!
//! They are MSRs of our own, because KVM answers IA32_TSC_DEADLINE before it looks at the MSR filter.

use lazy_deadline::Slot;

use super::timer::Timer;
use super::{SlotMemory, State, VcpuDeadline};
use crate::Gp;

/// A write shares the slot at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const DEADLINE_SLOT_MSR: u32 = 0x4b56_4d56;
/// The deadline register.
pub const DEADLINE_MSR: u32 = 0x4b56_4d57;
/// In a write of [`DEADLINE_SLOT_MSR`]: share the slot at this address.
const SLOT_ENABLE: u64 = 1;

impl<M: SlotMemory> VcpuDeadline<M> {
    /// Performs RDMSR of one of the two. `None`: another MSR.
    pub fn rdmsr(&self, index: u32) -> Option<u64> {
        let state = &mut *self.state();
        match index {
            DEADLINE_SLOT_MSR => Some(state.slot.map_or(0, |at| at | SLOT_ENABLE)),
            DEADLINE_MSR => {
                let (deadline, at) = (&mut state.deadline, state.slot);
                Some(self.memory.with_slot(at, |slot| deadline.read(slot)))
            }
            _ => None,
        }
    }

    /// Performs WRMSR of one of the two. `None`: another MSR. [`before_run`](Self::before_run) then
    /// sets the timer.
    pub fn wrmsr(&self, index: u32, value: u64) -> Option<Result<(), Gp>> {
        let state = &mut *self.state();
        match index {
            DEADLINE_SLOT_MSR => Some(self.share(state, value).then_some(()).ok_or(Gp)),
            DEADLINE_MSR => {
                state.written = Some(value);
                Some(Ok(()))
            }
            _ => None,
        }
    }

    /// Shares the slot that `value` names, or none.
    fn share(&self, state: &mut State, value: u64) -> bool {
        let deadline = &mut state.deadline;
        if value == 0 {
            let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
            let at = state.slot.take();
            self.memory
                .with_slot(at, |slot| deadline.detach(slot, timer));
            return true;
        }
        let at = value & !SLOT_ENABLE;
        if value & SLOT_ENABLE == 0 || !at.is_multiple_of(Slot::SIZE as u64) {
            return false;
        }
        let shared = self.memory.with_slot(Some(at), |slot| {
            slot.is_some_and(|slot| deadline.attach(slot).is_ok())
        });
        if shared {
            state.slot = Some(at);
        }
        shared
    }
}
