//! Compares random guests on random machines with a machine without hypervisor.

use proptest::prelude::*;

use super::{Vm, emulated};
use crate::hostile::{Step, comparable, configs, native, natively, neighbour, steps};
use crate::machine::{Machine, Place};
use vpmu::arm::emulated::BackedPmu;
use vpmu::arm::partition::PartitionConfig;
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, Register, pmcr};
use vpmu::counter::Policy;

/// Leaves out steps that this machine and the engine see differently by choice: the divider of PMCR_EL0.D (not in this
/// machine), events that only happen by themselves, and a CHAIN counter that filters otherwise than its even one.
fn tamed(step: &Step, version: PmuVersion, chains: bool) -> Option<Step> {
    let mut step = step.clone();
    match &mut step {
        Step::Happen(0 | 0x1e, ..) => return None,
        Step::Access(Register::Pmcr, Some(value), _) => *value &= !pmcr::D,
        Step::Access(Register::Pmevtyper(_) | Register::Pmxevtyper, Some(value), _) => {
            if chains {
                *value &= !(0xf << 28);
            } else if *value as u16 & version.event_mask() == 0x1e {
                *value = 8;
            }
        }
        _ => {}
    }
    Some(step)
}

/// Reduces `outcome` to what both report of the same PMU: the engine counts CHAIN on any machine.
fn same(register: Register, version: PmuVersion, outcome: Outcome) -> Outcome {
    match (register, outcome) {
        (Register::Pmceid0 | Register::Pmceid1, Outcome::Value(value)) => {
            let bits = match version {
                PmuVersion::V3 => 0xffff_ffff,
                _ => u64::MAX,
            };
            Outcome::Value((value | 1 << 0x1e) & bits)
        }
        _ => comparable(register, version, outcome),
    }
}

fn access(vm: &mut Vm, native: &mut Machine, of: (Register, Option<u64>, ExceptionLevel)) {
    let (register, write, el) = of;
    let version = vm.machine.features.version;
    let host = vm.machine.host_part();
    let outcome = same(register, version, vm.access(register, write, el));
    let expected = same(register, version, natively(native, register, write, el));
    // Hardware checks PMUSERENR_EL0 before HPMN, but after PMCR_EL0.N.
    let order = (outcome, expected) == (Outcome::TrapToEl1, Outcome::Undefined);
    assert!(
        order || outcome == expected,
        "{outcome:?}, not {expected:?}, open: {}",
        vm.is_open()
    );
    assert_eq!(vm.machine.host_part(), host, "the host's part");
}

fn step(vm: &mut Vm, native: &mut Machine, step: &Step) {
    match *step {
        Step::Access(register, write, el) => access(vm, native, (register, write, el)),
        Step::Happen(event, place @ (Place::El0 | Place::El1), times) => {
            vm.machine.happen(event, place, times);
            native.happen(event, place, times);
        }
        Step::Happen(event, place, times) => {
            let counts = vm.machine.guest_counts();
            vm.machine.happen(event, place, times);
            assert_eq!(vm.machine.guest_counts(), counts, "counted at {place:?}");
        }
        Step::Switch(noise) => {
            let host = vm.machine.host_part();
            vm.put();
            assert_eq!(vm.pmu.line(), native.interrupt(), "line after a put");
            assert_eq!(vm.machine.inten, 0, "interrupts after a put");
            let counts = vm.machine.guest_counts();
            vm.machine.happen(0x11, Place::El1, 1);
            vm.machine.happen(8, Place::El2, 1);
            assert_eq!(vm.machine.guest_counts(), counts, "counted after a put");
            assert_eq!(vm.machine.host_part().sets[0], host.sets[0]);
            neighbour(&mut vm.machine, noise);
            vm.load();
        }
        Step::Interrupt => {
            vm.deliver();
        }
        Step::Host(n, event_type, value) => {
            let n = usize::from(vm.machine.hpmn() + n);
            if n < usize::from(vm.machine.implemented) {
                vm.machine.evtyper[n] = event_type & 0xff70_ffff;
                vm.machine.evcntr[n] = value & vm.machine.features.version.counter_mask();
                vm.machine.cnten |= 1 << n;
                vm.machine.ovs |= 1 << n;
            }
        }
        Step::Migrate => {
            vm.put();
            let state = vm.pmu.save(&mut vm.machine);
            let plan = *vm.pmu.plan();
            vm.pmu = BackedPmu::new(vm.config.clone(), plan, &mut vm.machine).unwrap();
            vm.pmu
                .restore(&state, &mut vm.machine)
                .expect("its own state");
            vm.enter();
        }
    }
    assert_eq!(vm.clone().deliver(), native.interrupt(), "line");
}

/// Returns values from which an overflow is some counts away, of 32 and of 64 bits.
fn close_to_the_end() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => (1..5_u32).prop_map(|n| n.wrapping_neg().into()),
        1 => (1..5_u64).prop_map(u64::wrapping_neg),
        1 => 0..4_u64,
    ]
}

fn write(register: Register, value: u64) -> Step {
    Step::Access(register, Some(value), ExceptionLevel::El1)
}

/// Returns steps that enable each counter close to its end.
fn set_up() -> impl Strategy<Value = Vec<Step>> {
    let event = prop::sample::select(vec![8_u64, 8, 0x11, 0, 0x1e]);
    let counters = prop::array::uniform4((event, close_to_the_end()));
    let control = prop::sample::select(vec![0, pmcr::LC, pmcr::LP, pmcr::LC | pmcr::LP]);
    (counters, close_to_the_end(), 0..16_u64, control).prop_map(|(counters, cycles, irqs, on)| {
        let mut steps = vec![write(Register::Pmccntr, cycles)];
        for (n, (event, value)) in (0..).zip(counters) {
            steps.push(write(Register::Pmevtyper(n), event));
            steps.push(write(Register::Pmevcntr(n), value));
        }
        steps.push(write(Register::PmintenSet, irqs));
        steps.push(write(Register::PmcntenSet, u64::MAX));
        steps.push(write(Register::Pmcr, pmcr::E | on));
        steps
    })
}

/// Returns steps that a random guest takes too rarely.
fn busy_steps() -> impl Strategy<Value = Step> {
    use Register::*;
    let sets = vec![
        PmovsClr, PmovsClr, PmovsSet, PmintenSet, PmintenClr, PmcntenSet, PmcntenClr, Pmswinc,
    ];
    let bits = prop_oneof![3 => 0..16_u64, 1 => Just(1 << 31)];
    let controls = vec![
        0,
        1,
        1,
        pmcr::E | pmcr::LC | pmcr::LP,
        pmcr::E | pmcr::X,
        pmcr::E | pmcr::P,
    ];
    let places = vec![Place::El0, Place::El1];
    let events = vec![8, 8, 0x11];
    prop_oneof![
        4 => (prop::sample::select(sets), bits, prop::bool::weighted(0.2)).prop_map(|(set, bits, el0)| {
            let el = if el0 { ExceptionLevel::El0 } else { ExceptionLevel::El1 };
            Step::Access(set, Some(bits), el)
        }),
        1 => (0..16_u64).prop_map(|permissions| write(Pmuserenr, permissions)),
        1 => prop::sample::select(controls).prop_map(|value| write(Pmcr, value)),
        4 => (prop::sample::select(events), prop::sample::select(places), 1..4_u64)
            .prop_map(|(event, place, n)| Step::Happen(event, place, n)),
        1 => (0..4_u8, close_to_the_end()).prop_map(|(n, value)| write(Pmevcntr(n), value)),
        1 => (0..4_u64).prop_map(|n| write(Pmselr, n)),
        1 => close_to_the_end().prop_map(|value| write(Pmxevcntr, value)),
        1 => (0..4_u8).prop_map(|n| Step::Access(Pmevcntr(n), None, ExceptionLevel::El1)),
        1 => Just(Step::Access(PmovsClr, None, ExceptionLevel::El1)),
        4 => steps(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_guest_has_a_pmu_of_its_own_open_or_closed(
        (quirks, config) in configs(),
        policy in prop::sample::select(Policy::ALL.to_vec()),
        (chains, filtered) in any::<(bool, bool)>(),
        start in prop_oneof![1 => Just(Vec::new()), 3 => set_up()],
        sequence in proptest::collection::vec(busy_steps(), 1..60),
    ) {
        let filter = EventFilter::allow_all();
        let filter = if filtered { filter.deny(0x11..=0x11).unwrap() } else { filter };
        let config = PartitionConfig { filter, ..config };
        let machine = Machine::new(config.implemented, config.features, quirks);
        let mut vm = Vm::on(machine, &config, emulated(&config, policy));
        let mut native = native(&config);
        let version = config.features.version;
        for each in start.iter().chain(&sequence).filter_map(|each| tamed(each, version, chains)) {
            step(&mut vm, &mut native, &each);
        }
        for register in Register::all() {
            step(&mut vm, &mut native, &Step::Access(register, None, ExceptionLevel::El1));
        }
    }
}
