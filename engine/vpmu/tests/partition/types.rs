//! Tests of event types, their filter and the selection, where the published implementation or its review was wrong.

use super::machine::{EVENTS, Place};
use super::{Vm, config};
use vpmu::arm::partition::{Features, PartitionConfig};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, Register};

const E: u64 = 1;

/// Returns a configuration in which writes of types trap, because other threads could be counted.
fn trapping_types() -> PartitionConfig {
    PartitionConfig {
        features: Features {
            version: PmuVersion::V3p4,
            mtpmu: true,
            multithreaded: true,
            ..config().features
        },
        ..config()
    }
}

fn denying(event: u16) -> PartitionConfig {
    PartitionConfig {
        filter: EventFilter::allow_all()
            .deny(event..=event)
            .expect("one rule"),
        ..config()
    }
}

#[test]
fn the_cycle_filter_goes_to_the_cycle_counters_register() {
    let p = 1 << 31;
    let mut vm = Vm::new(&trapping_types());
    vm.write(Register::Pmccfiltr, p);
    assert_eq!((vm.machine.evtyper[31], vm.machine.evtyper[0]), (p, 0));
    vm.put();
    vm.machine.evtyper[31] = 0;
    vm.load();
    assert_eq!(vm.read(Register::Pmccfiltr), p);
    assert_eq!(vm.machine.evtyper[31], p);
}

#[test]
fn the_selected_type_of_index_31_is_the_cycle_filter() {
    for config in [config(), trapping_types(), denying(8)] {
        let mut vm = Vm::new(&config);
        vm.write(Register::Pmselr, 31);
        vm.write(Register::Pmxevtyper, 1 << 30);
        assert_eq!(vm.machine.evtyper[31], 1 << 30);
        assert_eq!(vm.read(Register::Pmxevtyper), 1 << 30);
        // There is no event counter 31, however.
        let outcome = vm.access(Register::Pmxevcntr, None, ExceptionLevel::El1);
        assert_eq!(outcome, Outcome::Undefined);
    }
}

#[test]
fn the_selection_is_the_hardwares_and_survives_a_switch() {
    let mut vm = Vm::new(&trapping_types());
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, E);
    // PMSELR_EL0 does not trap, so no copy of it could be up to date.
    let trapped = vm.trapped;
    vm.write(Register::Pmselr, 2);
    assert_eq!(vm.trapped, trapped);
    vm.write(Register::Pmxevtyper, 0x08);
    assert_eq!(vm.machine.evtyper[2], 0x08);

    vm.put();
    vm.machine.selr = 1;
    vm.load();
    vm.write(Register::Pmxevtyper, 0x11);
    assert_eq!(&vm.machine.evtyper[1..3], [0, 0x11]);
}

#[test]
fn an_idle_guest_does_not_suffer_from_anothers_selection() {
    let config = config();
    let mut vm = Vm::new(&config);
    vm.write(Register::Pmselr, 2);
    vm.put();
    // On the same CPU, another guest selects a counter that does not exist. An access to
    // PMXEVTYPER_EL0 would then be undefined before EL2 could see it.
    let mut other = Vm::on(vm.machine.clone(), super::plan(&config));
    other.write(Register::Pmselr, 30);
    other.put();
    vm.machine = other.machine;
    vm.machine.traps = vm.pmu.trap_registers();
    vm.load();
    vm.write(Register::Pmxevtyper, 0x08);
    assert_eq!(vm.machine.evtyper[2], 0x08);
}

#[test]
fn a_denied_event_counts_nothing_and_reads_back() {
    let mut vm = Vm::new(&denying(0x08));
    vm.write(Register::Pmevtyper(0), 0x08);
    vm.write(Register::Pmevtyper(1), 0x11);
    vm.write(Register::PmcntenSet, 3);
    vm.write(Register::Pmcr, E);
    vm.machine.happen(0x08, Place::El1, 5);
    vm.machine.happen(0x11, Place::El1, 5);
    vm.write(Register::Pmswinc, 3);
    assert_eq!(vm.machine.guest_counts()[..2], [0, 5]);
    for _ in 0..2 {
        assert_eq!(vm.read(Register::Pmevtyper(0)), 0x08);
        vm.write(Register::Pmselr, 0);
        assert_eq!(vm.read(Register::Pmxevtyper), 0x08);
        vm.put();
        vm.load();
    }
    assert_eq!(vm.machine.evtyper[0], 3 << 30);
    assert_eq!(vm.read(Register::Pmceid0), EVENTS[0] & !(1 << 8));
    assert_eq!(vm.read(Register::Pmceid1), EVENTS[1]);
}

#[test]
fn denied_cycles_stop_the_cycle_counter_too() {
    let mut vm = Vm::new(&denying(0x11));
    vm.write(Register::PmcntenSet, 1 << 31);
    vm.write(Register::Pmcr, E);
    vm.machine.happen(0x11, Place::El1, 5);
    vm.write(Register::Pmccfiltr, 0);
    vm.machine.happen(0x11, Place::El1, 5);
    assert_eq!(vm.read(Register::Pmccntr), 0);
    assert_eq!(vm.read(Register::Pmccfiltr), 0);
}
