//! One vCPU's lazy TSC deadline, paravirtual mode, on KVM. The protocol is [`lazy_deadline`]'s.
//!
//! The timer is a timerfd of the VMM's. KVM's own timer would wake the guest, and whether to wake it
//! is what an expiry has to find out.
//!
//! KVM keeps the local APIC to itself, and reports its registers only between two runs of the vCPU. So the LVT timer
//! register and the vCPU's TSC offset are read at each write of the deadline register, which is an exit anyway, and
//! hold until the next write. This makes a rule for guests: a change of the LVT or the TSC is followed by a write of
//! the deadline. Without this write, a guest that masks the LVT gets the interrupt once more; a guest that unmasks it
//! gets none; a guest that sets its TSC gets the interrupt at the moment that the old TSC gives.
//!
//! The TSC may change unseen, too: a host that has slept gives its guests an older one. The timer
//! then expires far from its deadline by the offset known here. The guest is interrupted at once,
//! and its next write brings the new offset.

mod clock;
mod timer;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lazy_deadline::{DeadlineTimer, HostStatistics, LvtTimer, Slot, TimerMode, Verdict};
use vpmu::x86::Outcome;

use crate::error::Error;
use crate::lapic::{self, Lapic};
use crate::memory::{GuestMemory, with_slot};
use crate::run::Kvm;
use crate::sys;
pub(crate) use clock::tsc_offset;
use clock::{Clock, host_khz};
use timer::{Alarm, Expiry, Timer, TimerFd};

// The two registers that stand for IA32_TSC_DEADLINE are MSRs of our own, because KVM answers IA32_TSC_DEADLINE before it asks
// the MSR filter.

/// A write shares the slot at this guest physical address, with bit 0 set; 0 ends the sharing.
pub const DEADLINE_SLOT_MSR: u32 = 0x4b56_4d56;
/// The deadline register.
pub const DEADLINE_MSR: u32 = 0x4b56_4d57;
/// In a write of [`DEADLINE_SLOT_MSR`]: share the slot at this address.
const SLOT_ENABLE: u64 = 1;

/// A move of the timer costs the host some microseconds. No guest makes the host move it more often.
const FLOOR_NS: u64 = 20_000;

/// One vCPU's lazy deadline, as another thread sees it: a thread of the VMM's that waits for [`as_fd`](AsFd::as_fd) to
/// become readable, or in [`wait`](Self::wait), and then calls [`expire`](Self::expire).
#[derive(Debug)]
pub struct Deadline {
    vm: Arc<OwnedFd>,
    vcpu: Arc<OwnedFd>,
    memory: Arc<dyn GuestMemory>,
    timer: TimerFd,
    state: Mutex<State>,
}

/// The state that must go with the guest, and with its memory, for no deadline to be lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeadlineState {
    deadline: lazy_deadline::DeadlineState,
    slot: Option<u64>,
    written: Option<u64>,
    apic_id: u32,
    vector: u8,
}

#[derive(Debug)]
struct State {
    deadline: DeadlineTimer,
    clock: Clock,
    alarm: Alarm,
    /// The slot's address in the guest's memory.
    slot: Option<u64>,
    /// A write of the deadline register that has not been acted upon.
    written: Option<u64>,
    apic_id: u32,
    vector: u8,
    /// Whether the TSC's rate is to be looked at before the next write.
    unsure_of_rate: bool,
}

impl Deadline {
    /// Makes a deadline that is not armed, with no slot. The vCPU's TSC must run as fast as the
    /// host's.
    ///
    /// # Errors
    ///
    /// When the host has no timer to give, or does not report its TSC's rate.
    pub(crate) fn new(kvm: &Kvm) -> Result<Self, Error> {
        let khz = host_khz(&kvm.vm, &kvm.vcpu)?;
        let timer =
            TimerFd::new().map_err(|error| Error::Timer(error.raw_os_error().unwrap_or(0)))?;
        let clock = Clock { khz, offset: 0 };
        Ok(Self {
            vm: Arc::clone(&kvm.vm),
            vcpu: Arc::clone(&kvm.vcpu),
            memory: Arc::clone(&kvm.memory),
            timer,
            state: Mutex::new(State {
                deadline: DeadlineTimer::new().with_floor(clock.ticks(FLOOR_NS)),
                clock,
                alarm: Alarm::default(),
                slot: None,
                written: None,
                apic_id: 0,
                vector: 0,
                unsure_of_rate: true,
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of each event.
    pub fn statistics(&self) -> HostStatistics {
        self.state().deadline.statistics()
    }

    /// Resets the deadline, as its vCPU is reset: nothing is armed and no slot shared. The statistics stay.
    pub(crate) fn reset(&self) {
        let state = &mut *self.state();
        let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
        state.deadline.reset(timer);
        (state.slot, state.written) = (None, None);
    }

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

    /// Performs the guest's writes. Called on the vCPU's thread before it runs.
    ///
    /// # Errors
    ///
    /// When KVM refuses. At the first write, when the vCPU's TSC has been given another rate than the host's.
    pub(crate) fn before_run(&self) -> Result<(), Error> {
        let state = &mut *self.state();
        // Most runs have no write before them, and ask KVM nothing.
        let Some(value) = state.written else {
            return Ok(());
        };
        if state.unsure_of_rate {
            // The VMM may have set it since the vCPU was made.
            self.check_rate(state.clock)?;
            state.unsure_of_rate = false;
        }
        let lapic = Lapic::of(&self.vcpu)?;
        state.apic_id = lapic.id();
        state.vector = lapic.lvt_timer() as u8;
        if value != 0 {
            // A write of 0 disarms, for which the time does not matter.
            state.clock.offset = tsc_offset(&self.vcpu)?;
        }
        // Behind all that can fail, so that the write is not lost to a VMM that mends the cause.
        state.written = None;
        let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
        let (deadline, at) = (&mut state.deadline, state.slot);
        let verdict = with_slot(&*self.memory, at, |slot| {
            // The LVT's mode is IA32_TSC_DEADLINE's business: these registers work in each, so
            // that a guest may have both timers.
            let lvt = LvtTimer {
                mode: TimerMode::TscDeadline,
                masked: LvtTimer::decode(lapic.lvt_timer()).masked,
            };
            deadline.set_lvt(lvt, slot, timer);
            deadline.write(value, slot, timer)
        });
        state.inject(verdict, &self.vm)
    }

    /// Handles an expiry, when the timer's descriptor has become readable.
    ///
    /// # Errors
    ///
    /// When KVM refuses.
    pub fn expire(&self) -> Result<(), Error> {
        let state = &mut *self.state();
        let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
        // The timer was set early: the rest is waited for here, as KVM does for its own.
        let expiry = timer.wait();
        let (deadline, at) = (&mut state.deadline, state.slot);
        let verdict = with_slot(&*self.memory, at, |slot| match expiry {
            Expiry::Expected => deadline.expire(slot, timer),
            Expiry::UnknownTsc => deadline.expire_unknown_tsc(slot),
        });
        state.inject(verdict, &self.vm)
    }

    /// Returns the state to save, while the vCPU does not run. Nothing may expire here any more, unless the guest goes
    /// on here.
    pub(crate) fn save(&self) -> DeadlineState {
        let state = &mut *self.state();
        let (deadline, at) = (&mut state.deadline, state.slot);
        DeadlineState {
            deadline: with_slot(&*self.memory, at, |slot| deadline.save(slot)),
            slot: state.slot,
            written: state.written,
            apic_id: state.apic_id,
            vector: state.vector,
        }
    }

    /// Continues from `saved`, before the vCPU runs, and after its TSC, its local APIC and its
    /// memory have been restored.
    ///
    /// # Errors
    ///
    /// When the slot is not in the guest's memory, the vCPU's TSC has another rate than the host's, or
    /// KVM refuses.
    pub(crate) fn restore(&self, saved: &DeadlineState) -> Result<(), Error> {
        let state = &mut *self.state();
        self.check_rate(state.clock)?;
        state.clock.offset = tsc_offset(&self.vcpu)?;
        let timer = &mut Timer::new(&self.timer, state.clock, &mut state.alarm);
        let deadline = &mut state.deadline;
        let verdict = with_slot(&*self.memory, saved.slot, |slot| {
            deadline.restore(&saved.deadline, slot, timer)
        })
        .map_err(Error::Deadline)?;
        // Behind all that can fail.
        state.slot = saved.slot;
        state.written = saved.written;
        state.apic_id = saved.apic_id;
        state.vector = saved.vector;
        state.inject(verdict, &self.vm)
    }

    /// Checks that the guest's TSC is as fast as the host's.
    fn check_rate(&self, clock: Clock) -> Result<(), Error> {
        let (guest, host) = (sys::tsc_khz(&self.vcpu)?, clock.khz);
        // The timer counts the host's nanoseconds, and nothing here converts two rates.
        match guest == host {
            true => Ok(()),
            false => Err(Error::ScaledTsc { guest, host }),
        }
    }

    /// Waits for the next expiry.
    ///
    /// # Errors
    ///
    /// When the descriptor cannot be read.
    pub fn wait(&self) -> io::Result<()> {
        self.timer.wait()
    }

    /// Ends another thread's [`wait`](Self::wait) now. The next call is [`expire`](Self::expire), which sets the timer again.
    pub fn wake(&self) {
        self.state().alarm.wake(&self.timer);
    }
}

impl AsFd for Deadline {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl State {
    fn inject(&self, verdict: Verdict, vm: &impl AsRawFd) -> Result<(), Error> {
        match verdict {
            Verdict::Quiet => Ok(()),
            // The vectors below 16 are reserved: an APIC does not deliver them.
            Verdict::Inject(_) if self.vector < 16 => Ok(()),
            Verdict::Inject(_) => lapic::signal(vm, self.apic_id, self.vector),
        }
    }
}

/// The checks of a forged state that need no vCPU, for fuzz targets.
#[cfg(fuzzing)]
#[doc(hidden)]
impl DeadlineState {
    pub fn new(slot: Option<u64>) -> Self {
        Self {
            deadline: DeadlineTimer::new().save(None),
            slot,
            written: None,
            apic_id: 0,
            vector: 0xec,
        }
    }

    /// Continues from the state with `host`'s timer, until the timer has expired.
    pub fn try_restore(&self, memory: &dyn GuestMemory, host: &mut impl lazy_deadline::HostTimer) {
        with_slot(memory, self.slot, |slot| {
            let mut deadline = DeadlineTimer::new();
            if deadline.restore(&self.deadline, slot, host).is_ok() {
                let _ = deadline.expire(slot, host);
                let layout = lazy_deadline::DeadlineState::LAYOUT;
                assert_eq!(deadline.save(slot).layout, layout);
            }
        });
    }
}
