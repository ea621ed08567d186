//! Random guests on random hosts, compared with the [`Reference`] after each step.
//!
//! Invariants, each checked after every step:
//!
//! - **same registers**: every register reads the same at both levels, in the engine and in the reference.
//! - **line on time**: once the host's reports are delivered, the engine's line is the reference's.
//! - **line never early**: before that, the engine's line is high only if the reference's is.
//! - **comparing disturbs nothing**: the two above are checked on copies, so what the engine puts off stays
//!   put off.
//! - **put stops**: after a put no host counter runs.
//! - **orderly**: the host is called in the order `CounterHost` promises (the fake host checks it).
//! - **quiet**: a report is asked for only while some interrupt is enabled.
//! - **honest loss**: a counter is lost only if the host refused, and refusals are counted.

use proptest::prelude::*;

use crate::reference::Reference;
use crate::support::{Call, Guest, INST_RETIRED, config};
use vpmu::arm::emulated::EmulatedConfig;
use vpmu::arm::{
    CHAIN, CPU_CYCLES, EventFilter, ExceptionLevel, Outcome, PmuVersion, Register, SW_INCR,
};
use vpmu::counter::{CounterState, Lost};

#[derive(Clone, Debug)]
enum Step {
    Read(Register, ExceptionLevel),
    Write(Register, ExceptionLevel, u64),
    /// The guest does this so often.
    Happen(u16, ExceptionLevel, u64),
    /// The host's reports arrive, those of this mask.
    Deliver(u32),
    /// A report for nothing.
    Stray(u8),
    Put,
    Load,
    Filter(bool),
    Refuse(bool),
    /// Save, and restore into a new PMU on a new host.
    Migrate,
}

const OTHER: u16 = 0x13;

fn level() -> impl Strategy<Value = ExceptionLevel> {
    prop_oneof![4 => Just(ExceptionLevel::El1), 1 => Just(ExceptionLevel::El0)]
}

/// Few counters, so that they meet often; some that do not exist.
fn index() -> impl Strategy<Value = u8> {
    prop_oneof![8 => 0..4_u8, 1 => 4..32_u8]
}

fn event() -> impl Strategy<Value = u16> {
    prop_oneof![
        4 => Just(INST_RETIRED),
        3 => Just(CHAIN),
        1 => Just(SW_INCR),
        1 => Just(CPU_CYCLES),
        1 => Just(OTHER),
    ]
}

fn happening() -> impl Strategy<Value = u16> {
    prop_oneof![4 => Just(INST_RETIRED), 2 => Just(CPU_CYCLES), 1 => Just(OTHER)]
}

/// Counts and counters near the places where something happens.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0..300_u64,
        3 => (0..300_u64).prop_map(|n| (1 << 32) - n),
        1 => (0..300_u64).prop_map(|n| (3 << 32) + 150 - n),
        1 => 0..1_u64 << 40,
    ]
}

fn counter_value() -> impl Strategy<Value = u64> {
    prop_oneof![4 => number(), 2 => (0..300_u64).prop_map(|n| u64::MAX - n), 1 => any::<u64>()]
}

fn write() -> impl Strategy<Value = (Register, u64)> {
    use Register::*;
    let bits = || prop_oneof![4 => 0..16_u64, 1 => Just(1 << 31), 1 => any::<u64>()];
    let filters = || {
        let mostly = |bit| prop_oneof![5 => Just(0), 1 => Just(bit)];
        let each = [30, 31, 29, 28].map(|bit| mostly(1_u64 << bit));
        each.prop_map(|bits| bits.iter().sum::<u64>())
    };
    let type_value = || {
        prop_oneof![
            8 => (event(), filters()).prop_map(|(event, filters)| filters | u64::from(event)),
            1 => any::<u64>(),
        ]
    };
    let sets = prop_oneof![
        Just(PmcntenSet),
        Just(PmcntenSet),
        Just(PmcntenClr),
        Just(PmintenSet),
        Just(PmintenSet),
        Just(PmintenClr),
        Just(PmovsSet),
        Just(PmovsClr),
        Just(PmovsClr),
        Just(Pmswinc),
    ];
    prop_oneof![
        6 => (sets, bits()),
        2 => prop_oneof![6 => Just(1), 2 => Just(0), 2 => any::<u64>()].prop_map(|v| (Pmcr, v)),
        4 => (index().prop_map(Pmevtyper), type_value()),
        4 => (index().prop_map(Pmevcntr), counter_value()),
        1 => (Just(Pmccntr), counter_value()),
        1 => (Just(Pmccfiltr), type_value()),
        1 => (Just(Pmselr), prop_oneof![4 => 0..4_u64, 1 => Just(31), 1 => any::<u64>()]),
        1 => (Just(Pmxevtyper), type_value()),
        1 => (Just(Pmxevcntr), counter_value()),
        1 => (Just(Pmuserenr), any::<u64>()),
        1 => (prop_oneof![Just(Pmceid0), Just(Pmceid1), Just(Pmmir)], any::<u64>()),
    ]
}

fn register() -> impl Strategy<Value = Register> {
    prop::sample::select(Register::all().collect::<Vec<_>>())
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (register(), level()).prop_map(|(register, level)| Step::Read(register, level)),
        16 => (write(), level()).prop_map(|((reg, value), level)| Step::Write(reg, level, value)),
        12 => (happening(), level(), number()).prop_map(|(e, level, n)| Step::Happen(e, level, n)),
        4 => any::<u32>().prop_map(Step::Deliver),
        1 => any::<u8>().prop_map(Step::Stray),
        1 => Just(Step::Put),
        2 => Just(Step::Load),
        1 => any::<bool>().prop_map(Step::Filter),
        1 => prop::bool::weighted(0.3).prop_map(Step::Refuse),
        1 => Just(Step::Migrate),
    ]
}

/// The engine and the reference, side by side.
struct Pair {
    config: EmulatedConfig,
    guest: Guest,
    reference: Reference,
}

impl Pair {
    fn new(version: PmuVersion, counters: u8, el3: bool) -> Self {
        let config = EmulatedConfig {
            counters,
            el3,
            ..config(version)
        };
        let minor = match version {
            PmuVersion::V3 => 0,
            PmuVersion::V3p1 => 1,
            PmuVersion::V3p4 => 4,
            PmuVersion::V3p5 => 5,
        };
        let mut reference = Reference::new(counters, minor, el3);
        reference.fixed_pmcr = 0x410b_0000;
        reference.pmceid = config.events;
        reference.pmmir = config.pmmir;
        Self {
            guest: Guest::with(config.clone()),
            config,
            reference,
        }
    }

    fn perform(&mut self, step: &Step) {
        let Self {
            guest: Guest { pmu, host },
            reference,
            ..
        } = self;
        match *step {
            Step::Read(register, level) => {
                let read = pmu.read(register, level, host);
                assert_eq!(read, reference.read(register, level), "{step:?}");
            }
            Step::Write(register, level, value) => {
                let written = pmu.write(register, level, value, host);
                assert_eq!(written, reference.write(register, level, value), "{step:?}");
            }
            Step::Happen(event, level, times) => {
                reference.lost = lost(&self.guest);
                self.guest.host.happen(event, level, times);
                reference.happen(event, level, times);
            }
            Step::Deliver(mask) => {
                for n in host.take_reports() {
                    if mask & 1 << n == 0 {
                        host.reports.insert(n);
                    } else {
                        let _ = pmu.overflow(n, host);
                    }
                }
            }
            Step::Stray(n) => {
                let _ = pmu.overflow(n, host);
            }
            Step::Put => {
                pmu.put(host);
                reference.loaded = false;
                assert!(host.running().is_empty(), "put stops");
            }
            Step::Load => {
                pmu.load(host);
                reference.loaded = true;
            }
            Step::Filter(deny) => {
                let all = EventFilter::default();
                let some = all.deny(CPU_CYCLES..=CPU_CYCLES).expect("one rule fits");
                pmu.set_filter(if deny { some } else { all }, host);
                self.config.filter = if deny { some } else { all };
                reference.denied = if deny { vec![CPU_CYCLES] } else { Vec::new() };
            }
            Step::Refuse(refuse) => host.refuse = refuse.then_some(Lost::Busy),
            Step::Migrate => {
                let state = pmu.save(host);
                let mut next = Guest::with(self.config.clone());
                next.host.refuse = host.refuse;
                if !reference.loaded {
                    next.pmu.put(&mut next.host);
                }
                next.pmu
                    .restore(&state, &mut next.host)
                    .expect("the same kind of PMU");
                self.guest = next;
                reference.migrate();
            }
        }
    }

    fn check(&mut self, step: &Step) {
        let mut copy = self.guest.clone();
        let high = self.reference.line();
        assert!(!copy.pmu.line() || high, "line never early: {step:?}");
        assert_eq!(copy.interrupt(), high, "line on time: {step:?}");

        let mut copy = self.guest.clone();
        for level in [ExceptionLevel::El0, ExceptionLevel::El1] {
            for register in Register::all() {
                let engine = copy.pmu.read(register, level, &mut copy.host);
                let reference = self.reference.read(register, level);
                assert_eq!(
                    engine, reference,
                    "same registers: {register:?} after {step:?}"
                );
            }
        }

        let interrupting = self
            .reference
            .read(Register::PmintenSet, ExceptionLevel::El1);
        for call in self.guest.host.calls() {
            if let Call::SetPeriod(n, Some(_)) = call {
                let nobody = Outcome::Value(0);
                assert_ne!(interrupting, nobody, "quiet: counter {n} after {step:?}");
            }
        }
        assert_eq!(
            self.guest.pmu.statistics().lost,
            self.guest.host.refused,
            "honest loss"
        );
        assert!(
            self.guest.host.refused > 0 || lost(&self.guest) == 0,
            "honest loss"
        );
    }
}

fn lost(guest: &Guest) -> u32 {
    (0..32_u8)
        .filter(|&n| matches!(guest.pmu.counter_state(n), Some(CounterState::Lost(_))))
        .fold(0, |bits, n| bits | 1 << n)
}

fn version() -> impl Strategy<Value = PmuVersion> {
    use PmuVersion::*;
    prop_oneof![1 => Just(V3), 1 => Just(V3p1), 2 => Just(V3p4), 4 => Just(V3p5)]
}

fn cases() -> u32 {
    let from_outside = std::env::var("PROPTEST_CASES").ok();
    from_outside
        .and_then(|cases| cases.parse().ok())
        .unwrap_or(500)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_is_the_reference(
        version in version(),
        counters in prop_oneof![6 => Just(4_u8), 1 => 0..32_u8],
        el3: bool,
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut pair = Pair::new(version, counters, el3);
        for step in &steps {
            pair.perform(step);
            pair.check(step);
        }
    }
}
