//! Random guests that ask for records, with any DS save area: see [`Pair`] for what must hold.

use proptest::prelude::*;

use crate::guest::FakeGuest;
use crate::model::{capability, config, own, session};
use crate::pair::Step;
use crate::reference::Reference;
use vpmu::x86::intel::Capability;
use vpmu::x86::pebs;

/// Returns places for the DS save area and records: in RAM, at its end, in ROM, nowhere, at the end of the address
/// space.
fn address() -> impl Strategy<Value = u64> {
    let multiple = |from: u64, to: u64| (from / 8..to / 8).prop_map(|n| n * 8);
    prop_oneof![
        8 => multiple(FakeGuest::RAM, FakeGuest::RAM + 0xc00),
        2 => Just(FakeGuest::RAM),
        1 => FakeGuest::RAM..FakeGuest::RAM + 0xc00,
        1 => multiple(FakeGuest::ROM, FakeGuest::ROM + 0x200),
        1 => multiple(FakeGuest::TOP, u64::MAX),
        1 => any::<u64>(),
    ]
}

/// Returns steps that set up an area that mostly works.
fn area() -> BoxedStrategy<Vec<Step>> {
    let place = prop_oneof![4 => Just(FakeGuest::RAM), 1 => address()];
    let buffer = prop_oneof![6 => Just(FakeGuest::RAM + 0x100), 1 => address()];
    let room = prop_oneof![6 => 0..0x800_u64, 1 => any::<u64>()];
    let threshold = prop_oneof![4 => 0..0x400_u64, 1 => any::<u64>()];
    let period = prop_oneof![4 => 1..200_u64, 1 => Just(1 << 48), 1 => any::<u64>()];
    let resets = prop::collection::vec(period, 6);
    (place, buffer, room, threshold, resets, 0..16_u64)
        .prop_map(|(place, buffer, room, threshold, resets, config)| {
            let field = |offset, value| Step::Store(place.wrapping_add(offset), value);
            let mut steps = vec![
                Step::Write(0x600, place),
                Step::Write(0x3f2, config),
                field(0x20, buffer),
                field(0x28, buffer),
                field(0x30, buffer.wrapping_add(room)),
                field(0x38, buffer.wrapping_add(threshold)),
            ];
            for (offset, period) in [0x40, 0x48, 0x50, 0x80, 0x88, 0x90].into_iter().zip(resets) {
                steps.push(field(offset, 0_u64.wrapping_sub(period)));
            }
            steps
        })
        .boxed()
}

/// Returns steps that set up three general and three fixed counters that ask for records soon.
fn counters() -> BoxedStrategy<Vec<Step>> {
    let event = prop::sample::select(vec![0xc0_u64, 0x3c, 0x1080_00c0]);
    let rings = prop::sample::select(vec![0x41_0000_u64, 0x42_0000, 0x43_0000, 0x53_0000]);
    let select = (event, rings, any::<bool>())
        .prop_map(|(event, rings, adaptive)| event | rings | u64::from(adaptive) << 34);
    let value = prop_oneof![6 => 1..100_u64, 1 => 0..1_u64 << 40];
    let selects = prop::array::uniform3(select);
    let values = prop::array::uniform6(value);
    let fixed = prop_oneof![4 => (0..0x111_u64).prop_map(|adaptive| (adaptive & 0x111) << 32 | 0x213), 1 => any::<u64>()];
    let enable = (0..8_u64, 0..8_u64).prop_map(|(general, fixed)| fixed << 32 | general);
    (selects, values, fixed, enable)
        .prop_map(|(selects, values, fixed, enable)| {
            let below = |value: u64| 0_u64.wrapping_sub(value) & ((1 << 48) - 1);
            let mut steps = vec![Step::Write(0x38d, fixed), Step::Write(0x3f1, enable)];
            for (n, (select, value)) in (0..).zip(selects.into_iter().zip(values)) {
                steps.push(Step::Write(0x186 + n, select));
                steps.push(Step::Write(0xc1 + n, below(value)));
            }
            for (n, &value) in (0..).zip(&values[3..]) {
                steps.push(Step::Write(0x309 + n, below(value)));
            }
            steps.push(Step::Write(0x38f, 0x7_0000_0007));
            steps
        })
        .boxed()
}

fn own_with_pebs() -> BoxedStrategy<Step> {
    let field = prop::sample::select(vec![0x20_u64, 0x28, 0x28, 0x30, 0x38, 0x40, 0x80]);
    let enable = (0..8_u64, 0..8_u64).prop_map(|(general, fixed)| fixed << 32 | general);
    prop_oneof![
        20 => own(),
        2 => (field, address()).prop_map(|(field, value)| Step::Store(FakeGuest::RAM + field, value)),
        1 => (address(), any::<u64>()).prop_map(|(address, value)| Step::Store(address, value)),
        1 => address().prop_map(|address| Step::Write(0x600, address)),
        1 => (0..32_u64, 0..64_u64).prop_map(|(groups, more)| Step::Write(0x3f2, groups | more << 24)),
        2 => enable.prop_map(|enable| Step::Write(0x3f1, enable)),
        1 => any::<u64>().prop_map(|enable| Step::Write(0x3f1, enable)),
        2 => Just(Step::Write(0x390, 1 << 62)),
        1 => prop::bool::weighted(0.2).prop_map(Step::Mute),
    ]
    .boxed()
}

fn with_pebs() -> BoxedStrategy<Capability> {
    (capability(), prop::sample::select(vec![48_u8, 57]))
        .prop_map(|(capability, linear_address_bits)| Capability {
            pdcm: true,
            pebs: Some(pebs::Capability {
                linear_address_bits,
            }),
            ..capability
        })
        .boxed()
}

fn set_up() -> BoxedStrategy<Vec<Step>> {
    (area(), counters())
        .prop_map(|(area, counters)| [area, counters].concat())
        .boxed()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn records_are_the_references(session in session(with_pebs(), set_up(), own_with_pebs())) {
        session.run::<Reference>();
    }
}
