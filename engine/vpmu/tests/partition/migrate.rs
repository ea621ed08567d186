//! A guest that goes on with another number of counters: on another CPU, or as the host takes some.

use super::machine::Place;
use super::{PartitionedPmu, Vm, config, machine, plan};
use vpmu::arm::partition::{Features, MigrateError, PartitionConfig};
use vpmu::arm::{ExceptionLevel, Outcome, PmuVersion, Register};
use vpmu::counter::{CounterState, Lost};

const E: u64 = 1;

#[test]
fn hpmn_belongs_to_the_cpu() {
    // Two clusters, with six and eight counters; the guest has four on both.
    let big = PartitionConfig {
        implemented: 8,
        host_counters: 4,
        ..config()
    };
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevcntr(3), 33);
    vm.write(Register::PmcntenSet, 8);
    vm.write(Register::Pmcr, E);
    assert_eq!(vm.pmu.migrate(plan(&big)), Err(MigrateError::Loaded));
    vm.put();
    vm.machine = machine(&big);
    vm.pmu
        .migrate(plan(&big))
        .expect("as many counters for the guest");
    vm.machine.traps = vm.pmu.trap_registers();
    vm.load();
    assert_eq!(vm.machine.traps.mdcr_el2 & 0x1f, 4);
    assert_eq!(vm.read(Register::Pmevcntr(3)), 33);
    assert_eq!(vm.machine.cnten, 8);

    vm.put();
    let greedy = PartitionConfig {
        host_counters: 1,
        ..big
    };
    let refused = vm.pmu.migrate(plan(&greedy));
    assert_eq!(
        refused,
        Err(MigrateError::Counters {
            guest: 4,
            offered: 7
        })
    );
    let features = Features {
        version: PmuVersion::V3p4,
        ..big.features
    };
    let refused = vm.pmu.migrate(plan(&PartitionConfig { features, ..big }));
    assert!(matches!(refused, Err(MigrateError::Version { .. })));
}

#[test]
fn a_guest_that_has_seen_nothing_may_go_anywhere() {
    let greedy = PartitionConfig {
        host_counters: 0,
        ..config()
    };
    let mut untouched = PartitionedPmu::new(plan(&config()));
    untouched
        .migrate(plan(&greedy))
        .expect("it has seen nothing");
    assert_eq!(untouched.plan().hpmn(), 6);

    let small = PartitionConfig {
        implemented: 3,
        host_counters: 0,
        ..config()
    };
    untouched
        .migrate(plan(&small))
        .expect("it has seen nothing");
    let state = untouched.save(&mut machine(&small));
    assert_eq!(state.pmcr >> 11 & 0x1f, 3);

    // What the host takes before the guest's first access it may give back after it.
    let mut vm = Vm::new(&config());
    let fewer = PartitionConfig {
        host_counters: 3,
        ..config()
    };
    vm.machine = machine(&fewer);
    vm.pmu.migrate(plan(&fewer)).expect("it has seen nothing");
    vm.machine.traps = vm.pmu.trap_registers();
    assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
    vm.write(Register::PmcntenSet, 8);
    vm.write(Register::Pmcr, E);
    let last = vpmu::counter::Counter::new(3).unwrap();
    let state = |vm: &mut Vm| vm.pmu.counter_state(last, &mut vm.machine);
    assert_eq!(state(&mut vm), Some(CounterState::Lost(Lost::Busy)));
    vm.put();
    vm.machine = machine(&config());
    vm.pmu
        .migrate(plan(&config()))
        .expect("no more than it saw");
    vm.machine.traps = vm.pmu.trap_registers();
    vm.load();
    assert_eq!(state(&mut vm), Some(CounterState::Counting));

    // A guest that has read PMCR_EL0.N has seen the PMU, though no register changed.
    let mut vm = Vm::new(&config());
    vm.read(Register::Pmcr);
    vm.put();
    let refused = vm.pmu.migrate(plan(&greedy));
    assert_eq!(
        refused,
        Err(MigrateError::Counters {
            guest: 4,
            offered: 6
        })
    );
}

/// A plan of the same CPU with so many counters of the host's.
fn with_host_counters(host_counters: u8) -> PartitionConfig {
    PartitionConfig {
        host_counters,
        ..config()
    }
}

fn replan(vm: &mut Vm, config: &PartitionConfig) {
    vm.put();
    vm.pmu.migrate(plan(config)).expect("no more counters");
    vm.load();
}

/// Returns a guest whose counter n has counted five instructions beyond 100 n.
fn counting() -> Vm {
    let mut vm = Vm::new(&config());
    for n in 0..4 {
        vm.write(Register::Pmevtyper(n), 0x08);
        vm.write(Register::Pmevcntr(n), 100 * u64::from(n));
    }
    vm.write(Register::PmcntenSet, 0b1111);
    vm.write(Register::Pmcr, E);
    vm.machine.happen(8, Place::El1, 5);
    vm
}

#[test]
fn a_counter_that_the_host_takes_is_lost_and_comes_back() {
    let counter = |n| vpmu::counter::Counter::new(n).unwrap();
    let mut vm = counting();

    replan(&mut vm, &with_host_counters(3));
    assert_eq!(vm.machine.traps.mdcr_el2 & 0x1f, 3);
    // The host uses the counter.
    vm.machine.evtyper[3] = 0x11;
    vm.machine.evcntr[3] = 0x3333;
    vm.machine.cnten |= 1 << 3;
    let host = vm.machine.host_part();
    vm.machine.happen(8, Place::El1, 7);
    // The guest finds what it had: as many counters, the lost one where it stood.
    assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
    assert_eq!(vm.read(Register::PmcntenSet), 0b1111);
    assert_eq!(vm.read(Register::Pmevcntr(2)), 212);
    assert_eq!(vm.read(Register::Pmevcntr(3)), 305);
    assert_eq!(vm.read(Register::Pmevtyper(3)), 0x08);
    let state = |vm: &mut Vm, n| vm.pmu.counter_state(counter(n), &mut vm.machine);
    assert_eq!(state(&mut vm, 2), Some(CounterState::Counting));
    assert_eq!(state(&mut vm, 3), Some(CounterState::Lost(Lost::Busy)));
    assert_eq!(state(&mut vm, 4), None);
    // Its writes change what it finds, and nothing of the host's.
    vm.write(Register::Pmevcntr(3), 42);
    vm.write(Register::PmintenSet, 0b1000);
    vm.write(Register::PmovsSet, 0b1000);
    // Its interrupt waits, as no wire has it.
    assert!(!vm.pmu.line(&mut vm.machine) && !vm.machine.interrupt());
    vm.put();
    assert!(!vm.pmu.line(&mut vm.machine));
    vm.load();
    vm.write(Register::Pmselr, 3);
    assert_eq!(vm.read(Register::Pmxevcntr), 42);
    vm.write(Register::Pmselr, 4);
    let absent = vm.access(Register::Pmxevcntr, None, ExceptionLevel::El1);
    assert_eq!(absent, Outcome::Undefined);
    assert_eq!(vm.machine.evcntr[3], 0x3333);
    assert_eq!(vm.machine.host_part(), host);

    vm.machine.cnten &= !(1 << 3);
    replan(&mut vm, &config());
    let trapped = vm.trapped;
    vm.machine.happen(8, Place::El1, 1);
    assert_eq!(vm.read(Register::Pmevcntr(3)), 43);
    assert_eq!(vm.read(Register::PmintenSet), 0b1000);
    assert_eq!(vm.trapped, trapped, "nothing traps any more");
    assert_eq!(state(&mut vm, 3), Some(CounterState::Counting));
    assert!(vm.pmu.line(&mut vm.machine) && vm.machine.interrupt());
    vm.write(Register::PmovsClr, 0b1000);
    assert!(!vm.pmu.line(&mut vm.machine) && !vm.machine.interrupt());
}

/// Checks a vCPU that goes to a CPU with fewer counters and back. What follows it counts on, and what does not is lost for
/// a reason, stands still, and counts on afterwards.
#[test]
fn what_a_smaller_cpu_lacks_is_lost_with_that_reason() {
    let mut vm = counting();
    vm.put();
    let small = PartitionConfig {
        implemented: 3,
        host_counters: 0,
        ..config()
    };
    vm.machine = machine(&small);
    vm.pmu.migrate(plan(&small)).expect("fewer counters");
    vm.load();
    vm.machine.traps = vm.pmu.trap_registers();
    vm.machine.happen(8, Place::El1, 7);
    assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
    assert_eq!(vm.read(Register::PmcntenSet), 0b1111);
    let last = vpmu::counter::Counter::new(3).unwrap();
    let state = |vm: &mut Vm| vm.pmu.counter_state(last, &mut vm.machine);
    assert_eq!(state(&mut vm), Some(CounterState::Lost(Lost::Unsupported)));
    // The CPU has no such register, which comes before any trap.
    let absent = vm.access(Register::Pmevcntr(3), None, ExceptionLevel::El1);
    assert_eq!(absent, Outcome::Undefined);
    vm.put();

    vm.machine = machine(&config());
    vm.pmu.migrate(plan(&config())).expect("as many as it saw");
    vm.load();
    vm.machine.traps = vm.pmu.trap_registers();
    assert_eq!(state(&mut vm), Some(CounterState::Counting));
    vm.machine.happen(8, Place::El1, 1);
    let values = [0, 1, 2, 3].map(|n| vm.read(Register::Pmevcntr(n)));
    assert_eq!(values, [13, 113, 213, 306]);
}
