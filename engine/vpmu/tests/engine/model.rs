//! Random guests on random hosts: see [`Pair`] for what must hold.

use proptest::prelude::*;

use crate::pair::{Pair, Step};
use crate::support::INST_RETIRED;
use vpmu::arm::{CHAIN, CPU_CYCLES, ExceptionLevel, PmuVersion, Register, SW_INCR, pmcr};
use vpmu::counter::Policy;

const OTHER: u16 = 0x13;

fn level() -> impl Strategy<Value = ExceptionLevel> {
    prop_oneof![4 => Just(ExceptionLevel::El1), 1 => Just(ExceptionLevel::El0)]
}

/// Returns one of few counters, so that they meet often, and sometimes one that does not exist.
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

/// Returns counts and counters near the places where something happens.
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

/// Returns values of PMCR_EL0: mostly on, with and without each of its effects.
fn control() -> impl Strategy<Value = u64> {
    let bits = [pmcr::D, pmcr::LC, pmcr::LP, pmcr::P, pmcr::C];
    let bits = prop::sample::subsequence(bits.to_vec(), 0..=2);
    let on = prop_oneof![3 => Just(pmcr::E), 1 => Just(0)];
    prop_oneof![
        4 => on.clone(),
        4 => (on, bits).prop_map(|(on, bits)| on | bits.iter().sum::<u64>()),
        1 => any::<u64>(),
    ]
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
        3 => control().prop_map(|v| (Pmcr, v)),
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

fn read() -> impl Strategy<Value = Register> {
    prop_oneof![
        4 => index().prop_map(Register::Pmevcntr),
        1 => Just(Register::PmovsSet),
        2 => prop::sample::select(Register::all().collect::<Vec<_>>()),
    ]
}

/// Returns writes that set up chained pairs and counters close to their end, with everything
/// enabled. Interesting cases follow at once.
fn set_up() -> impl Strategy<Value = Vec<(Register, u64)>> {
    use Register::*;
    let odd = prop_oneof![3 => Just(CHAIN), 1 => event()];
    let pair = (event(), odd, counter_value(), counter_value());
    let pairs = prop::array::uniform2(pair);
    (pairs, 0..16_u64, control()).prop_map(|(pairs, interrupts, control)| {
        let mut writes = Vec::new();
        for (n, (even, odd, low, high)) in [0, 2].into_iter().zip(pairs) {
            writes.push((Pmevtyper(n), even.into()));
            writes.push((Pmevcntr(n), low));
            writes.push((Pmevtyper(n + 1), odd.into()));
            writes.push((Pmevcntr(n + 1), high));
        }
        writes.push((PmcntenSet, 0x8000_000f));
        writes.push((PmintenSet, interrupts));
        writes.push((Pmcr, control));
        writes
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (read(), level()).prop_map(|(register, level)| Step::Read(register, level)),
        16 => (write(), level()).prop_map(|((reg, value), level)| Step::Write(reg, level, value)),
        12 => (happening(), level(), number()).prop_map(|(e, level, n)| Step::Happen(e, level, n)),
        4 => any::<u32>().prop_map(Step::Deliver),
        2 => index().prop_map(Step::Early),
        1 => Just(Step::Put),
        2 => Just(Step::Load),
        1 => any::<bool>().prop_map(Step::Filter),
        1 => prop::bool::weighted(0.3).prop_map(Step::Refuse),
        1 => Just(Step::Migrate),
    ]
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
    #![proptest_config(ProptestConfig {
        cases: cases(),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_engine_is_the_reference(
        version in version(),
        counters in prop_oneof![6 => Just(4_u8), 1 => 0..32_u8],
        has: [bool; 2],
        policy in prop::sample::select(Policy::ALL.to_vec()),
        set_up in prop_oneof![1 => Just(Vec::new()), 3 => set_up()],
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let mut pair = Pair::new(version, counters, has, policy);
        for (register, value) in set_up {
            // Both refuse registers that do not exist in this PMU.
            pair.step(&Step::Write(register, ExceptionLevel::El1, value));
        }
        for step in &steps {
            pair.step(step);
        }
    }
}
