//! Checks that no sequence of guest accesses reaches a host counter or counts outside the guest,
//! and that the guest sees only a PMU of its own.

use proptest::prelude::*;

use super::machine::{EVENTS, Machine, Place, Quirks};
use super::{Vm, plan};
use vpmu::arm::partition::{Features, Isolation, PartitionConfig};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, RawPmevtyper, Register};

#[derive(Clone, Debug)]
pub(super) enum Step {
    Access(Register, Option<u64>, ExceptionLevel),
    Happen(u16, Place, u64),
    /// The vCPU leaves the CPU, another vCPU uses the CPU, and the vCPU comes back.
    Switch(u64),
    /// The physical interrupt is taken if it is asserted.
    Interrupt,
    /// The host programs one of its counters.
    Host(u8, u64, u64),
    /// The PMU is saved, and restored into a new value.
    Migrate,
}

fn registers() -> impl Strategy<Value = Register> {
    let all: Vec<Register> = Register::all().collect();
    let hot = [
        Register::Pmcr,
        Register::PmcntenSet,
        Register::PmcntenClr,
        Register::PmintenSet,
        Register::PmovsSet,
        Register::PmovsClr,
        Register::Pmswinc,
        Register::Pmselr,
        Register::Pmxevtyper,
        Register::Pmxevcntr,
        Register::Pmccfiltr,
        Register::Pmuserenr,
    ];
    prop_oneof![
        3 => proptest::sample::select(hot.to_vec()),
        2 => (0..8_u8).prop_map(Register::Pmevtyper),
        2 => (0..8_u8).prop_map(Register::Pmevcntr),
        1 => proptest::sample::select(all),
    ]
}

const SOME_EVENTS: [u16; 5] = [0, 0x08, 0x11, 0x1e, 0x0411];

fn events() -> impl Strategy<Value = u16> {
    proptest::sample::select(SOME_EVENTS.to_vec())
}

/// Returns event types with any filter.
fn types() -> impl Strategy<Value = u64> {
    let filters = prop_oneof![
        Just(0),
        Just(1 << 27),
        Just(1 << 25),
        (0..1_u64 << 12).prop_map(|bits| bits << 20),
    ];
    (events(), filters).prop_map(|(event, filter)| filter | u64::from(event))
}

fn values() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        Just(u64::MAX),
        0..64_u64,
        types(),
        // Counters with these values are about to overflow.
        (1..4_u64).prop_map(u64::wrapping_neg),
        (1..4_u32).prop_map(|n| n.wrapping_neg().into()),
    ]
}

pub(super) fn steps() -> impl Strategy<Value = Step> {
    let el = prop_oneof![3 => Just(ExceptionLevel::El1), 1 => Just(ExceptionLevel::El0)];
    let place =
        proptest::sample::select(vec![Place::El0, Place::El1, Place::El2, Place::OtherThread]);
    prop_oneof![
        12 => (registers(), proptest::option::of(values()), el)
            .prop_map(|(register, write, el)| Step::Access(register, write, el)),
        4 => (events(), place, 1..4_u64).prop_map(|(e, p, n)| Step::Happen(e, p, n)),
        1 => any::<u64>().prop_map(Step::Switch),
        1 => Just(Step::Interrupt),
        1 => (0..8_u8, types(), values()).prop_map(|(n, e, v)| Step::Host(n, e, v)),
        1 => Just(Step::Migrate),
        // A random guest would rarely get these accesses right.
        1 => Just(Step::Access(Register::Pmcr, Some(1), ExceptionLevel::El1)),
        1 => Just(Step::Access(Register::PmcntenSet, Some(u64::MAX), ExceptionLevel::El1)),
        1 => types().prop_map(|t| Step::Access(Register::Pmevtyper(0), Some(t), ExceptionLevel::El1)),
    ]
}

prop_compose! {
    fn quirks()(
        open in any::<u64>(), from in 0..8_u8,
        no_hpmd in any::<bool>(), no_hccd in any::<bool>(), tpm_asks_only_en in any::<bool>(),
    ) -> Quirks {
        Quirks { open, from, no_hpmd, no_hccd, tpm_asks_only_en, ..Quirks::default() }
    }
}

/// Returns a machine's behaviour, and the findings of a probe that proved only part of it.
fn machines() -> impl Strategy<Value = (Quirks, Isolation)> {
    prop_oneof![
        2 => Just((Quirks::default(), Isolation::ALL)),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(hpmd, hccd)| {
            (Quirks::default(), Isolation { partition: true, hpmd, hccd })
        }),
        2 => (quirks(), any::<bool>(), any::<bool>()).prop_map(|(quirks, hpmd, hccd)| {
            let isolation = Isolation {
                partition: false,
                hpmd: hpmd && !quirks.no_hpmd,
                hccd: hccd && !quirks.no_hccd,
            };
            (quirks, isolation)
        }),
    ]
}

fn filters() -> impl Strategy<Value = EventFilter> {
    prop_oneof![
        2 => Just(EventFilter::allow_all()),
        1 => proptest::collection::vec(events(), 1..4).prop_map(|denied| {
            denied.into_iter().fold(EventFilter::allow_all(), |filter, event| {
                filter.deny(event..=event).expect("few rules")
            })
        }),
    ]
}

prop_compose! {
    /// Returns a machine's deviations from the architecture, and a configuration for it.
    pub(super) fn configs()(
        (implemented, host_counters) in (0..8_u8).prop_flat_map(|n| (Just(n), 0..=n)),
        version in proptest::sample::select(vec![
            PmuVersion::V3, PmuVersion::V3p1, PmuVersion::V3p4, PmuVersion::V3p5, PmuVersion::V3p5,
        ]),
        fgt in any::<bool>(), mtpmu in any::<bool>(), multithreaded in any::<bool>(),
        (quirks, isolation) in machines(),
        filter in filters(),
    ) -> (Quirks, PartitionConfig) {
        let features = Features { version, fgt, hpmn0: true, mtpmu, multithreaded };
        let config = PartitionConfig {
            implemented, host_counters, features, isolation, filter, events: EVENTS,
        };
        (quirks, config)
    }
}

/// Returns the machine that the guest believes it has: its own, with no host and nobody below EL1.
pub(super) fn native(config: &PartitionConfig) -> Machine {
    let counters = config.implemented - config.host_counters;
    let mut machine = Machine::new(counters, config.features, Quirks::default());
    machine.filter = config.filter;
    machine
}

/// Hides the bits that are RES0 for a guest and that hardware may keep: it has no EL2 and no EL3.
pub(super) fn comparable(register: Register, version: PmuVersion, outcome: Outcome) -> Outcome {
    match (register, outcome) {
        (
            Register::Pmevtyper(_) | Register::Pmxevtyper | Register::Pmccfiltr,
            Outcome::Value(value),
        ) => Outcome::Value(RawPmevtyper(value).for_guest(version, true).0),
        (_, other) => other,
    }
}

pub(super) fn natively(
    machine: &mut Machine,
    register: Register,
    write: Option<u64>,
    el: ExceptionLevel,
) -> Outcome {
    let exit = machine.guest(register, write, el);
    exit.outcome().expect("nobody is at EL2")
}

fn access(
    vm: &mut Vm,
    native: &mut Machine,
    (register, write, el): (Register, Option<u64>, ExceptionLevel),
) {
    let version = vm.machine.features.version;
    let host = vm.machine.host_part();
    let outcome = comparable(register, version, vm.access(register, write, el));
    let expected = comparable(register, version, natively(native, register, write, el));
    // Hardware checks PMUSERENR_EL0 before HPMN, but after PMCR_EL0.N.
    let order = matches!(
        (register, outcome, expected),
        (
            Register::Pmevtyper(_)
                | Register::Pmevcntr(_)
                | Register::Pmxevtyper
                | Register::Pmxevcntr,
            Outcome::TrapToEl1,
            Outcome::Undefined,
        )
    );
    assert!(
        order || outcome == expected,
        "{outcome:?}, not {expected:?}"
    );
    assert_eq!(vm.machine.host_part(), host, "the host's part");
}

fn step(vm: &mut Vm, native: &mut Machine, step: &Step) {
    let version = vm.machine.features.version;
    match *step {
        Step::Access(register, write, el) => access(vm, native, (register, write, el)),
        Step::Happen(event, place @ (Place::El0 | Place::El1), times) => {
            vm.machine.happen(event, place, times);
            native.happen(event, place, times);
        }
        Step::Happen(event, place, times) => {
            if place == Place::El2 {
                vm.exit();
            }
            let (counts, overflows) = (vm.machine.guest_counts(), vm.pmu.line(&mut vm.machine));
            vm.machine.happen(event, place, times);
            assert_eq!(vm.machine.guest_counts(), counts, "counted at {place:?}");
            assert_eq!(vm.pmu.line(&mut vm.machine), overflows);
        }
        Step::Switch(noise) => {
            let host = vm.machine.host_part();
            vm.put();
            for place in [Place::El1, Place::El2] {
                let counts = vm.machine.guest_counts();
                vm.machine.happen(0x11, place, 1);
                assert_eq!(vm.machine.guest_counts(), counts, "counted after a put");
            }
            let mut other = vm.machine.clone();
            other.happen(0x11, Place::El1, 1);
            assert_eq!(
                other.host_part().sets[0],
                host.sets[0],
                "the host's enables"
            );
            neighbour(&mut vm.machine, noise);
            vm.load();
        }
        Step::Interrupt => {
            vm.exit();
            let pending = native.interrupt();
            let host_bits = vm.machine.host_part().sets;
            let asserted = vm.machine.interrupt();
            let split = vm.pmu.overflow(&mut vm.machine);
            assert_eq!(split.guest, pending);
            let expected_host = host_bits[1] & host_bits[2];
            assert_eq!(u64::from(split.host.bits()), expected_host);
            assert_eq!(
                vm.machine.host_part().sets[2],
                host_bits[2] & !expected_host
            );
            assert_eq!(asserted, split.guest || !split.host.is_empty());
        }
        Step::Host(n, event_type, value) => {
            let n = usize::from(vm.machine.hpmn() + n);
            if n < usize::from(vm.machine.implemented) {
                vm.machine.evtyper[n] = event_type & 0xff70_ffff;
                vm.machine.evcntr[n] = value & version.counter_mask();
                vm.machine.cnten |= 1 << n;
                vm.machine.inten |= 1 << n;
            }
        }
        Step::Migrate => {
            let state = vm.pmu.save(&mut vm.machine);
            let mut new = super::PartitionedPmu::new(*vm.pmu.plan());
            new.restore(&state, &mut vm.machine).expect("its own state");
            vm.pmu = new;
            vm.load();
        }
    }
    assert_eq!(vm.pmu.line(&mut vm.machine), native.interrupt(), "line");
}

/// Fills the registers with the values of another vCPU, which has used the CPU in between and was put.
pub(super) fn neighbour(machine: &mut Machine, noise: u64) {
    for n in (0..usize::from(machine.hpmn())).chain([31]) {
        machine.evcntr[n] = noise;
        machine.evtyper[n] = noise & 0xff70_ffff;
    }
    machine.pmcr = noise & 0xf9;
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_guest_has_a_pmu_of_its_own_and_nothing_else(
        (quirks, config) in configs(),
        sequence in proptest::collection::vec(steps(), 1..80),
    ) {
        let machine = Machine::new(config.implemented, config.features, quirks);
        let mut vm = Vm::on(machine, plan(&config));
        let mut native = native(&config);
        for each in &sequence {
            step(&mut vm, &mut native, each);
        }
        for register in Register::all() {
            step(&mut vm, &mut native, &Step::Access(register, None, ExceptionLevel::El1));
        }
    }
}
