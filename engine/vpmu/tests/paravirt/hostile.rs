//! Tests with a guest that writes anything anywhere. The host judges by checking its calls.

use proptest::prelude::*;
use vpmu::counter::Report;
use vpmu::paravirt::{Page, command, word};

use crate::support::{BUFFER, CYCLES, Host, RECORDING, Vcpu, nth};

#[derive(Clone, Debug)]
enum Step {
    Write(usize, u64),
    Ring(u64),
    Run(u64),
    Stray(u8, bool),
    Put,
    Load,
    Slice,
    Again,
    Attach,
    Detach,
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..20,
        Just(BUFFER),
        Just(u64::MAX),
        any::<u64>(),
        (0_u32..64).prop_map(|bit| 1 << bit)
    ]
}

fn place() -> impl Strategy<Value = usize> {
    prop_oneof![
        0_usize..512,
        (0_usize..5, 0_usize..5).prop_map(|(n, word)| 32 + 16 * n + word),
        0_usize..13
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (place(), value()).prop_map(|(word, value)| Step::Write(word, value)),
        4 => prop_oneof![0_u64..16, value()].prop_map(Step::Ring),
        4 => (0_u64..2000).prop_map(Step::Run),
        1 => (0..32_u8, any::<bool>()).prop_map(|(n, due)| Step::Stray(n, due)),
        1 => Just(Step::Put),
        1 => Just(Step::Load),
        1 => Just(Step::Slice),
        1 => Just(Step::Again),
        1 => Just(Step::Attach),
        1 => Just(Step::Detach),
    ]
}

proptest! {
    #[test]
    fn a_hostile_page_hurts_nobody(repeats in any::<bool>(), room in 0_u64..200, steps in prop::collection::vec(step(), 1..200)) {
        let floor = 16;
        let mut vcpu = Vcpu::new(Host { repeats, floor, room, ..Host::default() });
        let mut events = 0;
        // These counters are at work when the guest turns hostile.
        (0..2).for_each(|n| vcpu.sample(n, 100, 64 * u64::from(n)));
        (2..4).for_each(|n| vcpu.guest.wish(&vcpu.page, nth(n), CYCLES, RECORDING, 100, 64 * u64::from(n)));
        vcpu.page.store(word::BUFFER, BUFFER);
        vcpu.want(0b1111);
        vcpu.ring(command::APPLY);
        for step in steps {
            // The guest may or may not take NMIs. By `seq`, the host owes it at most one at a time.
            vcpu.nmi = false;
            let (device, host, page) = (&mut vcpu.device, &mut vcpu.host, &vcpu.page);
            match step {
                Step::Write(word, value) => page.store(word, value),
                Step::Ring(bits) => { let _ = device.doorbell(bits, host, Some(page)); }
                Step::Run(n) => { events += n; vcpu.run(n); }
                Step::Stray(n, due) => {
                    let report = if due { Report::Moved } else { Report::Unsure };
                    device.overflow(nth(n), report, host, Some(page));
                }
                Step::Put => device.put(host, Some(page)),
                Step::Load => device.load(host, Some(page)),
                Step::Slice => device.end_slice(host, Some(page)),
                Step::Again => {
                    let state = device.save(host, Some(page));
                    device.restore(&state, host, Some(page)).expect("its own");
                }
                Step::Attach => { let _ = device.attach(host, page); }
                Step::Detach => device.detach(host),
            }
            vcpu.take_nmi();
        }
        // Apart from one interrupt for each doorbell, there are no more interrupts than the floor
        // lets through.
        prop_assert!(vcpu.nmis <= events / floor * 4 + 200, "{} in {events}", vcpu.nmis);
        let _ = vcpu.word(word::SEQ);
    }
}
