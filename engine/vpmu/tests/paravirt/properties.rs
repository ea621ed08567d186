//! Checks that a well-behaved guest finds the counts that it would have counted itself, whatever
//! comes between.

use proptest::prelude::*;
use vpmu::paravirt::{command, word};

use crate::support::{BOTH, CYCLES, Host, Vcpu, nth};

const COUNTERS: u8 = 4;

/// One counter as its guest thinks of it: written from the rules, not from the device.
#[derive(Clone, Copy, Default)]
struct Reference {
    made: bool,
    wanted: bool,
    sampling: bool,
    count: u64,
    next: u64,
    period: u64,
    overflows: u64,
    handled: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Make {
        n: u8,
        sampling: bool,
        left: u64,
        period: u64,
    },
    Want(u8, bool),
    Period(u8, u64),
    Apply,
    Read,
    Freeze,
    Run(u64),
    Handle,
    Inject,
    Preempt,
    Migrate,
    Slice,
}

fn step() -> impl Strategy<Value = Step> {
    let n = 0..COUNTERS;
    prop_oneof![
        3 => (n.clone(), any::<bool>(), 1_u64..300, 1_u64..300)
            .prop_map(|(n, sampling, left, period)| Step::Make { n, sampling, left, period }),
        2 => (n.clone(), any::<bool>()).prop_map(|(n, on)| Step::Want(n, on)),
        2 => (n, 1_u64..300).prop_map(|(n, period)| Step::Period(n, period)),
        3 => Just(Step::Apply),
        2 => Just(Step::Read),
        2 => Just(Step::Freeze),
        8 => (1_u64..1000).prop_map(Step::Run),
        4 => Just(Step::Handle),
        1 => Just(Step::Inject),
        1 => Just(Step::Preempt),
        1 => Just(Step::Migrate),
        1 => Just(Step::Slice),
    ]
}

/// A vCPU and its reference: the wishes that have been applied, and those that have not.
struct Pair {
    vcpu: Vcpu,
    /// The counters as applied.
    now: [Reference; COUNTERS as usize],
    wished: [Option<Reference>; COUNTERS as usize],
    want: u32,
    frozen: bool,
    /// Whether the handler ran, and rang for its NMI to come again.
    late: bool,
}

impl Pair {
    fn new(repeats: bool, late: bool) -> Self {
        let host = Host {
            repeats,
            ..Host::default()
        };
        Self {
            vcpu: Vcpu::new(host),
            now: Default::default(),
            wished: Default::default(),
            want: 0,
            frozen: false,
            late,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Make {
                n,
                sampling,
                left,
                period,
            } => {
                let flags = if sampling {
                    crate::support::SAMPLING
                } else {
                    BOTH
                };
                let vcpu = &mut self.vcpu;
                vcpu.guest
                    .wish(&vcpu.page, nth(n), CYCLES, flags, left, period);
                // The period in force changes at once, which matters where the previous counter
                // overflows first.
                self.now[usize::from(n)].period = period;
                self.wished[usize::from(n)] = Some(Reference {
                    made: true,
                    sampling,
                    next: left,
                    period,
                    ..Reference::default()
                });
            }
            Step::Want(n, on) => {
                self.want = self.want & !(1 << n) | u32::from(on) << n;
                self.vcpu.want(self.want);
            }
            Step::Period(n, period) => {
                // A late report would use the period in force when the report comes.
                if !self.late {
                    self.vcpu.guest_period(n, period);
                    self.now[usize::from(n)].period = period;
                    if let Some(wished) = &mut self.wished[usize::from(n)] {
                        wished.period = period;
                    }
                }
            }
            Step::Apply => self.apply(),
            Step::Read => self.vcpu.ring(command::READ),
            Step::Freeze => {
                self.frozen = true;
                self.vcpu.ring(command::FREEZE);
            }
            Step::Run(events) => self.run(events),
            Step::Handle => self.handle(),
            Step::Inject => {
                // The handler must not run now, so it asks for the NMI again.
                if std::mem::take(&mut self.vcpu.nmi) {
                    self.vcpu.ring(command::INJECT);
                    assert!(self.vcpu.nmi, "not acknowledged, so it comes again");
                }
            }
            Step::Preempt => {
                let vcpu = &mut self.vcpu;
                vcpu.device.put(&mut vcpu.host, Some(&vcpu.page));
                vcpu.run(500);
                vcpu.device.load(&mut vcpu.host, Some(&vcpu.page));
                vcpu.take_nmi();
            }
            Step::Migrate => self.migrate(),
            Step::Slice => {
                let vcpu = &mut self.vcpu;
                vcpu.device.end_slice(&mut vcpu.host, Some(&vcpu.page));
            }
        }
    }

    fn apply(&mut self) {
        self.frozen = false;
        for n in 0..usize::from(COUNTERS) {
            self.now[n].wanted = self.want >> n & 1 != 0;
            if let (true, Some(wished)) = (self.now[n].wanted, self.wished[n]) {
                self.now[n] = Reference {
                    wanted: true,
                    ..wished
                };
                self.wished[n] = None;
            }
        }
        self.vcpu.ring(command::APPLY);
    }

    fn run(&mut self, events: u64) {
        for counter in &mut self.now {
            if !counter.made || !counter.wanted || self.frozen {
                continue;
            }
            counter.count += events;
            while counter.sampling && counter.count >= counter.next {
                counter.next += counter.period;
                counter.overflows += 1;
            }
        }
        if self.late {
            self.vcpu.run_late(events);
        } else {
            self.vcpu.run(events);
        }
    }

    fn handle(&mut self) {
        for n in self.vcpu.handle() {
            let n = n.index();
            self.now[n].handled = self.now[n].overflows;
        }
    }

    fn migrate(&mut self) {
        let vcpu = &mut self.vcpu;
        let state = vcpu.device.save(&mut vcpu.host, Some(&vcpu.page));
        let there = Host {
            repeats: vcpu.host.repeats,
            ..Host::default()
        };
        let mut device = vpmu::paravirt::Device::new(crate::support::offer()).unwrap();
        vcpu.host = there;
        device
            .restore(&state, &mut vcpu.host, Some(&vcpu.page))
            .unwrap();
        vcpu.device = device;
        vcpu.take_nmi();
    }

    /// Checks that the page has all counts, and that each overflow was announced.
    fn check(&mut self) {
        self.vcpu.ring(command::READ);
        self.handle();
        for (n, counter) in (0..).zip(&self.now) {
            if !counter.made {
                continue;
            }
            assert_eq!(self.vcpu.count_of(n), counter.count, "count of {n}");
            if counter.sampling {
                assert_eq!(
                    self.vcpu.word(word::overflows(nth(n))),
                    counter.overflows,
                    "overflows of {n}"
                );
                assert_eq!(
                    self.vcpu.word(word::next(nth(n))),
                    counter.next,
                    "next of {n}"
                );
            }
            let seen = self.wished[usize::from(n)].is_none();
            if seen {
                assert_eq!(counter.handled, counter.overflows, "announced of {n}");
            }
        }
        assert!(!self.vcpu.nmi, "handled");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn a_guest_finds_what_it_counted(
        repeats in any::<bool>(),
        late in any::<bool>(),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut pair = Pair::new(repeats, late);
        for step in steps {
            pair.step(step);
        }
        pair.check();
    }
}
