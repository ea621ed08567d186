//! The promise of `with_floor`: how often a guest has the host move its timer without an exit.

use std::sync::atomic::Ordering::SeqCst;

use proptest::prelude::*;

use crate::machine::Vm;
use lazy_deadline::DeadlineTimer;

const FLOOR: u64 = 20;
/// What the documentation says: moves at once, and ticks for each move after them.
const BURST: u64 = 16;
const INTERVAL: u64 = 10 * FLOOR;

/// What a guest does about its timer.
#[derive(Clone, Debug)]
enum Step {
    /// Wants a deadline so far from now, and sleeps so long, so many times.
    Want { ahead: u64, sleep: u64, times: u8 },
    /// Keeps the deadline so far ahead of the armed time, at each expiry, so many times: what a
    /// guest has that polls its slot.
    Chase { ahead: u64, times: u8 },
    /// Writes its register: an exit.
    Write { ahead: u64 },
    /// Sets its TSC, and then writes its register, as it has to: two exits.
    SetTsc { tsc: u64, ahead: u64 },
    /// Lets go of its slot and shares it anew: exits.
    ShareAnew,
}

fn near() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 1..=2 * FLOOR,
        2 => FLOOR..=2 * INTERVAL,
        1 => 0..10_000_u64,
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (near(), near(), 1..60_u8)
            .prop_map(|(ahead, sleep, times)| Step::Want { ahead, sleep, times }),
        6 => (near(), 1..60_u8).prop_map(|(ahead, times)| Step::Chase { ahead, times }),
        3 => near().prop_map(|ahead| Step::Write { ahead }),
        1 => (prop_oneof![0..5_000_u64, Just(1 << 50)], near())
            .prop_map(|(tsc, ahead)| Step::SetTsc { tsc, ahead }),
        1 => Just(Step::ShareAnew),
    ]
}

/// A guest, and when on the host's clock its timer was moved and it has exited.
struct Watched {
    vm: Vm,
    moves: Vec<u64>,
    exits: Vec<u64>,
}

impl Watched {
    fn new(age: u64) -> Self {
        let mut vm = Vm::new();
        vm.host.timer = DeadlineTimer::new().with_floor(FLOOR);
        vm.host.clock.tsc += age;
        vm.set_lvt(0x4_00ec);
        vm.attach();
        Self {
            vm,
            moves: Vec::new(),
            exits: Vec::new(),
        }
    }

    fn host_time(&self) -> u64 {
        self.vm
            .host
            .clock
            .tsc
            .wrapping_sub(self.vm.host.clock.offset)
    }

    fn exit(&mut self) {
        self.exits.push(self.host_time());
    }

    fn want(&mut self, deadline: u64) {
        self.vm.slot.words().pending.store(deadline, SeqCst);
    }

    fn write(&mut self, ahead: u64) {
        self.exit();
        let deadline = self.vm.now() + ahead;
        self.want(deadline);
        self.vm.direct(deadline);
    }

    /// Lets time pass, expiry by expiry. Before each expiry the guest wants `chase` after it.
    fn run(&mut self, to: u64, chase: Option<u64>) {
        while let Some(at) = self.vm.host.clock.armed.filter(|&at| at <= to) {
            if let Some(ahead) = chase {
                self.want(at + ahead);
            }
            let before = self.vm.host.timer.statistics().moved;
            self.vm.host.advance_to_expiry(self.vm.slot.words());
            if self.vm.host.timer.statistics().moved > before {
                self.moves.push(self.host_time());
            }
        }
        self.vm.host.clock.tsc = self.vm.host.clock.tsc.max(to);
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Want {
                ahead,
                sleep,
                times,
            } => {
                for _ in 0..times {
                    let now = self.vm.now();
                    self.want(now + ahead);
                    self.run(now + sleep, None);
                }
            }
            Step::Chase { ahead, times } => {
                if self.vm.host.clock.armed.is_none() {
                    self.write(ahead);
                }
                for _ in 0..times {
                    let Some(at) = self.vm.host.clock.armed else {
                        break;
                    };
                    self.run(at, Some(ahead));
                }
            }
            Step::Write { ahead } => self.write(ahead),
            Step::SetTsc { tsc, ahead } => {
                let clock = &mut self.vm.host.clock;
                clock.offset = clock.offset.wrapping_add(tsc.wrapping_sub(clock.tsc));
                clock.tsc = tsc;
                self.exit();
                self.write(ahead);
            }
            Step::ShareAnew => {
                self.vm.detach();
                self.exit();
                self.vm.attach();
                self.exit();
            }
        }
    }

    /// In each span from a move to a later one.
    fn check(&self) {
        for (first, &from) in self.moves.iter().enumerate() {
            for (last, &to) in self.moves.iter().enumerate().skip(first + 1) {
                let moves = (last - first) as u64;
                let exits = self.exits.iter().filter(|&&at| from <= at && at <= to);
                let promised = BURST + (to - from) / INTERVAL + exits.count() as u64;
                assert!(
                    moves <= promised,
                    "{moves} moves in {} ticks, {promised} promised: {:?}",
                    to - from,
                    &self.moves[first..=last]
                );
            }
        }
        for pair in self.moves.windows(2) {
            let alone = !self.exits.iter().any(|at| (pair[0]..=pair[1]).contains(at));
            assert!(!alone || pair[1] - pair[0] >= FLOOR, "{pair:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever the guest stores, writes and sets, and whatever the host's age.
    #[test]
    fn no_order_of_moves_passes_the_limit(
        age in prop_oneof![Just(0_u64), 0..1_u64 << 50],
        steps in prop::collection::vec(step(), 1..12),
    ) {
        let mut watched = Watched::new(age);
        for step in &steps {
            watched.step(step);
        }
        watched.check();
    }
}

/// Short moves and long ones in turns: 1,000 of them in the time of 1,000.
#[test]
fn long_moves_pay_for_no_short_ones() {
    let mut watched = Watched::new(0);
    watched.write(FLOOR);
    for _ in 0..500 {
        for ahead in [FLOOR, INTERVAL] {
            watched.step(&Step::Chase { ahead, times: 1 });
        }
    }
    watched.check();
    assert_eq!(watched.moves.len(), 1_000);
    let took = watched.moves[999] - watched.moves[0];
    assert!(took >= (1_000 - BURST) * INTERVAL, "{took}");
}

/// A patient guest is followed to the very tick, a hurried one is late by an interval at most.
#[test]
fn a_guest_that_hurries_is_followed_less_closely() {
    let mut watched = Watched::new(0);
    watched.write(FLOOR);
    for _ in 0..40 {
        watched.step(&Step::Chase {
            ahead: FLOOR + 1,
            times: 1,
        });
    }
    let apart: Vec<u64> = watched
        .moves
        .windows(2)
        .map(|two| two[1] - two[0])
        .collect();
    assert_eq!(apart[..15], [FLOOR + 1; 15]);
    assert!(
        apart[20..].iter().all(|&ticks| ticks == INTERVAL),
        "{apart:?}"
    );
    let mut watched = Watched::new(0);
    watched.write(FLOOR);
    for _ in 0..40 {
        watched.step(&Step::Chase {
            ahead: INTERVAL + 1,
            times: 1,
        });
    }
    assert!(
        watched
            .moves
            .windows(2)
            .all(|two| two[1] - two[0] == INTERVAL + 1)
    );
}
