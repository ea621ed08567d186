//! Guests on a host whose kernel is a fake one, beside ideal counters: a count may be missing only where the counter
//! says that it is lost.

use proptest::prelude::*;
use vpmu::counter::{CounterState, Policy, Report};
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::{Outcome, Pmu, PmuConfig};

use super::super::*;
use crate::kick::Kick;
use crate::options::PerfOptions;
use crate::processor::{Processor, Vendor};
use crate::tests::fake::{Fake, Machine, TICK, happened};

mod cases;

const EVTSEL0: u32 = 0x186;
const PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const OVF_CTRL: u32 = 0x390;
const MASK: u64 = (1 << 48) - 1;
const GENERAL: u8 = 4;
/// INT, EN.
const ENABLED: u64 = 1 << 20 | 1 << 22;
const USER: u64 = 1 << 16;
const KERNEL: u64 = 1 << 17;
const BOTH: u64 = USER | KERNEL;
/// Event selects with their rings, and how often each happens in a ms of the guest's.
const CYCLES: (u64, u64) = (0x003c | BOTH, 3_000_000);
/// The same on a clock: cycles of 1 GHz.
const CLOCK: (u64, u64) = (0x003c | BOTH, 1_000_000);
const BRANCH_MISSES: (u64, u64) = (0x00c5 | BOTH, 5_000);
const LLC_MISSES: (u64, u64) = (0x412e | BOTH, 20);
const EVENTS: [(u64, u64); 6] = [
    CYCLES,
    (0x00c4 | BOTH, 400_000),
    BRANCH_MISSES,
    LLC_MISSES,
    // The guest is in user space for three quarters of its time.
    (0x003c | USER, 2_250_000),
    (0x003c | KERNEL, 750_000),
];

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

/// A processor of each row of the table of events.
fn processors() -> impl Strategy<Value = Processor> {
    let kinds = [(Vendor::Intel, 6), (Vendor::Amd, 0x10), (Vendor::Amd, 0x19)];
    prop::sample::select(kinds.to_vec()).prop_map(|(vendor, family)| Processor {
        vendor,
        family,
        has_p0_cycles: family >= 0x17,
    })
}

fn machines() -> impl Strategy<Value = Machine> {
    (
        processors(),
        1..=8_usize,
        0..=3_usize,
        prop_oneof![Just(400), 2..40_u64],
        0..100_000_u64,
        prop_oneof![Just(u64::MAX), 1..10_u64],
        prop_oneof![Just(100), 1..8_usize],
        any::<bool>(),
        prop_oneof![3 => Just(0), 1 => 2..6_usize],
    )
        .prop_map(
            |(
                processor,
                counters,
                pinned,
                per_tick,
                latency,
                full_each,
                descriptors,
                constrained,
                e_core_each,
            )| Machine {
                processor,
                counters,
                constrained,
                e_core_each,
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
            Backing::Clock => [CLOCK; 6],
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
        // Each overflow has been reported by now: an overflow that the stop has found is a PMI, too.
        if vcpu.read(GLOBAL_STATUS) != 0 {
            prop_assert!(vcpu.pmu.take_pmi());
        }
    }
}
