//! What is known to go wrong with a paravirtual deadline, case by case.

use std::sync::atomic::Ordering::SeqCst;

use crate::machine::Vm;
use lazy_deadline::{AttachError, DeadlineTimer, Request, Slot, Verdict};

const MASKED: u32 = 0x5_00ec;
const UNMASKED: u32 = 0x4_00ec;
const ONE_SHOT: u32 = 0x0_00ec;

#[test]
fn the_slot_is_as_documented() {
    let slot = Slot::new();
    assert_eq!(size_of_val(&slot), 64);
    assert_eq!(align_of_val(&slot), 64);
    let base = &raw const slot as usize;
    let at = |word: *const _| word as *const u8 as usize - base;
    assert_eq!(at(&raw const *slot.words().armed), 0x00);
    assert_eq!(at(&raw const *slot.words().pending), 0x08);
    assert_eq!(at(&raw const *slot.words().tag), 0x10);
    assert_eq!(&Slot::TAG.to_be_bytes(), b"vpmuTSC\x01");
}

#[test]
fn later_needs_no_exit_and_fires_at_the_last() {
    let mut vm = Vm::new();
    assert_eq!(vm.set(2_000), Request::Written);
    for deadline in [2_000, 3_000, 2_500, 4_000] {
        assert_eq!(vm.set(deadline), Request::Avoided);
    }
    vm.advance(10_000);
    assert_eq!(vm.host.injected, [(4_000, 4_000)]);
    assert_eq!(vm.host.timer.statistics().writes, 1);
    assert_eq!(vm.host.timer.statistics().moved, 1);
}

#[test]
fn earlier_is_written_and_fires_once() {
    let mut vm = Vm::new();
    let _ = vm.set(3_000);
    let _ = vm.set(5_000);
    assert_eq!(vm.set(2_000), Request::Written);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, [(2_000, 2_000)]);
}

#[test]
fn the_past_fires_at_once() {
    let mut vm = Vm::new();
    for deadline in [1, 999, 1_000] {
        assert_eq!(vm.set(deadline), Request::Written);
        assert_eq!(vm.host.injected.pop(), Some((1_000, deadline)));
        assert_eq!(vm.rdmsr(), 0);
    }
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
}

#[test]
fn the_past_fires_when_the_host_is_late() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.host.clock.tsc = 2_500;
    // Later than what is armed and past all the same: the host is about to read `pending`.
    assert_eq!(vm.set(2_400), Request::Avoided);
    vm.advance(0);
    assert_eq!(vm.host.injected, [(2_500, 2_400)]);
}

#[test]
fn zero_disarms_for_good() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    assert_eq!(vm.set(0), Request::Written);
    assert_eq!((vm.armed(), vm.rdmsr()), (0, 0));
    assert_eq!(vm.host.clock.armed, None);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
}

#[test]
fn cancelled_without_an_exit() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.cancel();
    assert_eq!(vm.rdmsr(), 0);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
    assert_eq!(vm.host.timer.statistics().cancelled, 1);
    assert_eq!(
        vm.set(20_000),
        Request::Written,
        "nothing is armed any more"
    );
}

#[test]
fn cancelled_and_wanted_again() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.cancel();
    assert_eq!(vm.set(3_000), Request::Avoided);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, [(3_000, 3_000)]);
}

#[test]
fn rdmsr_gives_the_deadline_in_force_and_then_zero() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    assert_eq!(vm.rdmsr(), 2_000);
    let _ = vm.set(3_000);
    assert_eq!(vm.rdmsr(), 3_000);
    vm.advance(1_500);
    assert_eq!(vm.rdmsr(), 3_000);
    vm.advance(1_500);
    assert_eq!(vm.rdmsr(), 0);
}

#[test]
fn another_mode_disarms_reads_zero_and_ignores_writes() {
    for register in [ONE_SHOT, 0x2_00ec, 0x6_00ec] {
        let mut vm = Vm::new();
        let _ = vm.set(2_000);
        let _ = vm.set(3_000);
        vm.set_lvt(register);
        assert_eq!((vm.armed(), vm.rdmsr()), (0, 0));
        assert_eq!(vm.set(2_500), Request::Written);
        assert_eq!((vm.armed(), vm.rdmsr()), (0, 0));
        vm.set_lvt(UNMASKED);
        vm.advance(10_000);
        assert_eq!(vm.host.injected, [], "nothing came back with the mode");
        let _ = vm.set(20_000);
        vm.advance(10_000);
        assert_eq!(vm.host.injected, [(20_000, 20_000)]);
    }
}

#[test]
fn masked_is_dropped_when_due() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(3_000);
    vm.set_lvt(MASKED);
    vm.advance(1_500);
    vm.set_lvt(UNMASKED);
    assert_eq!(vm.rdmsr(), 3_000, "moved while masked");
    vm.set_lvt(MASKED);
    vm.advance(1_500);
    vm.set_lvt(UNMASKED);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
    assert_eq!(vm.host.timer.statistics().masked, 1);
    assert_eq!(vm.rdmsr(), 0);
}

#[test]
fn a_kernel_that_does_not_know_the_slot_gets_a_plain_timer() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(50_000);
    // kexec. Its predecessor wants 50,000 still, it seems.
    vm.direct(3_000);
    assert_eq!(vm.armed(), 0, "whoever reads it must write");
    assert_eq!(vm.rdmsr(), 3_000);
    vm.advance(100_000);
    assert_eq!(vm.host.injected, [(3_000, 3_000)]);
    assert_eq!(vm.host.timer.statistics().direct, 1);
}

#[test]
fn direct_writes_and_the_slot_may_take_turns() {
    let mut vm = Vm::new();
    let _ = vm.set(50_000);
    vm.direct(3_000);
    vm.direct(4_000);
    assert_eq!(vm.set(5_000), Request::Written);
    assert_eq!(vm.set(6_000), Request::Avoided);
    vm.advance(100_000);
    assert_eq!(vm.host.injected, [(6_000, 6_000)]);
}

/// The next kernel uses that memory for something else: it must find what it wrote there.
#[test]
fn memory_that_lost_its_tag_is_left_alone() {
    let words = |vm: &Vm| {
        let words = vm.slot.words();
        [words.armed, words.pending, words.tag].map(|word| word.load(SeqCst))
    };
    type Act = fn(&mut Vm);
    let acts: [Act; 6] = [
        |vm| vm.direct(60_000),
        |vm| vm.advance(10_000),
        |vm| vm.set_lvt(ONE_SHOT),
        |vm| vm.migrate(0),
        |vm| vm.host.timer.reset(&mut vm.host.clock),
        |vm| {
            let slot = Some(vm.slot.words());
            vm.host.timer.detach(slot, &mut vm.host.clock);
        },
    ];
    for act in acts {
        let mut vm = Vm::new();
        let _ = vm.set(2_000);
        let _ = vm.set(50_000);
        vm.slot.words().armed.store(0xaaaa, SeqCst);
        vm.slot.words().pending.store(0xbbbb, SeqCst);
        vm.slot.words().tag.store(0xcccc, SeqCst);
        act(&mut vm);
        assert_eq!(words(&vm), [0xaaaa, 0xbbbb, 0xcccc]);
        assert!(!vm.host.timer.is_sharing());
        vm.host.injected.clear();
        vm.set_lvt(UNMASKED);
        vm.direct(70_000);
        vm.advance(80_000);
        assert_eq!(
            vm.host.injected,
            [(70_000, 70_000)],
            "and its own timer works"
        );
        assert_eq!(words(&vm), [0xaaaa, 0xbbbb, 0xcccc]);
    }
}

#[test]
fn a_halted_vcpu_sleeps_through_the_move() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(9_000);
    // Halted. An injection is what would wake it.
    vm.advance(7_000);
    assert_eq!(vm.host.injected, []);
    assert_eq!(vm.host.timer.statistics().moved, 1);
    vm.advance(1_000);
    assert_eq!(vm.host.injected, [(9_000, 9_000)]);
}

#[test]
fn offline_leaves_nothing_armed_and_no_memory_touched() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(3_000);
    vm.detach();
    vm.slot.words().armed.store(0x1234, SeqCst);
    vm.advance(10_000);
    assert_eq!(vm.host.injected, []);
    assert_eq!(vm.armed(), 0x1234);
    vm.attach();
    assert_eq!(vm.armed(), 0);
    assert_eq!(vm.set(20_000), Request::Written);
    vm.advance(20_000);
    assert_eq!(vm.host.injected, [(20_000, 20_000)]);
}

#[test]
fn a_guest_that_lets_go_keeps_its_deadline() {
    for (lazy, deadline) in [(false, 2_000), (true, 5_000)] {
        let mut vm = Vm::new();
        let _ = vm.set(2_000);
        if lazy {
            let _ = vm.set(5_000);
        }
        let slot = Some(vm.slot.words());
        vm.host.timer.detach(slot, &mut vm.host.clock);
        assert_eq!(vm.rdmsr(), deadline);
        vm.slot.words().pending.store(0xffff_ffff, SeqCst);
        vm.advance(10_000);
        assert_eq!(vm.host.injected, [(deadline, deadline)]);
    }
}

/// Sleep: the guest lets go first. The TSC may begin anew.
#[test]
fn suspend_and_resume() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.detach();
    vm.host.clock.tsc = 5;
    vm.attach();
    assert_eq!(vm.set(100), Request::Written);
    vm.advance(1_000);
    assert_eq!(vm.host.injected, [(100, 100)]);
}

#[test]
fn a_new_tsc_offset_arms_anew_or_fires() {
    let mut vm = Vm::new();
    let _ = vm.set(5_000);
    vm.host.clock.tsc = 200;
    vm.host.clock.armed = None;
    vm.host.expire(vm.slot.words());
    assert_eq!(vm.host.clock.armed, Some(5_000), "back: still to come");
    vm.host.clock.tsc = 6_000;
    vm.host.expire(vm.slot.words());
    assert_eq!(vm.host.injected, [(6_000, 5_000)], "ahead: due");
}

#[test]
fn expiries_for_nothing_do_nothing() {
    let mut vm = Vm::new();
    vm.host.expire(vm.slot.words());
    let _ = vm.set(5_000);
    let _ = vm.set(7_000);
    vm.host.expire(vm.slot.words());
    assert_eq!((vm.armed(), vm.host.clock.armed), (5_000, Some(5_000)));
    assert_eq!(vm.host.injected, []);
    assert_eq!(vm.host.timer.statistics().stale, 2);
}

#[test]
fn a_tsc_that_was_changed_unseen_interrupts_and_then_all_is_written() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    let _ = vm.set(9_000);
    // The host's timer has expired, and its idea of the TSC has fallen behind.
    vm.host.clock.tsc = 10;
    let verdict = vm.host.timer.expire_unknown_tsc(Some(vm.slot.words()));
    vm.host.act(verdict);
    assert_eq!(vm.host.injected, [(10, 9_000)]);
    assert_eq!(vm.armed(), 0);
    let writes = vm.host.timer.statistics().writes;
    let _ = vm.set(9_500);
    assert_eq!(vm.host.timer.statistics().writes, writes + 1);
    // Nothing wanted, nothing injected.
    vm.cancel();
    let verdict = vm.host.timer.expire_unknown_tsc(Some(vm.slot.words()));
    assert_eq!(verdict, Verdict::Quiet);
}

#[test]
fn only_a_slot_is_shared() {
    let slot = Slot::new();
    let mut timer = DeadlineTimer::new();
    let refused = timer.attach(slot.words());
    assert_eq!(refused, Err(AttachError::Tag { found: 0 }));
    assert!(!timer.is_sharing());
    slot.words().tag.store(Slot::TAG + 1, SeqCst);
    assert!(timer.attach(slot.words()).is_err(), "another layout");
    slot.words().tag.store(Slot::TAG, SeqCst);
    slot.words().armed.store(77, SeqCst);
    assert_eq!(timer.attach(slot.words()), Ok(()));
    assert_eq!(slot.words().armed.load(SeqCst), 0);
}

#[test]
fn a_reset_forgets_everything_but_the_memory() {
    let mut vm = Vm::new();
    let _ = vm.set(2_000);
    vm.host.timer.reset(&mut vm.host.clock);
    assert_eq!(vm.armed(), 2_000);
    assert_eq!(vm.host.clock.armed, None);
    let verdict = vm.host.timer.write(3_000, None, &mut vm.host.clock);
    assert_eq!(verdict, Verdict::Quiet, "out of reset it counts down");
    assert_eq!(vm.host.clock.armed, None);
}
