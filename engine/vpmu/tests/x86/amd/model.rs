//! Random guests on random hosts, under every policy: see [`Pair`] for what must hold.

use proptest::prelude::*;

use super::reference::Reference;
use crate::model::{config, number, ring, session};
use crate::pair::Step;
use crate::support::Happening;
use vpmu::x86::ArchEvent;
use vpmu::x86::amd::{Capability, Interface};

/// Returns one of few counters, so that they meet often, and sometimes one that does not exist.
fn index() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0..3_u32, 1 => 3..6_u32]
}

fn control() -> BoxedStrategy<u64> {
    let event = prop_oneof![
        5 => Just(0xc0_u64),
        2 => Just(0x76),
        2 => Just(0x1_0000_0120),
        1 => Just(0xc2),
        1 => Just(0x1234),
        1 => Just(0xf_0000_00ff),
    ];
    let mostly_on = prop_oneof![8 => Just(0x0053_0000_u64), 1 => Just(0x0043_0000)];
    let change = prop_oneof![
        6 => Just(0_u64),
        4 => (16..24_u32).prop_map(|bit| 1 << bit),
        2 => (0..64_u32).prop_map(|bit| 1 << bit),
    ];
    prop_oneof![
        12 => (event, mostly_on, change).prop_map(|(event, on, change)| (event | on) ^ change),
        1 => any::<u64>(),
    ]
    .boxed()
}

fn counter() -> BoxedStrategy<u64> {
    prop_oneof![
        6 => (0..300_u64).prop_map(|n| (1 << 48) - 1 - n),
        2 => (0..300_u64).prop_map(|n| u64::MAX - n),
        1 => 0..300_u64,
        1 => any::<u64>(),
    ]
    .boxed()
}

fn write() -> BoxedStrategy<Step> {
    let sets = || prop_oneof![3 => 0..8_u64, 2 => Just(0x3f), 1 => Just(0), 2 => any::<u64>()];
    prop_oneof![
        5 => (index().prop_map(|n| 0xc001_0200 + 2 * n), control()),
        2 => (index().prop_map(|n| 0xc001_0000 + n % 4), control()),
        4 => (index().prop_map(|n| 0xc001_0201 + 2 * n), counter()),
        2 => (index().prop_map(|n| 0xc001_0004 + n % 4), counter()),
        1 => (Just(0xc000_0300), any::<u64>()),
        4 => (Just(0xc000_0301), sets()),
        3 => (Just(0xc000_0302), sets()),
        1 => (Just(0xc000_0303), sets()),
        1 => (Just(0xc001_0240), any::<u64>()),
    ]
    .prop_map(|(address, value)| Step::Write(address, value))
    .boxed()
}

fn own() -> BoxedStrategy<Step> {
    let happening = prop_oneof![
        4 => Just(Happening::Instructions),
        2 => Just(Happening::Cycles),
        1 => Just(Happening::TscCycles),
        1 => Just(Happening::Other(0x34, 0x12)),
    ];
    let emulated = prop::sample::select(vec![
        ArchEvent::Instructions,
        ArchEvent::CoreCycles,
        ArchEvent::ReferenceCycles,
        ArchEvent::Branches,
    ]);
    let all = <Reference as crate::pair::Reference>::addresses();
    let rdpmc = prop_oneof![6 => 0..7_u32, 1 => any::<u32>(), 1 => Just(1 << 31)];
    prop_oneof![
        4 => prop::sample::select(all).prop_map(Step::Read),
        16 => write(),
        2 => (rdpmc, ring(), any::<bool>()).prop_map(|(ecx, ring, pce)| Step::Rdpmc(ecx, ring, pce)),
        12 => (happening, ring(), number()).prop_map(|(e, ring, n)| Step::Happen(e, ring, n)),
        2 => (emulated, ring(), number()).prop_map(|(e, ring, n)| Step::Emulate(e, ring, n)),
    ]
    .boxed()
}

/// Returns steps that mostly set up counters close to their end, with everything enabled. Interesting cases follow at once.
fn set_up() -> BoxedStrategy<Vec<Step>> {
    let set_up = prop::array::uniform3((control(), counter())).prop_map(|counters| {
        let mut steps = vec![];
        for (n, (control, counter)) in (0..).zip(counters) {
            steps.push(Step::Write(0xc001_0004 + n, counter));
            steps.push(Step::Write(0xc001_0000 + n, control));
        }
        steps
    });
    prop_oneof![1 => Just(Vec::new()), 3 => set_up].boxed()
}

fn capability() -> BoxedStrategy<Capability> {
    use Interface::{Core, Legacy, V2};
    let interface = prop::sample::select(vec![Legacy, Core, Core, V2, V2]);
    let events = prop_oneof![4 => Just(u32::MAX), 1 => any::<u32>()];
    let v2_counters = prop_oneof![2 => Just(6_u8), 1 => 1..6_u8];
    (interface, events, v2_counters)
        .prop_map(|(interface, events, v2_counters)| Capability {
            interface,
            events,
            v2_counters,
            lbr: None,
        })
        .boxed()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_engine_is_the_reference(session in session(capability(), set_up(), own())) {
        session.run::<Reference>();
    }
}
