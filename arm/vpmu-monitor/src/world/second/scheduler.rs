//! Whose turn it is: round robin between two guests, with a slice.
//!
//! A guest that waits (WFI) gives way, and is woken when its timer is due or an interrupt comes for it. To be woken is
//! not to run: the other guest keeps what is left of its slice. So neither guest gets more than its half by
//! waking often.

/// One of the two guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The guest that has the machine's devices.
    First,
    /// The guest beside it.
    Second,
}

impl Who {
    /// The other guest.
    pub const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    /// 0 or 1.
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// What a guest's CPU is doing. Times are of the system counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runnable,
    /// Waits for an interrupt. Its own timer raises one at that time, if at all.
    Waiting(Option<u64>),
    Off,
}

/// What is to happen now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The current guest goes on. To be asked again at that time, where there is one.
    GoOn(Option<u64>),
    /// The other guest runs. To be asked again once it is there.
    Switch,
    /// Nobody can run. To be asked again at that time, where there is one, or at an interrupt.
    Wait(Option<u64>),
    /// Both guests have gone.
    End,
}

/// The turns of two guests on one CPU.
#[derive(Clone, Debug)]
pub struct Scheduler {
    current: Who,
    states: [State; 2],
    slice: u64,
    started: u64,
    /// The turn is over before its slice.
    is_over: bool,
}

/// Interrupts that one exit serves at most.
const MOST_INTERRUPTS: usize = 32;

/// Calls `serve`, which returns whether there was an interrupt to serve, until there is none; but not for ever. Returns
/// whether some may be left, which stay pending: what makes them new as fast as they are served is to cost its guest the turn
/// ([`Scheduler::end_turn`]) and not keep the CPU at EL2.
pub fn serve_interrupts(mut serve: impl FnMut() -> bool) -> bool {
    (0..MOST_INTERRUPTS).all(|_| serve())
}

impl Scheduler {
    /// Both guests are runnable, and the first one's turn has begun at the time 0.
    pub const fn new(slice: u64) -> Self {
        Self {
            current: Who::First,
            states: [State::Runnable; 2],
            slice,
            started: 0,
            is_over: false,
        }
    }

    /// The first guest's turn begins at the time `now`.
    pub const fn begin(&mut self, now: u64) {
        self.started = now;
    }

    /// The current guest's turn ends now, where the other one can run.
    pub const fn end_turn(&mut self) {
        self.is_over = true;
    }

    /// Whose registers are in the CPU.
    pub const fn current(&self) -> Who {
        self.current
    }

    /// The current guest waits for an interrupt; its timer raises one at the time `until`.
    pub fn wait(&mut self, until: Option<u64>) {
        self.states[self.current.index()] = State::Waiting(until);
    }

    /// An interrupt has come for the guest. One that is off stays off.
    pub fn wake(&mut self, who: Who) {
        let state = &mut self.states[who.index()];
        // A late interrupt must not start a CPU that PSCI has switched off.
        if *state != State::Off {
            *state = State::Runnable;
        }
    }

    /// The guest has switched itself off.
    pub fn switch_off(&mut self, who: Who) {
        self.states[who.index()] = State::Off;
    }

    /// Whether the guest waits for an interrupt.
    pub fn waits(&self, who: Who) -> bool {
        matches!(self.states[who.index()], State::Waiting(_))
    }

    /// Decides, at the time `now`.
    pub fn decide(&mut self, now: u64) -> Decision {
        for state in &mut self.states {
            if matches!(*state, State::Waiting(Some(until)) if until <= now) {
                *state = State::Runnable;
            }
        }
        let other = self.current.other();
        let end = self.started.wrapping_add(self.slice);
        match (
            self.states[self.current.index()],
            self.states[other.index()],
        ) {
            (State::Runnable, State::Runnable) if self.is_over || end <= now => self.switch(now),
            (State::Runnable, State::Runnable) => Decision::GoOn(Some(end)),
            // Alone, its slice does not end; the other's timer ends it.
            (State::Runnable, State::Waiting(until)) => Decision::GoOn(until),
            // No alarm: a guest alone takes no exits for turns.
            (State::Runnable, State::Off) => Decision::GoOn(None),
            // The timer of a guest that waits alone is to be the CPU's.
            (State::Waiting(_), State::Runnable)
            | (State::Off, State::Runnable | State::Waiting(_)) => self.switch(now),
            (State::Waiting(mine), State::Waiting(others)) => {
                Decision::Wait(mine.into_iter().chain(others).min())
            }
            (State::Waiting(until), State::Off) => Decision::Wait(until),
            (State::Off, State::Off) => Decision::End,
        }
    }

    fn switch(&mut self, now: u64) -> Decision {
        self.current = self.current.other();
        self.started = now;
        // The next turn is whole, whoever has ended this one.
        self.is_over = false;
        Decision::Switch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_that_compute_have_half_each() {
        let mut turns = Scheduler::new(100);
        let mut ran = [0; 2];
        for now in 0..10_000 {
            while turns.decide(now) == Decision::Switch {}
            ran[turns.current().index()] += 1;
        }
        assert_eq!(ran, [5_000, 5_000]);
    }

    #[test]
    fn a_guest_that_waits_gives_way_until_its_timer() {
        let mut turns = Scheduler::new(100);
        turns.wait(Some(1_000));
        assert_eq!(turns.decide(10), Decision::Switch);
        assert_eq!(turns.current(), Who::Second);
        assert_eq!(turns.decide(10), Decision::GoOn(Some(1_000)));
        // The second guest has had more than its slice by then.
        assert_eq!(turns.decide(1_000), Decision::Switch);
        assert_eq!(turns.current(), Who::First);
    }

    #[test]
    fn waking_often_gets_no_more_than_half() {
        let mut turns = Scheduler::new(100);
        let mut ran = [0; 2];
        for now in 0..100_000 {
            // The second guest waits for the shortest time, whenever it runs.
            while turns.decide(now) == Decision::Switch {}
            ran[turns.current().index()] += 1;
            if turns.current() == Who::Second {
                turns.wait(Some(now + 1));
            }
        }
        assert!(ran[1] <= ran[0], "{ran:?}");
        assert!(ran[0] + ran[1] == 100_000);
    }

    #[test]
    fn interrupts_without_end_cost_the_turn() {
        let mut turns = Scheduler::new(100);
        let mut served = 0;
        let serve = || {
            served += 1;
            true
        };
        assert!(serve_interrupts(serve), "some are left");
        assert_eq!(served, MOST_INTERRUPTS);
        turns.end_turn();
        assert_eq!(turns.decide(1), Decision::Switch);
        // The other guest has a whole turn.
        assert_eq!(turns.decide(1), Decision::GoOn(Some(101)));
        let mut left = 3;
        let serve = || {
            left -= 1;
            left >= 0
        };
        assert!(!serve_interrupts(serve));
    }

    #[test]
    fn nobody_runs_when_both_wait() {
        let mut turns = Scheduler::new(100);
        turns.wait(None);
        assert_eq!(turns.decide(1), Decision::Switch);
        turns.wait(Some(50));
        assert_eq!(turns.decide(2), Decision::Wait(Some(50)));
        turns.wake(Who::First);
        assert_eq!(turns.decide(3), Decision::Switch);
        assert_eq!(turns.decide(3), Decision::GoOn(Some(50)));
    }

    #[test]
    fn the_machine_ends_with_the_last_guest() {
        let mut turns = Scheduler::new(100);
        turns.switch_off(Who::First);
        assert_eq!(turns.decide(1), Decision::Switch);
        assert_eq!(turns.decide(1_000), Decision::GoOn(None));
        turns.wake(Who::First);
        assert_eq!(turns.states[0], State::Off, "off is off");
        turns.wait(None);
        assert_eq!(turns.decide(2_000), Decision::Wait(None));
        turns.switch_off(Who::Second);
        assert_eq!(turns.decide(2_001), Decision::End);
    }
}
