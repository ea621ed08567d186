//! A guest that falls back to IA32_TSC_DEADLINE where the slot avoids too little, and comes back.

use crate::machine::Vm;
use lazy_deadline::{BreakEven, Way};
use proptest::prelude::*;

/// A guest with both registers, and what came of its deadlines.
struct Both {
    vm: Vm,
    choice: BreakEven,
    /// IA32_TSC_DEADLINE.
    plain: u64,
    /// Writes of IA32_TSC_DEADLINE that were not 0.
    plain_writes: u64,
    /// When IA32_TSC_DEADLINE has fired.
    fired: Vec<u64>,
}

impl Both {
    fn new(percent: u8) -> Self {
        Self {
            vm: Vm::new(),
            choice: BreakEven::new(percent),
            plain: 0,
            plain_writes: 0,
            fired: Vec::new(),
        }
    }

    fn set_plain(&mut self, deadline: u64) {
        self.plain = deadline;
        self.plain_writes += 1;
    }

    fn set(&mut self, deadline: u64) {
        let way = self.choice.choose(deadline, self.vm.now());
        match way {
            Way::Lazy => {}
            Way::Plain => return self.set_plain(deadline),
            Way::FallBack => {
                let _ = self.vm.set(0);
                return self.set_plain(deadline);
            }
            Way::ComeBack => self.plain = 0,
        }
        let _ = self.vm.set(deadline);
    }

    /// Lets `ticks` pass, and returns how many interrupts came.
    fn wait(&mut self, ticks: u64) -> usize {
        let before = self.vm.host.injected.len() + self.fired.len();
        let to = self.vm.now() + ticks;
        if self.plain != 0 && self.plain <= to {
            self.fired.push(core::mem::take(&mut self.plain));
        }
        self.vm.host.advance(to, self.vm.slot.words());
        self.vm.host.injected.len() + self.fired.len() - before
    }

    /// Moves a deadline later, as a CPU that goes idle between messages.
    fn move_on(&mut self, times: u32) {
        for _ in 0..times {
            self.set(self.vm.now() + 1_000_000);
            assert_eq!(self.wait(1_000), 0);
        }
    }

    /// Sleeps, each to its end.
    fn sleep(&mut self, times: u32) {
        for _ in 0..times {
            self.set(self.vm.now() + 1_000);
            assert_eq!(self.wait(1_000), 1, "each sleep ends, once");
        }
    }
}

#[test]
fn sleeps_fall_back_and_messages_come_back() {
    let mut it = Both::new(80);
    it.move_on(2_000);
    assert!(!it.choice.is_plain());
    assert_eq!(it.plain_writes, 0);

    // The window that has begun, and two more.
    it.sleep(3 * 256);
    assert!(it.choice.is_plain());
    let after = it.plain_writes;
    it.sleep(1_000);
    assert_eq!(it.plain_writes, after + 1_000, "and stays there");

    it.move_on(3 * 256);
    assert!(!it.choice.is_plain());
    let statistics = it.choice.statistics();
    assert_eq!((statistics.fell_back, statistics.came_back), (1, 1));
    assert_eq!(statistics.plain, it.plain_writes);
}

#[test]
fn a_burst_of_sleeps_changes_nothing() {
    let mut it = Both::new(80);
    for _ in 0..10 {
        it.move_on(256);
        it.sleep(256);
    }
    assert_eq!(it.choice.statistics(), Default::default());
}

/// Of ten deadlines, `moved` are moved and the others come due.
fn mixed(it: &mut Both, moved: u32) {
    for _ in 0..1_000 {
        it.move_on(moved);
        it.sleep(10 - moved);
    }
}

#[test]
fn a_share_beside_the_break_even_does_not_go_back_and_forth() {
    // The sleep after a move, and the move after it, are written: a share of some 80 %.
    let mut it = Both::new(80);
    mixed(&mut it, 9);
    let statistics = it.choice.statistics();
    assert!(
        statistics.fell_back + statistics.came_back <= 1,
        "{statistics:?}"
    );
}

#[test]
fn without_a_break_even_the_slot_is_always_used() {
    let mut it = Both::new(0);
    it.sleep(5_000);
    assert_eq!(it.plain_writes, 0);
}

proptest! {
    /// Whatever the guest asks for when: after its last deadline the interrupt has come, not before it, and none is left.
    #[test]
    fn no_deadline_is_lost_over_a_change(
        percent in 0_u8..=100,
        phases in prop::collection::vec((1_u64..3_000, 1_u64..3_000, 1_u32..900), 1..8),
    ) {
        let mut it = Both::new(percent);
        for (ahead, pause, times) in phases {
            for _ in 0..times {
                let deadline = it.vm.now() + ahead;
                it.set(deadline);
                let came = it.wait(pause);
                prop_assert_eq!(came, usize::from(ahead <= pause));
            }
        }
        it.set(it.vm.now() + 5_000);
        prop_assert_eq!(it.wait(5_000), 1);
        prop_assert_eq!(it.wait(1_000_000), 0);
    }
}
