//! PMUs that are made where they stand, and made anew, and reset.

use super::backed::Vm as Backed;
use super::machine::Machine;
use super::{Vm, config, machine, plan};
use vpmu::arm::emulated::BackedPmu;
use vpmu::arm::partition::{PartitionConfig, PartitionedPmu, PmuRegisters as _};
use vpmu::arm::{ExceptionLevel, Outcome, PmuVersion, Register, RestoreError, pmcr};

/// Whether nothing of a guest counts or interrupts, and EL0 has no access.
fn is_quiet(machine: &mut Machine) -> bool {
    machine.read(Register::PmcntenSet) == 0
        && machine.read(Register::PmintenSet) == 0
        && machine.read(Register::PmovsSet) == 0
        && machine.read(Register::Pmuserenr) == 0
}

#[test]
fn a_place_becomes_the_pmu_that_new_makes() {
    static PLACE: PartitionedPmu = PartitionedPmu::vacant();
    let mut machine = machine(&config());
    let mut pmu = PLACE.clone();
    pmu.init(&plan(&config()), &mut machine);
    assert_eq!(
        format!("{pmu:?}"),
        format!("{:?}", PartitionedPmu::new(plan(&config())))
    );
    let traps = BackedPmu::vacant().trap_registers().mdcr_el2;
    assert_eq!(traps & 3 << 5, 3 << 5, "everything of a guest traps");
}

#[test]
fn a_partition_that_is_reset_or_made_anew_has_let_go() {
    let fewer = PartitionConfig {
        host_counters: 4,
        ..config()
    };
    for anew in [false, true] {
        let mut vm = Vm::new(&config());
        vm.write(Register::Pmevcntr(0), 7);
        vm.write(Register::PmovsSet, 1);
        vm.write(Register::PmintenSet, 1);
        vm.write(Register::Pmuserenr, 1);
        vm.write(Register::PmcntenSet, 1);
        vm.write(Register::Pmcr, pmcr::E);
        assert!(!is_quiet(&mut vm.machine));
        let guest = if anew { &fewer } else { &config() };
        if anew {
            vm.pmu.init(&plan(&fewer), &mut vm.machine);
        } else {
            vm.pmu.reset(&mut vm.machine);
        }
        assert!(is_quiet(&mut vm.machine));
        assert!(!vm.pmu.is_loaded() && !vm.pmu.line(&mut vm.machine));
        let fresh = PartitionedPmu::new(plan(guest)).save(&mut vm.machine);
        assert_eq!(vm.pmu.save(&mut vm.machine), fresh);
    }
}

#[test]
fn a_backed_pmu_that_is_reset_or_made_anew_has_let_go() {
    let config = config();
    for (anew, runs) in [(false, true), (false, false), (true, true)] {
        let mut vm = Backed::new(&config);
        vm.write(Register::Pmevtyper(0), 0x08);
        vm.write(Register::Pmevcntr(0), 7);
        vm.write(Register::PmintenSet, 1);
        vm.write(Register::PmovsSet, 1);
        vm.write(Register::Pmuserenr, 1);
        vm.write(Register::PmcntenSet, 1);
        vm.write(Register::Pmcr, pmcr::E);
        assert_eq!(vm.pmu.line_changed(), Some(true));
        assert_eq!(vm.pmu.line_changed(), None);
        if !runs {
            vm.pmu.put(&mut vm.machine);
        }
        if anew {
            let offered = vm.config.clone();
            vm.pmu
                .init(&offered, &plan(&config), &mut vm.machine)
                .expect("as at first");
        } else {
            vm.pmu.reset(&mut vm.machine);
        }
        assert!(is_quiet(&mut vm.machine));
        assert_eq!(vm.pmu.line_changed(), Some(false));
        assert_eq!(vm.pmu.is_loaded(), runs);
        let fresh = Backed::new(&config).pmu.save(&mut vm.machine);
        assert_eq!(vm.pmu.save(&mut vm.machine), fresh);
    }
}

#[test]
fn a_restore_of_a_pmu_that_was_put_starts_at_the_load() {
    let mut vm = Backed::new(&config());
    vm.write(Register::Pmevtyper(0), 0x08);
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, pmcr::E);
    let state = vm.pmu.save(&mut vm.machine);
    let refused = vm.pmu.restore_put(&state, &mut vm.machine);
    assert_eq!(refused, Err(RestoreError::Loaded));
    vm.pmu.reset(&mut vm.machine);
    vm.pmu.put(&mut vm.machine);
    let mut older = state.clone();
    older.version = PmuVersion::V3;
    assert!(vm.pmu.restore_put(&older, &mut vm.machine).is_err());
    vm.pmu
        .restore_put(&state, &mut vm.machine)
        .expect("its own state");
    assert!(is_quiet(&mut vm.machine));
    vm.pmu.load(&mut vm.machine);
    assert_eq!(vm.machine.read(Register::PmcntenSet) & 1, 1);
    assert_eq!(vm.pmu.save(&mut vm.machine), state);
}

#[test]
fn a_refused_configuration_changes_nothing() {
    let mut vm = Backed::new(&config());
    vm.write(Register::Pmevcntr(0), 7);
    let mut more = vm.config.clone();
    more.counters = 7;
    let refused = vm.pmu.init(&more, &plan(&config()), &mut vm.machine);
    assert!(refused.is_err());
    let read = vm
        .pmu
        .read(Register::Pmevcntr(0), ExceptionLevel::El1, &mut vm.machine);
    assert_eq!(read, Outcome::Value(7));
}
