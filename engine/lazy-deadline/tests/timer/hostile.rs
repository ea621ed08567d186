//! A guest that writes anything into its slot, at any time.

use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};

use proptest::prelude::*;

use crate::machine::Vm;
use lazy_deadline::{DeadlineTimer, HostTimer, LvtTimer, Slot, Verdict};

#[derive(Clone, Debug)]
enum Step {
    Scribble(u8, u64),
    Write(u64),
    Advance(u64),
    Expire,
    Read,
    Lvt(u32),
    Attach,
    Detach,
    Migrate,
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => any::<u64>(),
        3 => 0..5_000_u64,
        1 => Just(0),
        1 => Just(u64::MAX),
        1 => Just(Slot::TAG),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3_u8, value()).prop_map(|(word, value)| Step::Scribble(word, value)),
        2 => Just(Step::Scribble(2, Slot::TAG)),
        6 => value().prop_map(Step::Write),
        6 => (0..500_u64).prop_map(Step::Advance),
        2 => Just(Step::Expire),
        2 => Just(Step::Read),
        1 => any::<u32>().prop_map(Step::Lvt),
        2 => Just(Step::Lvt(0x4_00ec)),
        2 => Just(Step::Attach),
        1 => Just(Step::Detach),
        1 => Just(Step::Migrate),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// No panic, and of the host's work no more than the guest's own exits and the floor allow.
    #[test]
    fn nonsense_hurts_only_itself(
        floor in 1..100_u64,
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut vm = Vm::new();
        vm.host.timer = vm.host.timer.clone().with_floor(floor);
        let begin = vm.now();
        let mut exits = 0;
        let mut arms = 0;
        for step in steps {
            let slot = vm.slot.words();
            exits += 1;
            match step {
                Step::Scribble(word, value) => {
                    exits -= 1;
                    let word = [slot.armed, slot.pending, slot.tag][usize::from(word)];
                    word.store(value, SeqCst);
                }
                Step::Write(value) => vm.direct(value),
                Step::Advance(ticks) => {
                    exits -= 1;
                    vm.advance(ticks);
                }
                Step::Expire => vm.host.expire(slot),
                Step::Read => {
                    let _ = vm.rdmsr();
                }
                Step::Lvt(register) => vm.set_lvt(register),
                Step::Attach => {
                    let _ = vm.host.timer.attach(slot);
                }
                Step::Detach => vm.host.timer.detach(Some(slot), &mut vm.host.clock),
                Step::Migrate => {
                    arms += vm.host.clock.arms;
                    vm.migrate(0);
                    vm.host.timer = vm.host.timer.clone().with_floor(floor);
                }
            }
            let arms = arms + vm.host.clock.arms;
            prop_assert!(
                arms <= exits + (vm.now() - begin) / floor + 1,
                "{arms} timers armed for {exits} exits"
            );
            for &(when, deadline) in &vm.host.injected {
                prop_assert!(deadline <= when);
            }
        }
    }
}

/// Another vCPU of the guest scribbles while this one's timer works, for real.
#[test]
fn a_slot_that_never_holds_still() {
    struct Clock(u64);
    impl HostTimer for Clock {
        fn now(&mut self) -> u64 {
            self.0
        }
        fn host_clock(&mut self) -> u64 {
            self.0
        }
        fn arm(&mut self, _: u64) {}
        fn disarm(&mut self) {}
    }
    let slot = Slot::new();
    let done = AtomicBool::new(false);
    let seed = AtomicU64::new(1);
    slot.words().tag.store(Slot::TAG, SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                let n = seed
                    .fetch_add(1, SeqCst)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15);
                slot.words().pending.store(n >> (n & 63), SeqCst);
                slot.words().armed.store(n, SeqCst);
            }
        });
        let mut clock = Clock(1);
        let mut timer = DeadlineTimer::new();
        timer.set_lvt(LvtTimer::decode(0x4_00ec), None, &mut clock);
        timer.attach(slot.words()).expect("a slot");
        for n in 1..20_000_u64 {
            let value = slot.words().pending.load(SeqCst);
            for verdict in [
                timer.write(value, Some(slot.words()), &mut clock),
                timer.expire(Some(slot.words()), &mut clock),
            ] {
                if let Verdict::Inject(deadline) = verdict {
                    assert!(deadline <= clock.0);
                }
            }
            clock.0 = n * n;
        }
        done.store(true, SeqCst);
    });
}
