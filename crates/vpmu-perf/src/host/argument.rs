//! Guests on a host whose kernel is a fake one, beside ideal counters: a count may be missing only where the counter
//! says that it is lost.

use proptest::prelude::*;
use vpmu::counter::{CounterState, Policy, Report};
use vpmu::x86::Outcome;
use vpmu::x86::intel::{Capability, Pmu, PmuConfig, Version};

use super::*;
use crate::fake::{Fake, Machine, TICK, happened};

const EVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const OVF_CTRL: u32 = 0x390;
const MASK: u64 = (1 << 48) - 1;
const GENERAL: u8 = 4;
/// OS, USR, INT, EN.
const ENABLED: u64 = 1 << 16 | 1 << 17 | 1 << 20 | 1 << 22;
/// Event selects, and how often each happens in a ms of the guest's.
const CYCLES: (u64, u64) = (0x003c, 3_000_000);
/// The same on a clock: cycles of 1 GHz.
const CLOCK: (u64, u64) = (0x003c, 1_000_000);
const BRANCH_MISSES: (u64, u64) = (0x00c5, 5_000);
const LLC_MISSES: (u64, u64) = (0x412e, 20);
const EVENTS: [(u64, u64); 4] = [CYCLES, (0x00c4, 400_000), BRANCH_MISSES, LLC_MISSES];

fn options(backing: Backing, repeating: bool) -> PerfOptions {
    PerfOptions {
        tsc_hz: 1_000_000_000,
        backing: Some(backing),
        kick: Kick::Nothing,
        repeating,
        ..PerfOptions::default()
    }
}

/// A vCPU, and the counters as they should be.
struct Vcpu {
    kernel: &'static Fake,
    host: PerfHost,
    pmu: Pmu,
    running: bool,
    /// Each counter's event, its value at a moment of the guest's, and that moment.
    ideal: [Option<(u64, u64, u64)>; GENERAL as usize],
    /// Counters that should have overflowed since their status was cleared.
    overflowed: u64,
    pmis: u64,
}

impl Vcpu {
    fn new(machine: Machine, policy: Policy, repeating: bool) -> Self {
        Self::backed(Backing::Hardware, machine, policy, repeating)
    }

    fn backed(backing: Backing, machine: Machine, policy: Policy, repeating: bool) -> Self {
        let kernel = Fake::new(machine);
        let config = PmuConfig {
            policy,
            ..PmuConfig::new(Capability::new(Version::V2))
        };
        Self {
            kernel,
            host: PerfHost::counting(kernel, options(backing, repeating), true).unwrap(),
            pmu: Pmu::new(config).unwrap(),
            running: false,
            ideal: [None; GENERAL as usize],
            overflowed: 0,
            pmis: 0,
        }
    }

    fn write(&mut self, msr: u32, value: u64) {
        assert_eq!(
            self.pmu.wrmsr(msr, value, &mut self.host),
            Outcome::Done,
            "{msr:#x}"
        );
    }

    fn read(&mut self, msr: u32) -> u64 {
        match self.pmu.rdmsr(msr, &mut self.host) {
            Outcome::Value(value) => value,
            other => panic!("{msr:#x}: {other:?}"),
        }
    }

    /// Has counter `n` count `event`, `left` events from its overflow.
    fn program(&mut self, n: u8, (select, rate): (u64, u64), left: u64) {
        self.write(EVTSEL0 + u32::from(n), select | ENABLED);
        self.rewrite(n, left, rate);
    }

    fn rewrite(&mut self, n: u8, left: u64, rate: u64) {
        let value = (MASK + 1 - left) & MASK;
        self.write(PMC0 + u32::from(n), value);
        self.ideal[usize::from(n)] = Some((rate, value, self.kernel.guest()));
    }

    fn start(&mut self) {
        let now = self.kernel.guest();
        self.ideal
            .iter_mut()
            .flatten()
            .for_each(|ideal| ideal.2 = now);
        self.running = true;
        self.write(GLOBAL_CTRL, (1 << GENERAL) - 1);
    }

    fn stop(&mut self) {
        self.write(GLOBAL_CTRL, 0);
        self.advance();
        self.running = false;
    }

    /// Brings the ideal counters to this moment.
    fn advance(&mut self) {
        let now = self.kernel.guest();
        for (n, ideal) in self.ideal.iter_mut().enumerate() {
            if let Some((rate, value, since)) = ideal
                && self.running
            {
                *value += happened(now, *rate) - happened(*since, *rate);
                *since = now;
                if *value > MASK {
                    *value &= MASK;
                    self.overflowed |= 1 << n;
                }
            }
        }
    }

    /// Runs the guest for so many ns, with its VMM's loop: overflows are taken at each exit.
    fn run(&mut self, ns: u64, left: [u64; GENERAL as usize]) {
        let mut ran = 0;
        while ran < ns {
            ran += self.kernel.run(ns - ran);
            for (counter, report) in self.host.take_overflows() {
                self.pmu.overflow(counter, report, &mut self.host);
            }
            if self.pmu.take_pmi() {
                self.pmis += 1;
                self.handle(left);
            }
        }
    }

    /// The guest's handler: stops, finds out who it was, and starts each of them anew.
    fn handle(&mut self, left: [u64; GENERAL as usize]) {
        self.stop();
        self.check();
        let status = self.read(GLOBAL_STATUS);
        self.write(OVF_CTRL, status);
        self.overflowed &= !status;
        for n in 0..GENERAL {
            if status >> n & 1 != 0
                && let Some((rate, ..)) = self.ideal[usize::from(n)]
            {
                self.rewrite(n, left[usize::from(n)], rate);
            }
        }
        self.start();
    }

    fn state(&self, n: u8) -> Option<CounterState> {
        self.pmu.counter_state(Counter::new(n)?)
    }

    /// Compares each counter that does not say that it is lost with its ideal. The counters stand still.
    fn check(&mut self) {
        let status = self.read(GLOBAL_STATUS);
        for n in 0..GENERAL {
            let value = self.read(PMC0 + u32::from(n));
            let Some((rate, ideal, _)) = self.ideal[usize::from(n)] else {
                continue;
            };
            if matches!(self.state(n), Some(CounterState::Lost(_))) {
                // What is lost stays lost: the ideal goes on from there.
                self.ideal[usize::from(n)] = Some((rate, value, self.kernel.guest()));
                self.overflowed = self.overflowed & !(1 << n) | status & 1 << n;
                continue;
            }
            assert_eq!(value, ideal, "counter {n} of {rate}");
            assert_eq!(
                status >> n & 1,
                self.overflowed >> n & 1,
                "overflow of {n}, {rate}"
            );
        }
    }
}

fn machines() -> impl Strategy<Value = Machine> {
    (
        1..=8_usize,
        0..=3_usize,
        prop_oneof![Just(400), 2..40_u64],
        0..100_000_u64,
        prop_oneof![Just(u64::MAX), 1..10_u64],
        prop_oneof![Just(100), 1..8_usize],
    )
        .prop_map(
            |(counters, pinned, per_tick, latency, full_each, descriptors)| Machine {
                counters,
                pinned: pinned.min(counters),
                per_tick,
                latency,
                full_each,
                descriptors,
                ..Machine::default()
            },
        )
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Run(u64),
    Stop(u64),
    Program(u8, usize),
    Slice,
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..3 * TICK).prop_map(Step::Run),
        1 => (1..3 * TICK).prop_map(Step::Stop),
        1 => (0..GENERAL, 0..EVENTS.len()).prop_map(|(n, event)| Step::Program(n, event)),
        1 => Just(Step::Slice),
    ]
}

proptest! {
    #[test]
    fn no_count_is_wrong_without_a_word(
        machine in machines(),
        backing in prop::sample::select(vec![Backing::Hardware, Backing::Clock]),
        policy in prop::sample::select(Policy::ALL.to_vec()),
        repeating: bool,
        first in prop::collection::vec((0..EVENTS.len(), 1..2_000_000_u64), 1..=4),
        steps in prop::collection::vec(steps(), 1..12),
    ) {
        let mut vcpu = Vcpu::backed(backing, machine, policy, repeating);
        let kinds = match backing {
            Backing::Hardware => EVENTS,
            Backing::Clock => [CLOCK; 4],
        };
        let mut left = [1_000_000; GENERAL as usize];
        vcpu.pmu.load(&mut vcpu.host);
        for (n, &(event, distance)) in (0..).zip(&first) {
            left[usize::from(n)] = distance;
            vcpu.program(n, kinds[event], distance);
        }
        vcpu.start();
        for step in steps {
            match step {
                Step::Run(ns) => vcpu.run(ns, left),
                Step::Stop(ns) => {
                    vcpu.stop();
                    vcpu.check();
                    vcpu.kernel.pass(ns);
                    vcpu.start();
                }
                Step::Program(n, event) => {
                    vcpu.stop();
                    vcpu.check();
                    vcpu.program(n, kinds[event], left[usize::from(n)]);
                    vcpu.start();
                }
                Step::Slice => {
                    vcpu.pmu.put(&mut vcpu.host);
                    vcpu.kernel.pass(TICK);
                    vcpu.pmu.load(&mut vcpu.host);
                }
            }
        }
        vcpu.stop();
        vcpu.check();
        // Each overflow has been told by now: one that was found out by the stop is a PMI, too.
        if vcpu.read(GLOBAL_STATUS) != 0 {
            prop_assert!(vcpu.pmu.take_pmi());
        }
    }
}

#[test]
fn each_sample_of_a_rare_event_is_had_without_a_longer_period() {
    for repeating in [false, true] {
        let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, repeating);
        vcpu.pmu.load(&mut vcpu.host);
        vcpu.program(0, LLC_MISSES, 1000);
        vcpu.start();
        // 20,000 events a second, and a sample for each thousandth.
        vcpu.run(5_000_000_000, [1000; 4]);
        assert_eq!(
            vcpu.pmis, 99,
            "the handler takes some of an event each time"
        );
    }
}

#[test]
fn a_storm_takes_no_more_of_the_host_than_its_bound() {
    for repeating in [false, true] {
        let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, repeating);
        vcpu.pmu.load(&mut vcpu.host);
        for n in 0..GENERAL {
            vcpu.program(n, CYCLES, 1);
        }
        vcpu.start();
        let before = vcpu.kernel.host();
        vcpu.run(2_000_000_000, [1; 4]);
        let after = vcpu.kernel.host();
        let (time, interrupts) = (after.0 - before.0, after.1 - before.1);
        // An interrupt takes 1000 ns, so one each FLOOR ns is a fiftieth of the time.
        assert!(interrupts * 1000 / time <= 22, "{interrupts} of {time} ns");
    }
}

#[test]
fn a_full_queue_of_signals_costs_no_interrupt() {
    for backing in [Backing::Hardware, Backing::Clock] {
        let machine = Machine {
            full_each: 1,
            latency: 0,
            ..Machine::default()
        };
        let mut vcpu = Vcpu::backed(backing, machine, Policy::ReusePaused, false);
        vcpu.pmu.load(&mut vcpu.host);
        vcpu.program(0, CLOCK, 1_000_000);
        vcpu.ideal = [None; 4];
        let mut pmis = 0;
        vcpu.start();
        for _ in 0..100 {
            vcpu.kernel.run(1_000_000);
            for (counter, report) in vcpu.host.take_overflows() {
                assert_eq!(report, Report::Unsure, "nobody vouches for it");
                vcpu.pmu.overflow(counter, report, &mut vcpu.host);
            }
            if vcpu.pmu.take_pmi() {
                pmis += 1;
                vcpu.write(PMC0, MASK + 1 - 1_000_000);
            }
        }
        // The hardware's cycles are three times as many.
        assert!(pmis >= 99, "{backing:?}: {pmis}");
    }
}

#[test]
fn a_report_of_a_longer_period_vouches_for_nothing() {
    let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, true);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 10);
    vcpu.start();
    for _ in 0..10 {
        vcpu.kernel.run(TICK);
        for (counter, report) in vcpu.host.take_overflows() {
            assert_eq!(report, Report::Unsure);
            vcpu.pmu.overflow(counter, report, &mut vcpu.host);
        }
    }
}

#[test]
fn there_are_as_many_counters_as_others_have_left() {
    for (counters, pinned, free) in [(8, 0, 8), (4, 0, 4), (4, 2, 2), (2, 1, 1), (3, 3, 0)] {
        let kernel = Fake::new(Machine {
            counters,
            pinned,
            ..Machine::default()
        });
        let chooser = Chooser::new(kernel, None, true, false).unwrap();
        match free {
            0 => assert_eq!(chooser.backing, Backing::Clock, "{pinned} of {counters}"),
            free => assert_eq!(
                chooser.free_counters(),
                Some(free),
                "{pinned} of {counters}"
            ),
        }
        assert_eq!(kernel.open_events(), 0, "nothing stays open");
    }
}

#[test]
fn a_counter_that_shares_says_for_how_long_it_has_counted() {
    let machine = Machine {
        counters: 1,
        ..Machine::default()
    };
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, false);
    vcpu.pmu.load(&mut vcpu.host);
    for n in 0..2 {
        vcpu.program(n, BRANCH_MISSES, 1 << 40);
    }
    vcpu.start();
    vcpu.run(100 * TICK, [1 << 40; 4]);
    vcpu.stop();
    for n in 0..2 {
        let lost = CounterState::Lost(Lost::Multiplexed);
        assert_eq!(vcpu.state(n), Some(lost));
        let (counted, of) = vcpu.host.times(Counter::new(n).unwrap()).unwrap();
        assert!(
            (45..=55).contains(&(100 * counted / of)),
            "{counted} of {of}"
        );
    }
}

#[test]
fn a_throttled_counter_is_lost_and_goes_on() {
    let machine = Machine {
        per_tick: 5,
        ..Machine::default()
    };
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, true);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 30_000);
    vcpu.start();
    vcpu.run(10 * TICK, [30_000; 4]);
    vcpu.stop();
    let lost = CounterState::Lost(Lost::Throttled);
    assert_eq!(vcpu.state(0), Some(lost));
    // Five overflows and then nothing until the tick would be 51. It goes on as soon as that is seen.
    assert!(vcpu.pmis > 100, "{}", vcpu.pmis);
}

#[test]
fn another_vms_mediated_pmu_is_waited_for() {
    let machine = Machine {
        mediated: true,
        ..Machine::default()
    };
    // Without a choice the host has hardware, too: a clock would be something else, and silently so.
    let chooser = Chooser::new(Fake::new(machine), None, true, false).unwrap();
    assert_eq!(chooser.backing, Backing::Hardware);
    assert!(chooser.is_mediated() && chooser.counts(ArchEvent::CoreCycles));
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, false);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 1 << 40);
    vcpu.start();
    assert_eq!(vcpu.state(0), Some(CounterState::Lost(Lost::Busy)));
    vcpu.kernel.change(|machine| machine.mediated = false);
    vcpu.pmu.put(&mut vcpu.host);
    vcpu.pmu.load(&mut vcpu.host);
    assert_eq!(vcpu.state(0), Some(CounterState::Counting));
}
