//! Random guests: what is lazy interrupts as a plain timer does.

use std::collections::VecDeque;

use proptest::prelude::*;

use crate::machine::Vm;
use crate::plain::PlainTimer;
use lazy_deadline::{GuestCpu, GuestOnlyTimer, Interrupt, LvtTimer, Request};

fn cases() -> u32 {
    let from_outside = std::env::var("PROPTEST_CASES").ok();
    from_outside
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(500)
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

/// Distances, mostly such that deadlines and steps of time meet.
fn ticks() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..60_u64, 2 => 0..1_000_u64, 1 => 0..1_u64 << 40]
}

#[derive(Clone, Debug)]
enum Step {
    /// A deadline so far ahead.
    Set(u64),
    /// A deadline so far back.
    SetPast(u64),
    /// The deadline in force once more.
    SetAgain,
    Cancel,
    Disarm,
    Advance(u64),
    /// A write by somebody who does not know the slot.
    Direct(u64),
    Lvt(u32),
    Stray,
    /// The TSC jumps ahead.
    Jump(u64),
    Migrate(u64),
    Detach,
    Attach,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        24 => ticks().prop_map(Step::Set),
        3 => (0..50_u64).prop_map(Step::SetPast),
        2 => Just(Step::SetAgain),
        3 => Just(Step::Cancel),
        2 => Just(Step::Disarm),
        16 => ticks().prop_map(Step::Advance),
        2 => ticks().prop_map(Step::Direct),
        3 => prop_oneof![Just(0x4_00ec), Just(0x5_00ec), Just(0xec), Just(0x2_00ec)]
            .prop_map(Step::Lvt),
        2 => Just(Step::Lvt(0x4_00ec)),
        2 => Just(Step::Stray),
        1 => ticks().prop_map(Step::Jump),
        1 => ticks().prop_map(Step::Migrate),
        1 => Just(Step::Detach),
        2 => Just(Step::Attach),
    ]
}

/// A guest on both timers.
struct Pair {
    vm: Vm,
    plain: PlainTimer,
    attached: bool,
    /// The deadline in force was set by somebody who does not know the slot: it is not ours to
    /// cancel without an exit.
    foreign: bool,
}

impl Pair {
    fn new() -> Self {
        Self {
            vm: Vm::new(),
            plain: PlainTimer::new(),
            attached: true,
            foreign: false,
        }
    }

    fn set(&mut self, deadline: u64) {
        self.foreign = !self.attached;
        if self.attached {
            let before = self.vm.host.timer.statistics().writes;
            let request = self.vm.set(deadline);
            let exits = self.vm.host.timer.statistics().writes - before;
            assert_eq!(exits, u64::from(request == Request::Written));
        } else {
            self.vm.direct(deadline);
        }
        self.plain.write(self.vm.now(), deadline);
    }

    fn step(&mut self, step: &Step) {
        let now = self.vm.now();
        match *step {
            Step::Set(ticks) => self.set(now + ticks),
            Step::SetPast(ticks) => self.set(now.saturating_sub(ticks).max(1)),
            Step::SetAgain => self.set(self.plain.deadline),
            Step::Cancel if self.attached && !self.foreign => {
                self.vm.cancel();
                self.plain.write(now, 0);
            }
            Step::Cancel | Step::Disarm => self.set(0),
            Step::Advance(ticks) => {
                self.vm.advance(ticks);
                self.plain.advance(now, now + ticks);
            }
            Step::Direct(ticks) => {
                // The one thing a stranger cannot do: ask once more for the very tick that has just
                // fired from the slot.
                let deadline = now + ticks;
                let state = self.vm.host.timer.save(Some(self.vm.slot.words()));
                if deadline != state.fired {
                    self.foreign = true;
                    self.vm.direct(deadline);
                    self.plain.write(now, deadline);
                }
            }
            Step::Lvt(register) => {
                self.vm.set_lvt(register);
                self.plain.set_lvt(LvtTimer::decode(register));
            }
            Step::Stray => self.vm.host.expire(self.vm.slot.words()),
            Step::Jump(ticks) => {
                self.vm.host.clock.tsc = now + ticks;
                self.vm.host.clock.armed = None;
                self.vm.host.expire(self.vm.slot.words());
                self.plain.advance(now + ticks, now + ticks);
            }
            Step::Migrate(ticks) => {
                self.vm.migrate(ticks);
                self.plain.advance(now + ticks, now + ticks);
            }
            Step::Detach => {
                if self.attached {
                    self.vm.detach();
                    self.plain.write(now, 0);
                    self.attached = false;
                }
            }
            Step::Attach => {
                if !self.attached {
                    self.vm.attach();
                    self.attached = true;
                }
            }
        }
        assert_eq!(self.vm.host.injected, self.plain.fired, "after {step:?}");
        assert_eq!(self.vm.rdmsr(), self.plain.deadline, "after {step:?}");
    }
}

proptest! {
    #![proptest_config(config())]

    /// The same interrupts at the same times, and the same RDMSR after each step.
    #[test]
    fn paravirtual_is_plain(steps in prop::collection::vec(step(), 1..120)) {
        let mut pair = Pair::new();
        for step in &steps {
            pair.step(step);
        }
        pair.step(&Step::Advance(1 << 41));
    }

    /// With a host that is late: each deadline that is not replaced before its time fires once, and
    /// never later than the host is late.
    #[test]
    fn paravirtual_on_a_late_host(
        late in 0..40_u64,
        floor in 0..40_u64,
        steps in prop::collection::vec((ticks(), ticks(), 0..10_u8), 1..100),
    ) {
        let mut vm = Vm::new();
        vm.host.clock.late = late;
        vm.host.timer = vm.host.timer.clone().with_floor(floor);
        let mut wanted;
        let seen = |vm: &mut Vm, wanted: &mut u64| {
            for (when, deadline) in std::mem::take(&mut vm.host.injected) {
                assert_eq!(deadline, *wanted, "fired something else, or twice");
                assert!(deadline <= when, "fired before its time");
                *wanted = 0;
            }
        };
        for (ahead, wait, kind) in steps {
            let deadline = vm.now() + ahead;
            match kind {
                0 => {
                    vm.cancel();
                    wanted = 0;
                }
                1 => {
                    let _ = vm.set(0);
                    wanted = 0;
                }
                _ => {
                    wanted = deadline;
                    let _ = vm.set(deadline);
                }
            }
            seen(&mut vm, &mut wanted);
            vm.advance(wait);
            seen(&mut vm, &mut wanted);
            // A read that comes late moves the timer, and that expiry may be late again; a move
            // that the budget has no token for is ten floors long.
            prop_assert!(
                wanted == 0 || vm.now() <= wanted + 2 * late + 10 * floor,
                "lost: {wanted} at {}", vm.now()
            );
        }
    }
}

/// A CPU that works as the manual says, and the driver on it.
struct Bare {
    tsc: u64,
    msr: u64,
    /// The local APIC has accepted an interrupt.
    irr: bool,
    /// How many ticks before its time the timer fires, on a hypervisor with another clock.
    early: u64,
}

impl Bare {
    fn tick(&mut self) {
        if self.msr != 0 && self.msr <= self.tsc.saturating_add(self.early) {
            self.msr = 0;
            self.irr = true;
        }
    }
}

impl GuestCpu for Bare {
    fn tsc(&mut self) -> u64 {
        self.tsc
    }
    fn write_deadline(&mut self, deadline: u64) {
        self.msr = deadline;
        self.tick();
    }
}

#[derive(Clone, Debug)]
enum BareStep {
    Set(u64),
    SetPast(u64),
    Cancel,
    Disarm,
    Advance(u64),
    /// Interrupts off, or on.
    Enable(bool),
    /// Sleep: everything is lost, and the TSC is somewhere.
    Sleep(u64),
}

fn bare_step() -> impl Strategy<Value = BareStep> {
    prop_oneof![
        20 => ticks().prop_map(BareStep::Set),
        3 => (0..50_u64).prop_map(BareStep::SetPast),
        2 => Just(BareStep::Cancel),
        2 => Just(BareStep::Disarm),
        16 => ticks().prop_map(BareStep::Advance),
        4 => any::<bool>().prop_map(BareStep::Enable),
        1 => ticks().prop_map(BareStep::Sleep),
    ]
}

proptest! {
    #![proptest_config(config())]

    /// The handler runs at each deadline that is not replaced before it, when interrupts are on.
    #[test]
    fn guest_only_runs_its_handler_when_due(
        early in prop_oneof![Just(0), 0..4_u64],
        steps in prop::collection::vec(bare_step(), 1..120),
    ) {
        let mut cpu = Bare { tsc: 1_000, msr: 0, irr: false, early };
        let mut timer = GuestOnlyTimer::new();
        let (mut enabled, mut wanted) = (true, 0_u64);
        let (mut ran, mut due) = (VecDeque::new(), VecDeque::new());
        for step in steps {
            let mut end = cpu.tsc;
            match step {
                BareStep::Set(ticks) => {
                    wanted = cpu.tsc + ticks;
                    let _ = timer.set(wanted, &mut cpu);
                }
                BareStep::SetPast(ticks) => {
                    wanted = cpu.tsc.saturating_sub(ticks).max(1);
                    let _ = timer.set(wanted, &mut cpu);
                }
                BareStep::Cancel => {
                    wanted = 0;
                    timer.cancel();
                }
                BareStep::Disarm => {
                    wanted = 0;
                    let _ = timer.set(0, &mut cpu);
                }
                BareStep::Advance(ticks) => end = cpu.tsc + ticks,
                BareStep::Enable(on) => enabled = on,
                BareStep::Sleep(tsc) => {
                    cpu = Bare { tsc: tsc + 1, msr: 0, irr: false, early };
                    end = cpu.tsc;
                    wanted = 0;
                    timer.forget();
                }
            }
            if enabled && wanted != 0 && wanted <= end {
                due.push_back(wanted.max(cpu.tsc));
                wanted = 0;
            }
            loop {
                cpu.tick();
                if enabled && std::mem::take(&mut cpu.irr) {
                    if timer.interrupt(&mut cpu) == Interrupt::Run {
                        ran.push_back(cpu.tsc);
                    } else if cpu.tsc < end {
                        cpu.tsc += 1;
                    } else {
                        break;
                    }
                } else if cpu.msr != 0 && cpu.msr.saturating_sub(early) <= end {
                    cpu.tsc = cpu.tsc.max(cpu.msr.saturating_sub(early));
                } else {
                    break;
                }
            }
            cpu.tsc = end;
            prop_assert_eq!(&ran, &due);
            prop_assert_eq!(timer.deadline(), wanted);
        }
    }
}
