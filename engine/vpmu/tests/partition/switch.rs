//! The lazy switch, and state as a value.

use super::machine::Place;
use super::{PartitionedPmu, Vm, config, leaky, plan};
use vpmu::arm::partition::{PartitionConfig, Residence};
use vpmu::arm::{
    ExceptionLevel, Outcome, PmuState, PmuVersion, RawPmevtyper, Register, RestoreError,
};

const E: u64 = 1;

#[test]
fn a_guest_that_never_touches_its_pmu_costs_nothing_at_a_switch() {
    let mut vm = Vm::new(&config());
    vm.busy_host();
    for _ in 0..10 {
        vm.load();
        vm.put();
    }
    assert_eq!(vm.machine.el2_accesses, 0);
    assert_eq!(vm.machine.traps, plan(&config()).trap_all());
}

#[test]
fn the_place_of_the_registers_is_told() {
    let mut vm = Vm::new(&config());
    assert_eq!(vm.pmu.residence(), Residence::Free);
    vm.put();
    assert_eq!(vm.pmu.residence(), Residence::Free);
    vm.write(Register::PmcntenSet, 1);
    assert_eq!(vm.pmu.residence(), Residence::Loaded);
    vm.put();
    assert_eq!(vm.pmu.residence(), Residence::Lazy);
    vm.write(Register::Pmcr, E);
    vm.put();
    assert_eq!(vm.pmu.residence(), Residence::Saved);
    vm.load();
    assert_eq!(vm.pmu.residence(), Residence::Loaded);
}

#[test]
fn an_eager_switch_moves_all_registers_and_traps_nothing() {
    let mut vm = Vm::new(&config());
    vm.pmu = PartitionedPmu::eager(plan(&config()));
    vm.busy_host();
    for _ in 0..3 {
        let before = vm.machine.el2_accesses;
        vm.load();
        assert_eq!(vm.machine.traps, plan(&config()).traps());
        vm.put();
        assert!(vm.machine.el2_accesses >= before + 2 * (4 + 4));
    }
    vm.load();
    vm.write(Register::Pmevcntr(2), 22);
    vm.put();
    vm.load();
    assert_eq!((vm.read(Register::Pmevcntr(2)), vm.trapped), (22, 0));
}

#[test]
fn the_first_touch_loads_and_the_rest_go_straight_to_the_hardware() {
    let mut vm = Vm::new(&config());
    assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
    assert_eq!(vm.machine.traps, plan(&config()).traps());
    let loaded = vm.machine.el2_accesses;
    vm.write(Register::Pmevtyper(0), 0x11);
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, E);
    vm.machine.happen(0x11, Place::El1, 5);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 5);
    assert_eq!((vm.machine.el2_accesses, vm.trapped), (loaded, 1));
}

#[test]
fn a_refused_access_of_el0_is_no_touch() {
    let mut vm = Vm::new(&config());
    // The hardware holds another guest's permission.
    vm.machine.userenr = 0xf;
    let outcome = vm.access(Register::Pmccntr, None, ExceptionLevel::El0);
    assert_eq!(outcome, Outcome::TrapToEl1);
    assert_eq!(vm.machine.el2_accesses, 0);
}

#[test]
fn nothing_of_another_guest_is_seen() {
    let mut vm = Vm::new(&config());
    vm.machine.evcntr = [0xdead; 32];
    vm.machine.evtyper = [0xdead; 32];
    vm.machine.ovs = 0x8000_000f;
    vm.machine.inten = 0x8000_000f;
    vm.machine.cnten = 0x8000_000f;
    vm.machine.pmcr = E;
    vm.machine.selr = 3;
    for register in Register::all() {
        let Outcome::Value(value) = vm.access(register, None, ExceptionLevel::El1) else {
            continue;
        };
        let constant = matches!(
            register,
            Register::Pmcr | Register::Pmceid0 | Register::Pmceid1 | Register::Pmmir
        );
        assert!(constant || value == 0, "{register:?} = {value:#x}");
    }
}

#[test]
fn an_idle_pmu_becomes_lazy_again_and_keeps_its_values() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevtyper(1), 0x08);
    vm.write(Register::Pmevcntr(1), 77);
    vm.write(Register::PmcntenSet, 2);
    // PMCR_EL0.E is clear: nothing counts.
    vm.put();
    let accesses = vm.machine.el2_accesses;
    vm.machine.evcntr[1] = 0;
    vm.load();
    vm.put();
    assert_eq!(vm.machine.el2_accesses, accesses);
    assert_eq!(vm.read(Register::Pmevcntr(1)), 77);
    assert_eq!(vm.read(Register::PmcntenSet), 2);
}

#[test]
fn a_pmu_in_use_is_loaded_again() {
    let uses: [&[(Register, u64)]; 3] = [
        &[(Register::PmcntenSet, 1), (Register::Pmcr, E)],
        &[
            (Register::PmovsSet, 1),
            (Register::PmintenSet, 1),
            (Register::Pmcr, E),
        ],
        // EL0 may access counters without a trap that could load the PMU.
        &[(Register::Pmuserenr, 1)],
    ];
    for writes in uses {
        let mut vm = Vm::new(&config());
        for &(register, value) in writes {
            vm.write(register, value);
        }
        vm.put();
        assert_eq!(
            vm.machine.userenr, 0,
            "nothing is left open for the host's EL0"
        );
        let trapped = vm.trapped;
        vm.load();
        for &(register, value) in writes {
            assert_eq!(vm.read(register) & 1, value & 1, "{register:?}");
        }
        assert_eq!(vm.trapped, trapped, "{writes:?}");
    }
}

#[test]
fn a_switch_leaves_the_host_alone() {
    for config in [config(), leaky()] {
        let mut vm = Vm::new(&config);
        vm.busy_host();
        let host = vm.machine.host_part();
        vm.write(Register::PmcntenSet, 0x8000_000f);
        vm.write(Register::PmintenSet, 0x8000_000f);
        vm.write(Register::PmovsSet, 0x8000_000f);
        vm.write(Register::Pmcr, E);
        vm.put();
        assert_eq!(vm.machine.host_part(), host);
        vm.load();
        assert_eq!(vm.machine.host_part(), host);
    }
}

#[test]
fn a_saved_state_goes_on_elsewhere() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevtyper(2), 0x08);
    vm.write(Register::Pmevcntr(2), 0xffff_ffff);
    vm.write(Register::PmcntenSet, 4);
    vm.write(Register::PmintenSet, 4);
    vm.write(Register::Pmcr, E);
    // The save comes between an overflow and its delivery.
    vm.machine.happen(0x08, Place::El1, 1);
    let state = vm.pmu.save(&mut vm.machine);
    assert_eq!(state.pmovs, 4);

    let mut other = Vm::new(&PartitionConfig {
        implemented: 8,
        host_counters: 4,
        ..config()
    });
    other
        .pmu
        .restore(&state, &mut other.machine)
        .expect("four counters here too");
    assert!(other.pmu.line(&mut other.machine));
    other.load();
    assert_eq!(other.pmu.save(&mut other.machine), state);
    other.load();
    assert!(other.machine.interrupt());
    other.machine.happen(0x08, Place::El1, 1);
    assert_eq!(other.read(Register::Pmevcntr(2)), 0x1_0000_0001);
}

#[test]
fn an_event_type_reads_the_same_after_a_switch() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmcr, E);
    // Counts at EL2, at EL3 and of other threads: the hardware keeps the bits, and the plan needs no trap.
    vm.write(Register::Pmevtyper(0), u64::MAX);
    vm.write(Register::Pmccfiltr, u64::MAX);
    vm.write(Register::PmcntenSet, 1);
    let types = |vm: &mut Vm| [Register::Pmevtyper(0), Register::Pmccfiltr].map(|r| vm.read(r));
    let before = types(&mut vm);
    assert_ne!(before[0] & RawPmevtyper::NSH, 0);
    vm.pmu.put(&mut vm.machine);
    (vm.machine.evtyper[0], vm.machine.evtyper[31]) = (0, 0);
    vm.load();
    assert_eq!(types(&mut vm), before);
}

#[test]
fn a_saved_state_holds_nothing_a_guest_does_not_have() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevtyper(0), u64::MAX);
    vm.write(Register::Pmccfiltr, u64::MAX);
    assert_eq!(vm.trapped, 1, "only the first touch");
    let state = vm.pmu.save(&mut vm.machine);
    assert_eq!(
        (state.pmevtyper[0], state.pmccfiltr),
        (0xf000_ffff, 0xf000_0000)
    );
}

#[test]
fn states_that_do_not_fit_are_refused() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevcntr(0), 5);
    let good = PmuState::reset(PmuVersion::V3p5, 4);
    let cases = [
        (
            PmuState {
                layout: 9,
                ..good.clone()
            },
            RestoreError::Layout { saved: 9 },
        ),
        (
            PmuState::reset(PmuVersion::V3p4, 4),
            RestoreError::Version {
                saved: PmuVersion::V3p4,
                offered: PmuVersion::V3p5,
            },
        ),
        (
            PmuState::reset(PmuVersion::V3p5, 6),
            RestoreError::Counters {
                saved: 6,
                offered: 4,
            },
        ),
        (
            PmuState {
                pmcnten: 0x10,
                ..good
            },
            RestoreError::Reserved {
                register: "PMCNTENSET_EL0",
                value: 0x10,
            },
        ),
    ];
    for (state, error) in cases {
        assert_eq!(vm.pmu.restore(&state, &mut vm.machine), Err(error));
    }
    vm.machine.traps = vm.pmu.trap_registers();
    assert_eq!(vm.read(Register::Pmevcntr(0)), 5);
}
