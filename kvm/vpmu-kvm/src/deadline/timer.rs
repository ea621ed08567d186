//! The host's timer of one vCPU: set early, and waited out by polling the TSC.
//!
//! A thread that waits for a timerfd runs some microseconds after the timer expires; KVM's own timer
//! does not need these. So the timer is set early by as much as the last expiries came late, and the
//! thread polls the TSC until the deadline has come, as KVM does (`lapic_timer_advance_ns`).
//!
//! All times here are spans since the timer was set. A TSC value alone does not show what is late:
//! a vCPU's TSC may begin at any value, and wrap to 0.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use lazy_deadline::HostTimer;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_gettime, timerfd_settime,
};

use super::clock::{Clock, rdtsc};

/// The timer is set early by no more than this, ns: the longest that an expiry polls the TSC.
pub(super) const ADVANCE_NS: u64 = 10_000;
/// The part of an expiry's lateness by which the next timer is set earlier.
const ADVANCE_STEP: u64 = 8;
/// A span above this is a TSC that went back.
const LONGEST_SPAN: u64 = u64::MAX / 2;

/// The two clocks of the host: its TSC, and a timer that runs on another clock.
pub(super) trait Clocks {
    /// Returns the host's TSC.
    fn tsc(&self) -> u64;

    /// Sets the timer to expire once, after `ns`; 0: not at all.
    fn set(&self, ns: u64);

    /// Returns whether the timer has yet to expire.
    fn is_set(&self) -> bool;
}

/// This machine's TSC, and a timerfd.
#[derive(Debug)]
pub(super) struct TimerFd(OwnedFd);

impl TimerFd {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC,
        )?))
    }

    /// Blocks until the next expiry.
    pub(super) fn wait(&self) -> io::Result<()> {
        let mut expirations = [0; 8];
        loop {
            match rustix::io::read(&self.0, &mut expirations) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for TimerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Clocks for TimerFd {
    fn tsc(&self) -> u64 {
        rdtsc()
    }

    fn set(&self, ns: u64) {
        const SECOND: u64 = 1_000_000_000;
        let value = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: (ns / SECOND).cast_signed(),
                tv_nsec: (ns % SECOND).cast_signed(),
            },
        };
        // The call fails for a descriptor that is no timerfd and for an invalid time. These are valid.
        let _ = timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &value);
    }

    fn is_set(&self) -> bool {
        // The call fails for a descriptor that is no timerfd. This is a timerfd.
        timerfd_gettime(&self.0).is_ok_and(|left| left.it_value != Timespec::default())
    }
}

/// The setting of the timer, and the advance of the next one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Alarm {
    /// `None`: not set.
    set: Option<Setting>,
    /// Ticks by which the timer is set early.
    advance: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setting {
    /// The vCPU's TSC when the timer was set.
    since: u64,
    /// Ticks from `since` to the deadline.
    ahead: u64,
    /// [`Alarm::wake`] has let the timer expire early.
    woken: bool,
}

impl Alarm {
    /// Lets the timer expire now. The deadline stays where it is.
    pub(super) fn wake(&mut self, clocks: &impl Clocks) {
        if let Some(set) = &mut self.set {
            // An early expiry would else pass for a TSC that was changed unseen.
            set.woken = true;
        }
        clocks.set(1);
    }
}

/// An expiry's finding about the vCPU's TSC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiry {
    /// The TSC is as far as expected, or nothing was set.
    Expected,
    /// The timer has expired and the TSC is far from the deadline, or behind the moment of setting:
    /// it was changed unseen.
    UnknownTsc,
}

/// One vCPU's timer, as the protocol has it.
pub(super) struct Timer<'a, C> {
    clocks: &'a C,
    clock: Clock,
    alarm: &'a mut Alarm,
    /// During an expiry, the moment when the expired timer was set.
    since: Option<u64>,
}

impl<'a, C: Clocks> Timer<'a, C> {
    pub(super) fn new(clocks: &'a C, clock: Clock, alarm: &'a mut Alarm) -> Self {
        Self {
            clocks,
            clock,
            alarm,
            since: None,
        }
    }

    /// Waits for the rest of the time by which the timer was set early, and learns how early to set
    /// the next one.
    pub(super) fn wait(&mut self) -> Expiry {
        let Some(set) = self.alarm.set.take() else {
            return Expiry::Expected;
        };
        let elapsed = self.elapsed(set.since);
        if elapsed > LONGEST_SPAN {
            return Expiry::UnknownTsc;
        }
        self.since = Some(set.since);
        let longest = self.clock.ticks(ADVANCE_NS);
        let advance = &mut self.alarm.advance;
        match set.ahead.saturating_sub(elapsed) {
            0 => {
                // By a part of the lateness only: one late wake-up of a busy host is no rule.
                let late = (elapsed - set.ahead).div_ceil(ADVANCE_STEP);
                *advance = longest.min(advance.saturating_add(late));
            }
            left if left <= longest => {
                *advance -= (left / ADVANCE_STEP).min(*advance);
                while self.elapsed(set.since) < set.ahead {
                    std::hint::spin_loop();
                }
            }
            left if !set.woken && left > self.difference(set.ahead) && !self.clocks.is_set() => {
                return Expiry::UnknownTsc;
            }
            // This was a wake-up before the expiry, or the timer's clock is somewhat fast.
            _ => self.alarm.set = Some(set),
        }
        Expiry::Expected
    }

    /// Returns the ticks of the vCPU's TSC since it was `since`, also where it wrapped in between.
    fn elapsed(&self, since: u64) -> u64 {
        self.clock.guest(self.clocks.tsc()).wrapping_sub(since)
    }

    /// Returns how far the timer's clock and the TSC may come apart in this many ticks: adjtimex(2)
    /// makes the clock up to 10 % faster.
    fn difference(&self, ticks: u64) -> u64 {
        u64::from(self.clock.khz) + ticks / 8
    }
}

impl<C: Clocks> HostTimer for Timer<'_, C> {
    fn now(&mut self) -> u64 {
        match self.since {
            // A TSC that has wrapped since the timer was set is past the deadline, not before it.
            Some(since) => since.saturating_add(self.elapsed(since)),
            None => self.clock.guest(self.clocks.tsc()),
        }
    }

    fn host_clock(&mut self) -> u64 {
        self.clocks.tsc()
    }

    fn arm(&mut self, deadline: u64) {
        let since = self.now();
        let ahead = deadline.saturating_sub(since);
        self.alarm.set = Some(Setting {
            since,
            ahead,
            woken: false,
        });
        let left = ahead.saturating_sub(self.alarm.advance);
        self.clocks.set(self.clock.nanoseconds(left).max(1));
    }

    fn disarm(&mut self) {
        self.alarm.set = None;
        self.clocks.set(0);
    }
}

#[cfg(test)]
mod tests;
