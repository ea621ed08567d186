//! The two registers that stand for IA32_TSC_DEADLINE.
//!
//! They are MSRs of our own, because KVM answers IA32_TSC_DEADLINE before it looks at the MSR filter.

use kvm_ioctls::{ReadMsrExit, WriteMsrExit};
use lazy_deadline::Slot;
use vm_memory::GuestMemoryBackend;

use super::timer::Timer;
use super::{State, VcpuDeadline, with_slot};

/// A write shares the slot at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const DEADLINE_SLOT_MSR: u32 = 0x4b56_4d56;
/// The deadline register.
pub const DEADLINE_MSR: u32 = 0x4b56_4d57;
/// In a write of [`DEADLINE_SLOT_MSR`]: share the slot at this address.
const SLOT_ENABLE: u64 = 1;

impl<M: GuestMemoryBackend> VcpuDeadline<M> {
    /// Completes an RDMSR of one of the two. `false`: another MSR.
    pub fn rdmsr(&self, exit: &mut ReadMsrExit<'_>) -> bool {
        let state = &mut *self.state();
        *exit.data = match exit.index {
            DEADLINE_SLOT_MSR => state.slot.map_or(0, |at| at | SLOT_ENABLE),
            DEADLINE_MSR => {
                let (deadline, at) = (&mut state.deadline, state.slot);
                with_slot(&self.memory, at, |slot| deadline.read(slot))
            }
            _ => return false,
        };
        *exit.error = 0;
        true
    }

    /// Completes a WRMSR of one of the two. `false`: another MSR. What it asks of the timer is done
    /// by [`before_run`](Self::before_run).
    pub fn wrmsr(&self, exit: &mut WriteMsrExit<'_>) -> bool {
        let state = &mut *self.state();
        let fine = match exit.index {
            DEADLINE_SLOT_MSR => self.share(state, exit.data),
            DEADLINE_MSR => {
                state.written = Some(exit.data);
                true
            }
            _ => return false,
        };
        *exit.error = u8::from(!fine);
        true
    }

    /// The guest shares the slot that `value` names, or none.
    fn share(&self, state: &mut State, value: u64) -> bool {
        let deadline = &mut state.deadline;
        if value == 0 {
            let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
            let at = state.slot.take();
            with_slot(&self.memory, at, |slot| deadline.detach(slot, timer));
            return true;
        }
        let at = value & !SLOT_ENABLE;
        if value & SLOT_ENABLE == 0 || !at.is_multiple_of(Slot::SIZE as u64) {
            return false;
        }
        let shared = with_slot(&self.memory, Some(at), |slot| {
            slot.is_some_and(|slot| deadline.attach(slot).is_ok())
        });
        if shared {
            state.slot = Some(at);
        }
        shared
    }
}
