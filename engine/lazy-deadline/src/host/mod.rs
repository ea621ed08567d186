//! The host's half: a timer for each vCPU that reads the slot before it fires.

mod budget;
mod lvt;
mod state;
mod stats;

use crate::count;

use super::slot::{AttachError, Slot, SlotRef};
use super::sync::{Fence, Ordering, full_fence};

use budget::MoveBudget;

pub use lvt::{LvtTimer, TimerMode};
pub use state::{DeadlineState, RestoreError};
pub use stats::HostStatistics;

/// A real timer for one vCPU, and its clock.
pub trait HostTimer {
    /// Returns the vCPU's TSC, as the guest would read it now.
    fn now(&mut self) -> u64;

    /// Returns the time by a clock that the guest cannot set, in ticks as long as the TSC's: the host's own TSC. This
    /// clock bounds how often a guest has its timer moved ([`DeadlineTimer::with_floor`]).
    fn host_clock(&mut self) -> u64;

    /// Arranges one call of [`DeadlineTimer::expire`] when the vCPU's TSC has reached `deadline`, in place of an
    /// earlier request. The call does not wake the vCPU.
    ///
    /// `deadline` may be any value. A deadline that is too far away for the host may expire earlier. A deadline in the
    /// past expires at once, but never from within this call.
    fn arm(&mut self, deadline: u64);

    /// Cancels the requested call. A call that comes nevertheless does no harm.
    fn disarm(&mut self);
}

/// What the caller does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "an interrupt that is not injected is a lost deadline"]
pub enum Verdict {
    /// Nothing. A halted vCPU stays halted.
    Quiet,
    /// Inject the LVT timer interrupt, which wakes a halted vCPU. The deadline that is due comes
    /// with it, for those who measure how late it is.
    Inject(u64),
}

/// One vCPU's IA32_TSC_DEADLINE, or the paravirtual register that stands for it.
///
/// Every decision rests on private copies and on one load of the guest's word. A guest that writes nonsense into its
/// slot therefore gets its own interrupts wrong, and nothing else. No call loops or waits.
///
/// The vCPU's exits and the host's timer must take turns: keep this value behind the lock of the vCPU's local APIC. The
/// vCPU itself keeps running and writing to its slot meanwhile; the protocol is made for that.
///
/// `slot` is the memory that the guest has asked to share; `None` if it shares none, or if that memory is gone.
#[derive(Clone, Debug)]
pub struct DeadlineTimer {
    lvt: LvtTimer,
    /// When the host's timer expires; 0: it does not. Never read back from the slot.
    armed: u64,
    /// At `armed`, read `pending`. Otherwise `armed` itself is due then.
    lazy: bool,
    /// What fired because it was found in the slot, where the guest may be about to write it to
    /// the MSR too; 0: nothing.
    fired: u64,
    sharing: bool,
    budget: MoveBudget,
    statistics: HostStatistics,
}

impl DeadlineTimer {
    /// Makes a timer out of reset, with nothing armed and nothing shared.
    pub const fn new() -> Self {
        Self {
            lvt: LvtTimer::RESET,
            armed: 0,
            lazy: false,
            fired: 0,
            sharing: false,
            budget: MoveBudget::new(0),
            statistics: HostStatistics::ZERO,
        }
    }

    /// Bounds how often the timer is moved, in `ticks` of the TSC (default 0: no bound).
    ///
    /// A guest that always wants a deadline a moment later can make the host's timer expire and be moved without an
    /// exit of its own. With a floor, two such moves are at least `ticks` apart. Any span of time has at most 16 of
    /// them, one more for each ten times `ticks`, and one more for each of the guest's own exits. A deadline that would
    /// need more moves fires late by ten times `ticks` at most.
    pub const fn with_floor(mut self, ticks: u64) -> Self {
        self.budget = MoveBudget::new(ticks);
        self
    }

    /// Shares `slot`, as the guest asks. What is armed stays armed.
    ///
    /// # Errors
    ///
    /// Refuses memory without the tag of layout 1, and has not written to it.
    pub fn attach(&mut self, slot: SlotRef<'_>) -> Result<(), AttachError> {
        let found = slot.load_tag();
        if found != Slot::TAG {
            return Err(AttachError::Tag { found });
        }
        self.sharing = true;
        // What is armed may be from another slot: this one says nothing about it.
        self.lazy = false;
        self.fired = 0;
        publish(Some(slot), 0);
        Ok(())
    }

    /// Ends the sharing, as the guest asks. The slot is not touched again. What is armed stays armed, for the deadline
    /// in force.
    pub fn detach<H: HostTimer>(&mut self, slot: Option<SlotRef<'_>>, host: &mut H) {
        let slot = self.shared(slot);
        publish(slot, 0);
        if self.lazy {
            // No fence: the guest has exited to ask for this, and its stores came before that.
            match self.in_force(slot) {
                0 => self.disarm(host),
                deadline => {
                    self.armed = deadline;
                    self.lazy = false;
                    host.arm(deadline);
                }
            }
        }
        self.sharing = false;
        self.fired = 0;
    }

    /// Resets the timer, as the vCPU is reset by INIT or altogether: nothing is armed, and nothing shared. No slot is
    /// touched, since the guest may have lost its memory of it.
    pub fn reset<H: HostTimer>(&mut self, host: &mut H) {
        self.disarm(host);
        self.sharing = false;
        self.fired = 0;
        self.lvt = LvtTimer::RESET;
    }

    /// Handles the guest's write of `value` to the deadline register.
    pub fn write<H: HostTimer>(
        &mut self,
        value: u64,
        slot: Option<SlotRef<'_>>,
        host: &mut H,
    ) -> Verdict {
        count(&mut self.statistics.writes);
        // As a processor, which ignores the write in the other modes (SDM vol. 3A, "TSC-Deadline Mode").
        if self.lvt.mode != TimerMode::TscDeadline {
            return Verdict::Quiet;
        }
        let slot = self.shared(slot);
        let pending = slot.map(|slot| slot.pending.load(Ordering::Relaxed));
        let fired = core::mem::take(&mut self.fired);
        if value != 0 && value == fired && pending == Some(0) {
            // The guest wrote this deadline to its slot, we found it there and it fired, all before
            // the guest got from its read of `armed` to this write.
            count(&mut self.statistics.overtaken);
            return Verdict::Quiet;
        }
        // A guest that uses its slot has written it before it comes here. Another value there is
        // left from a kernel before this one (kexec), and must not move this one's deadline.
        let lazy = value != 0 && pending == Some(value);
        if value != 0 && slot.is_some() && !lazy {
            count(&mut self.statistics.direct);
        }
        if value == 0 || value <= host.now() {
            publish(slot, 0);
            self.disarm(host);
            return if value == 0 {
                Verdict::Quiet
            } else {
                self.deliver(value)
            };
        }
        self.armed = value;
        self.lazy = lazy;
        host.arm(value);
        publish(slot, if lazy { value } else { 0 });
        Verdict::Quiet
    }

    /// Returns what the guest reads from the deadline register: the deadline in force, 0 once it has fired.
    pub fn read(&mut self, slot: Option<SlotRef<'_>>) -> u64 {
        let slot = self.shared(slot);
        self.in_force(slot)
    }

    /// Handles an expiry of the host's timer. Also call this when the vCPU's TSC was changed against the host's clock
    /// (a write of IA32_TSC or IA32_TSC_ADJUST, a new offset): the timer must then be armed anew, or is due.
    pub fn expire<H: HostTimer>(&mut self, slot: Option<SlotRef<'_>>, host: &mut H) -> Verdict {
        count(&mut self.statistics.expiries);
        if self.armed == 0 {
            count(&mut self.statistics.stale);
            return Verdict::Quiet;
        }
        let now = host.now();
        if now < self.armed {
            count(&mut self.statistics.stale);
            // The host's timer was early, or the guest has set its TSC back. Its slot still says that the timer is armed.
            host.arm(self.armed);
            return Verdict::Quiet;
        }
        let slot = self.shared(slot);
        let armed = core::mem::take(&mut self.armed);
        if !core::mem::take(&mut self.lazy) {
            return self.deliver(armed);
        }
        let Some(slot) = slot else {
            return self.deliver(armed);
        };
        // From here on the guest writes the MSR...
        slot.armed.store(0, Ordering::Relaxed);
        full_fence(Fence::Host);
        // ...and what it wanted before that is visible.
        let pending = slot.pending.load(Ordering::Relaxed);
        if pending == 0 {
            count(&mut self.statistics.cancelled);
            return Verdict::Quiet;
        }
        if pending > now {
            count(&mut self.statistics.moved);
            let soonest = self.budget.take(host.host_clock());
            self.armed = pending.max(now.saturating_add(soonest));
            self.lazy = true;
            host.arm(self.armed);
            // Behind the call: a guest that reads this value leaves out its write.
            publish(Some(slot), self.armed);
            return Verdict::Quiet;
        }
        self.take(Some(slot), pending);
        self.deliver(pending)
    }

    /// Handles an expiry after an unknown change of the vCPU's TSC: the TSC is short of the deadline by more than
    /// clocks differ. The guest is interrupted now, as by a timer that knows no TSC, and its next deadline is written.
    /// [`expire`](Self::expire) is better where the new TSC is known.
    pub fn expire_unknown_tsc(&mut self, slot: Option<SlotRef<'_>>) -> Verdict {
        count(&mut self.statistics.expiries);
        let slot = self.shared(slot);
        // As in `expire`: the guest writes the MSR from here on, or has stored what it wanted.
        publish(slot, 0);
        full_fence(Fence::Host);
        let deadline = self.in_force(slot);
        self.armed = 0;
        self.lazy = false;
        if deadline == 0 {
            count(&mut self.statistics.stale);
            return Verdict::Quiet;
        }
        self.deliver(deadline)
    }

    /// Handles the guest's write of its LVT timer register. A change of the mode disarms the timer (Intel SDM vol. 3A,
    /// "TSC-Deadline Mode").
    pub fn set_lvt<H: HostTimer>(
        &mut self,
        lvt: LvtTimer,
        slot: Option<SlotRef<'_>>,
        host: &mut H,
    ) {
        // A change of the mask alone leaves the deadline: an interrupt is dropped when it comes due, not before.
        if lvt.mode != self.lvt.mode {
            let slot = self.shared(slot);
            publish(slot, 0);
            self.disarm(host);
            self.fired = 0;
        }
        self.lvt = lvt;
    }

    /// Returns all that must go with the guest, while its vCPU does not run. Nothing may expire here afterwards, unless
    /// the guest goes on here.
    pub fn save(&mut self, slot: Option<SlotRef<'_>>) -> DeadlineState {
        // No fence: the vCPU does not run, and what it has stored is there.
        let slot = self.shared(slot);
        DeadlineState {
            layout: DeadlineState::LAYOUT,
            deadline: self.in_force(slot),
            fired: self.fired,
            lvt: self.lvt,
            shared: self.sharing,
        }
    }

    /// Replaces this timer by `state`, before the vCPU runs. `armed` in the slot becomes 0, whatever came with the
    /// guest's memory, so the guest writes its next deadline to the register.
    ///
    /// # Errors
    ///
    /// Refuses a state of another layout, or of a guest that shares a slot if none is given. This
    /// timer is then as it was.
    pub fn restore<H: HostTimer>(
        &mut self,
        state: &DeadlineState,
        slot: Option<SlotRef<'_>>,
        host: &mut H,
    ) -> Result<Verdict, RestoreError> {
        if state.layout != DeadlineState::LAYOUT {
            return Err(RestoreError::Layout {
                saved: state.layout,
            });
        }
        if state.shared && slot.is_none() {
            return Err(RestoreError::SlotMissing);
        }
        self.reset(host);
        self.lvt = state.lvt;
        self.sharing = state.shared;
        self.fired = state.fired;
        let slot = self.shared(slot);
        publish(slot, 0);
        if state.deadline == 0 || state.lvt.mode != TimerMode::TscDeadline {
            return Ok(Verdict::Quiet);
        }
        self.armed = state.deadline;
        if self.armed <= host.now() {
            self.armed = 0;
            self.take(slot, state.deadline);
            return Ok(self.deliver(state.deadline));
        }
        // The guest may still cancel it without an exit. `armed` stays 0 in the slot, so that the next deadline comes here.
        self.lazy = slot.is_some_and(|slot| slot.pending.load(Ordering::Relaxed) == state.deadline);
        host.arm(self.armed);
        Ok(Verdict::Quiet)
    }

    /// Returns whether a slot is shared: from [`attach`](Self::attach) until the guest, a reset or a missing tag ends
    /// it.
    pub fn is_sharing(&self) -> bool {
        self.sharing
    }

    /// Returns counts of what happened so far.
    pub fn statistics(&self) -> HostStatistics {
        self.statistics
    }

    /// `slot`, if it is shared and still one. Memory that lost its tag has found another use (a
    /// kernel that was replaced without a word) and must not be written to again.
    fn shared<'a>(&mut self, slot: Option<SlotRef<'a>>) -> Option<SlotRef<'a>> {
        if !self.sharing {
            return None;
        }
        match slot {
            Some(slot) if slot.load_tag() == Slot::TAG => Some(slot),
            _ => {
                count(&mut self.statistics.abandoned);
                self.sharing = false;
                self.fired = 0;
                None
            }
        }
    }

    fn in_force(&self, slot: Option<SlotRef<'_>>) -> u64 {
        match slot {
            Some(slot) if self.lazy => slot.pending.load(Ordering::Relaxed),
            _ => self.armed,
        }
    }

    /// Takes a deadline that fires out of the slot, if it is still there. If the guest was faster,
    /// its new one comes with a write: it has seen `armed` clear.
    fn take(&mut self, slot: Option<SlotRef<'_>>, deadline: u64) {
        let taken = slot.is_some_and(|slot| {
            let order = Ordering::Relaxed;
            let taken = slot.pending.compare_exchange(deadline, 0, order, order);
            taken.is_ok()
        });
        if taken {
            self.fired = deadline;
        }
    }

    fn disarm<H: HostTimer>(&mut self, host: &mut H) {
        self.lazy = false;
        if core::mem::take(&mut self.armed) != 0 {
            host.disarm();
        }
    }

    fn deliver(&mut self, deadline: u64) -> Verdict {
        if self.lvt.masked {
            count(&mut self.statistics.masked);
            return Verdict::Quiet;
        }
        count(&mut self.statistics.injected);
        Verdict::Inject(deadline)
    }
}

impl Default for DeadlineTimer {
    fn default() -> Self {
        Self::new()
    }
}

fn publish(slot: Option<SlotRef<'_>>, armed: u64) {
    if let Some(slot) = slot {
        slot.armed.store(armed, Ordering::Relaxed);
    }
}
