//! A switch from a guest to another, which writes only registers that differ.

use proptest::prelude::*;

use super::hostile::{Step, steps};
use super::{PartitionedPmu, Vm, config, leaky, plan};
use vpmu::arm::{EventFilter, PmuState, Register};

/// Takes the guest of `vm` out of the CPU and puts `other` in.
fn switch(vm: &mut Vm, other: &mut PartitionedPmu) {
    vm.exit();
    vm.pmu.put(&mut vm.machine);
    let (mut machine, mut whole) = (vm.machine.clone(), other.clone());
    whole.load(&mut machine);
    other.load_after(&vm.pmu, &mut vm.machine);
    assert!(vm.machine.el2_accesses <= machine.el2_accesses);
    machine.el2_accesses = vm.machine.el2_accesses;
    assert_eq!(vm.machine, machine);
    std::mem::swap(&mut vm.pmu, other);
    vm.machine.traps = vm.pmu.trap_registers();
}

#[test]
fn a_switch_between_guests_writes_no_more_than_differs() {
    let mut vm = Vm::new(&config());
    let mut other = vm.pmu.clone();
    for counts in [100, 200] {
        vm.write(Register::Pmevtyper(0), 0x11);
        vm.write(Register::Pmevcntr(0), counts);
        vm.write(Register::PmcntenSet, 1);
        vm.write(Register::Pmcr, 1);
        switch(&mut vm, &mut other);
    }
    let before = vm.machine.el2_accesses;
    switch(&mut vm, &mut other);
    // The put reads 4 counters, their types and 8 more, and clears three sets. A count differs, and the counter goes on.
    assert_eq!(vm.machine.el2_accesses - before, 8 + 8 + 3 + 2);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 200);
}

#[test]
fn a_guest_counts_what_it_may_after_a_guest_that_may_not() {
    let mut narrow = config();
    narrow.filter = EventFilter::deny_all();
    let mut vm = Vm::new(&narrow);
    vm.write(Register::Pmevtyper(0), 0x08);
    let mut other = PartitionedPmu::new(plan(&config()));
    let mut state = other.save(&mut vm.machine);
    (state.pmcr, state.pmcnten, state.pmevtyper[0]) = (state.pmcr | 1, 1, 0x08);
    other.restore(&state, &mut vm.machine).unwrap();
    switch(&mut vm, &mut other);
}

proptest! {
    #[test]
    fn after_another_guest_s_put_the_hardware_is_as_after_a_whole_load(
        hidden in any::<bool>(),
        leaks in any::<bool>(),
        (first, second) in (any::<bool>(), any::<bool>()),
        steps in proptest::collection::vec(prop_oneof![6 => steps(), 1 => Just(Step::Switch(0))], 1..120),
    ) {
        let mut config = if leaks { leaky() } else { config() };
        if hidden {
            config.filter = EventFilter::deny_all().allow(0x11..=0x11).expect("a rule");
        }
        let made = |eager| if eager { PartitionedPmu::eager(plan(&config)) } else { PartitionedPmu::new(plan(&config)) };
        let mut vm = Vm::new(&config);
        vm.pmu = made(first);
        vm.load();
        let mut other = made(second);
        for step in steps {
            match step {
                Step::Access(register, write, el) => {
                    let _ = vm.access(register, write, el);
                }
                Step::Happen(event, place, times) => vm.machine.happen(event, place, times),
                Step::Switch(_) => switch(&mut vm, &mut other),
                Step::Migrate => {
                    // The registers that the hardware still has are not this guest's any more.
                    let state = PmuState { pmccntr: 7, ..vm.pmu.save(&mut vm.machine) };
                    prop_assert!(vm.pmu.restore(&state, &mut vm.machine).is_ok());
                    vm.load();
                }
                Step::Interrupt | Step::Host(..) => {}
            }
        }
    }
}
