//! A deadline goes with its guest, and a write that was on its way does not fire it again.

use crate::machine::{Cpu, Vm};
use lazy_deadline::{
    DeadlineState, DeadlineTimer, GuestCpu, LvtTimer, ParavirtualTimer, Request, RestoreError,
    TimerMode,
};

#[test]
fn migration_takes_the_deadline_and_clears_armed() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(5_000);
    vm.migrate(0);
    assert_eq!((vm.armed(), vm.rdmsr()), (0, 5_000));
    assert_eq!(vm.host.timer.statistics().injected, 0);
    assert_eq!(vm.set(6_000), Request::Written);
    assert_eq!(vm.set(7_000), Request::Avoided);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, [(7_000, 7_000)]);
}

#[test]
fn migration_that_took_too_long_fires_at_once() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(5_000);
    vm.migrate(4_500);
    assert_eq!(vm.host.injected, [(5_500, 5_000)]);
    vm.advance(10_000);
    assert_eq!(vm.host.injected.len(), 1);
}

#[test]
fn migration_of_a_cancelled_deadline() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.cancel();
    vm.migrate(0);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
}

#[test]
fn migration_and_then_cancelled_without_an_exit() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(5_000);
    vm.migrate(0);
    vm.cancel();
    assert_eq!(vm.rdmsr(), 0);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
}

#[test]
fn a_state_that_cannot_go_on_here_is_refused() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let state = vm.host.timer.save(Some(vm.slot.words()));
    assert_eq!(
        state,
        DeadlineState {
            layout: 1,
            deadline: 2_000,
            fired: 0,
            lvt: LvtTimer {
                mode: TimerMode::TscDeadline,
                masked: false
            },
            shared: true,
        }
    );
    let mut timer = DeadlineTimer::new();
    assert_eq!(
        timer.restore(&state, None, &mut vm.host.clock),
        Err(RestoreError::SlotMissing)
    );
    let other = DeadlineState { layout: 2, ..state };
    let refused = timer.restore(&other, None, &mut vm.host.clock);
    assert_eq!(refused, Err(RestoreError::Layout { saved: 2 }));
    assert_eq!(
        RestoreError::Layout { saved: 2 }.to_string(),
        "restore a deadline timer of layout 2: this engine reads 1"
    );
}

/// A guest that stands between its read of `armed` and its write while `then` happens.
fn interrupted(vm: &mut Vm, deadline: u64, then: impl FnOnce(&mut Vm)) {
    struct Later(Option<u64>);
    impl GuestCpu for Later {
        fn tsc(&mut self) -> u64 {
            0
        }
        fn write_deadline(&mut self, deadline: u64) {
            self.0 = Some(deadline);
        }
    }
    let mut cpu = Later(None);
    let _ = ParavirtualTimer::new().set(deadline, vm.slot.words(), &mut cpu);
    then(vm);
    if let Some(deadline) = cpu.0 {
        let slot = vm.slot.words();
        Cpu {
            host: &mut vm.host,
            slot,
        }
        .write_deadline(deadline);
    }
}

#[test]
fn what_fired_before_the_write_came_fires_once() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    interrupted(&mut vm, 1_500, |vm| vm.advance(2_000));
    assert_eq!(vm.host.injected, [(2_000, 1_500)]);
    assert_eq!(vm.host.timer.statistics().overtaken, 1);
    // The same value asked for anew is another matter.
    let _ = vm.set(1_500);
    assert_eq!(vm.host.injected, [(2_000, 1_500), (3_000, 1_500)]);
}

#[test]
fn what_fired_before_the_write_came_fires_once_across_migration() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    interrupted(&mut vm, 1_500, |vm| {
        vm.advance(2_000);
        vm.migrate(10);
    });
    assert_eq!(vm.host.injected, [(2_000, 1_500)]);
}

#[test]
fn what_fired_in_a_migration_before_the_write_came_fires_once() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    interrupted(&mut vm, 1_500, |vm| vm.migrate(1_000));
    assert_eq!(vm.host.injected, [(2_000, 1_500)]);
    assert_eq!(vm.host.timer.statistics().overtaken, 1);
}
