//! Whatever a guest and its embedder do with last branch records, the engine is the reference.

use proptest::prelude::*;

use super::pair::{Pair, Step, addresses, globals, has_pebs};
use crate::model::{config, ring};
use vpmu::x86::lbr::{self, Branch, Kind};
use vpmu::x86::{Capability, amd, intel};

fn intel() -> impl Strategy<Value = Capability> {
    let lbr = (
        1_u8..16,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    );
    (lbr, any::<bool>(), any::<bool>()).prop_map(|(lbr, v5, pebs)| {
        let (depths, call_stack, mispredict, cycles, five) = lbr;
        let version = if v5 {
            intel::Version::V5
        } else {
            intel::Version::V4
        };
        let lbr = lbr::intel::Capability {
            depths,
            call_stack,
            mispredict,
            cycles,
            linear_address_bits: if five { 57 } else { 48 },
        };
        Capability::Intel(intel::Capability {
            lbr: Some(lbr),
            pebs: pebs.then(Default::default),
            ..intel::Capability::new(version)
        })
    })
}

fn amd() -> impl Strategy<Value = Capability> {
    Just(Capability::Amd(amd::Capability {
        lbr: Some(lbr::amd::Capability::default()),
        ..amd::Capability::new(amd::Interface::V2)
    }))
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0x40_0000_u64..0x40_0100,
        1 => 0xffff_8000_0000_0000_u64..=u64::MAX,
        1 => any::<u64>(),
    ]
}

fn branch() -> impl Strategy<Value = Step> {
    let kinds = prop::sample::select(vec![
        Kind::Conditional,
        Kind::RelativeJump,
        Kind::IndirectJump,
        Kind::RelativeCall,
        Kind::NextCall,
        Kind::IndirectCall,
        Kind::Return,
        Kind::Other,
    ]);
    (
        (address(), address(), kinds, ring(), ring()),
        any::<Option<bool>>(),
        any::<Option<u16>>(),
    )
        .prop_map(
            |((from, to, kind, from_ring, to_ring), mispredicted, cycles)| {
                Step::Branch(Branch {
                    from,
                    to,
                    kind,
                    from_ring,
                    to_ring,
                    mispredicted,
                    cycles,
                })
            },
        )
}

/// Values by which something happens, and any.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        // IA32_LBR_CTL: everything on, some of it, call stacks.
        4 => Just(0x7f_0007),
        2 => (0_u64..0x7f).prop_map(|bits| bits << 16 | 7),
        2 => Just(0x38_000f),
        // Depths, DebugExtnCtl, LbrSelect.
        3 => (0_u64..=40).prop_map(|n| n * 8),
        2 => 0_u64..0x200,
        // Freezing and status.
        4 => (0_u64..4).prop_map(|bits| bits << 11),
        4 => (0_u64..4, 0_u64..2).prop_map(|(frozen, counter)| frozen << 58 | counter),
        1 => (0_u32..64).prop_map(|bit| 1 << bit),
        1 => any::<u64>(),
    ]
}

fn step(capability: &Capability) -> impl Strategy<Value = Step> + use<> {
    let globals = globals(capability);
    let all = addresses(capability);
    // Controls come first, and are written most.
    let controls: Vec<u32> = match capability {
        Capability::Intel(_) => vec![0x14ce, 0x14cf, 0x1d9],
        Capability::Amd(_) => vec![0xc000_010e, 0xc000_010f, 0x1d9],
    };
    let clear = globals[2];
    let written = prop_oneof![
        6 => prop::sample::select(controls),
        2 => prop::sample::select(all.clone()),
    ];
    let read = prop::sample::select(all);
    let mut status = 1_u64 << 58 | 1 << 59 | 1;
    let mut gate = 1_u64;
    if has_pebs(capability) {
        status |= 1 << 62 | 2;
        gate = 3;
    }
    let common = prop_oneof![
        6 => (written, value()).prop_map(|(address, value)| Step::Write(address, value)),
        1 => (0..=gate).prop_map(move |on| Step::Write(globals[0], on)),
        2 => Just(Step::Write(clear, status)),
        1 => (0_u64..4).prop_map(move |bits| Step::Write(globals[3], bits << 58)),
        1 => read.prop_map(Step::Read),
        20 => branch(),
        4 => Just(Step::Overflow),
        1 => Just(Step::EndFollowing),
        1 => Just(Step::Lose),
        1 => Just(Step::Disable),
        3 => Just(Step::TakePmi),
        1 => Just(Step::Reset),
        1 => Just(Step::Migrate),
    ];
    match has_pebs(capability) {
        true => prop_oneof![2 => common, 1 => of_pebs()].boxed(),
        false => common.boxed(),
    }
}

/// What a guest does with the counter that writes records, and with its buffer.
fn of_pebs() -> impl Strategy<Value = Step> {
    let times = prop_oneof![1_u64..3000, Just(1 << 48), 1_u64..1 << 48];
    prop_oneof![
        6 => times.prop_map(Step::Count),
        3 => (ring(), 0_u64..4096).prop_map(|(ring, times)| Step::GoOn(ring, times)),
        2 => Just(Step::EmptyBuffer),
        1 => (0_u64..16, 0_u64..32).prop_map(|(groups, more)| Step::Write(0x3f2, groups | more << 24)),
        1 => any::<bool>().prop_map(|on| Step::Write(0x3f1, u64::from(on) << 1)),
    ]
}

/// Registers as Linux sets them: everything recorded, frozen by a PMI.
fn set_up(capability: &Capability) -> Vec<Step> {
    match capability {
        Capability::Intel(_) => vec![Step::Write(0x1d9, 1 << 11), Step::Write(0x14ce, 0x7f_0007)],
        Capability::Amd(_) => vec![
            Step::Write(0x1d9, 1 << 11),
            Step::Write(0xc000_010f, 1 << 6),
        ],
    }
}

fn run() -> impl Strategy<Value = (Capability, bool, bool, Vec<Step>)> {
    prop_oneof![intel().boxed(), amd().boxed()].prop_flat_map(|capability| {
        let steps = prop::collection::vec(step(&capability), 1..120);
        (Just(capability), any::<bool>(), any::<bool>(), steps)
    })
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn records_are_the_references((capability, follows, is_set_up, steps) in run()) {
        let mut pair = Pair::new(capability, follows);
        if is_set_up {
            for step in set_up(&capability) {
                pair.step(&step);
            }
        }
        for step in &steps {
            pair.step(step);
        }
    }
}
