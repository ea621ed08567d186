//! IA32_TSC_DEADLINE as the manual has it, with nothing lazy about it: the reference.

use lazy_deadline::{LvtTimer, TimerMode};

pub(crate) struct PlainTimer {
    pub(crate) deadline: u64,
    pub(crate) lvt: LvtTimer,
    /// What fired: when, and for which deadline.
    pub(crate) fired: Vec<(u64, u64)>,
}

impl PlainTimer {
    pub(crate) fn new() -> Self {
        Self {
            deadline: 0,
            lvt: LvtTimer::decode(0x4_00ec),
            fired: Vec::new(),
        }
    }

    pub(crate) fn write(&mut self, now: u64, deadline: u64) {
        if self.lvt.mode == TimerMode::TscDeadline {
            self.deadline = deadline;
            self.advance(now, now);
        }
    }

    pub(crate) fn set_lvt(&mut self, lvt: LvtTimer) {
        if lvt.mode != self.lvt.mode {
            self.deadline = 0;
        }
        self.lvt = lvt;
    }

    /// The TSC goes from `from` to `to`, tick by tick.
    pub(crate) fn advance(&mut self, from: u64, to: u64) {
        if self.deadline != 0 && self.deadline <= to {
            if !self.lvt.masked {
                self.fired.push((self.deadline.max(from), self.deadline));
            }
            self.deadline = 0;
        }
    }
}
