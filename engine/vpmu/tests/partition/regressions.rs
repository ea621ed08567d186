//! Tests of mistakes in the published implementation or its review, and of mistakes that are easy
//! to make.

use super::{Vm, config, leaky};
use vpmu::arm::partition::{Features, PartitionConfig};
use vpmu::arm::{ExceptionLevel, Outcome, PmuState, PmuVersion, Register};

const E: u64 = 1;
const P: u64 = 2;
const C: u64 = 4;

#[test]
fn a_reset_by_the_guest_resets_the_guests_counters() {
    // PMCR_EL0.P isolates in one configuration, it traps in another, and everything traps in the
    // third.
    let no_fgt = PartitionConfig {
        features: Features {
            fgt: false,
            ..config().features
        },
        ..leaky()
    };
    for config in [config(), leaky(), no_fgt] {
        let mut vm = Vm::new(&config);
        vm.busy_host();
        let host = vm.machine.host_part();
        for n in 0..4 {
            vm.write(Register::Pmevcntr(n), 9);
        }
        vm.write(Register::Pmccntr, 9);
        vm.write(Register::Pmcr, P | E);
        assert_eq!(vm.machine.guest_counts(), [0, 0, 0, 0, 9]);
        vm.write(Register::Pmcr, C | E);
        assert_eq!(vm.machine.guest_counts(), [0; 5]);
        assert_eq!(vm.machine.host_part(), host);
        assert_eq!(vm.read(Register::Pmcr) & 0xff, E);
    }
}

#[test]
fn the_number_of_counters_is_the_guests() {
    for config in [config(), leaky()] {
        let mut vm = Vm::new(&config);
        for _ in 0..2 {
            assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
        }
    }
}

#[test]
fn el0_reaches_no_host_counter_by_a_permission_that_tpm_is_not_asked_about() {
    let mut vm = Vm::new(&leaky());
    vm.busy_host();
    vm.machine.evtyper[5] = 0;
    vm.write(Register::Pmcr, E);
    let host = vm.machine.host_part();
    for permissions in [1 << 1, 1 << 3, 0xf] {
        vm.write(Register::Pmuserenr, permissions);
        for register in [Register::Pmswinc, Register::Pmselr, Register::PmcntenClr] {
            let _ = vm.access(register, Some(u64::MAX), ExceptionLevel::El0);
        }
        assert_eq!(vm.machine.host_part(), host);
        assert_eq!(vm.read(Register::Pmuserenr), permissions);
        vm.put();
        vm.load();
        assert_eq!(vm.read(Register::Pmuserenr), permissions);
    }
}

#[test]
fn counters_of_the_host_are_undefined_for_the_guest() {
    let no_fgt = Features {
        fgt: false,
        ..config().features
    };
    let configs = [
        config(),
        leaky(),
        PartitionConfig {
            features: no_fgt,
            ..config()
        },
        PartitionConfig {
            features: no_fgt,
            ..leaky()
        },
    ];
    for config in configs {
        let mut vm = Vm::new(&config);
        vm.busy_host();
        let host = vm.machine.host_part();
        vm.read(Register::Pmcr);
        for n in 4..31 {
            vm.write(Register::Pmselr, n.into());
            let registers = [
                Register::Pmevtyper(n),
                Register::Pmevcntr(n),
                Register::Pmxevtyper,
                Register::Pmxevcntr,
            ];
            for register in registers {
                for write in [None, Some(0)] {
                    let outcome = vm.access(register, write, ExceptionLevel::El1);
                    assert_eq!(outcome, Outcome::Undefined, "{register:?} {n}");
                }
            }
        }
        assert_eq!(vm.machine.host_part(), host);
    }
}

#[test]
fn set_and_clear_registers_neither_show_nor_reach_the_host() {
    for config in [config(), leaky()] {
        let mut vm = Vm::new(&config);
        vm.busy_host();
        let host = vm.machine.host_part();
        let pairs = [
            (Register::PmcntenSet, Register::PmcntenClr),
            (Register::PmintenSet, Register::PmintenClr),
            (Register::PmovsSet, Register::PmovsClr),
        ];
        for (set, clear) in pairs {
            assert_eq!(vm.read(set), 0);
            vm.write(set, u64::MAX);
            assert_eq!((vm.read(set), vm.read(clear)), (0x8000_000f, 0x8000_000f));
            vm.write(clear, u64::MAX);
            assert_eq!((vm.read(set), vm.read(clear)), (0, 0));
            assert_eq!(vm.machine.host_part(), host, "{set:?}");
        }
    }
}

#[test]
fn directions_that_do_not_exist_are_undefined_even_at_el2() {
    use ExceptionLevel::{El0, El1};
    let mut vm = Vm::new(&config());
    let mut regs = vm.machine.clone();
    for el in [El0, El1] {
        for register in [Register::Pmceid0, Register::Pmceid1, Register::Pmmir] {
            assert_eq!(vm.pmu.write(register, el, 0, &mut regs), Outcome::Undefined);
        }
        assert_eq!(
            vm.pmu.read(Register::Pmswinc, el, &mut regs),
            Outcome::Undefined
        );
    }
    for register in [Register::PmintenSet, Register::PmintenClr, Register::Pmmir] {
        assert_eq!(vm.pmu.read(register, El0, &mut regs), Outcome::Undefined);
    }
    assert_eq!(
        vm.pmu.write(Register::Pmuserenr, El0, 1, &mut regs),
        Outcome::Undefined
    );
    assert_eq!(regs.el2_accesses, 0);
}

#[test]
fn pmmir_came_with_pmuv3p4() {
    let mut old = config();
    old.features.version = PmuVersion::V3p1;
    let mut vm = Vm::new(&old);
    let mut regs = vm.machine.clone();
    let outcome = vm.pmu.read(Register::Pmmir, ExceptionLevel::El1, &mut regs);
    assert_eq!(outcome, Outcome::Undefined);
    assert_eq!(Vm::new(&config()).read(Register::Pmmir), 5);
}

#[test]
fn el0_is_refused_by_the_guests_permissions() {
    let everything = PartitionConfig {
        features: Features {
            fgt: false,
            ..config().features
        },
        ..leaky()
    };
    for config in [config(), everything] {
        let mut vm = Vm::new(&config);
        let el0 = ExceptionLevel::El0;
        vm.write(Register::Pmccntr, 3);
        assert_eq!(vm.access(Register::Pmccntr, None, el0), Outcome::TrapToEl1);
        vm.write(Register::Pmuserenr, 1 << 2);
        assert_eq!(vm.access(Register::Pmccntr, None, el0), Outcome::Value(3));
        assert_eq!(
            vm.access(Register::Pmccntr, Some(0), el0),
            Outcome::TrapToEl1
        );
        assert_eq!(vm.access(Register::Pmuserenr, None, el0), Outcome::Value(4));
        vm.put();
        vm.load();
        assert_eq!(vm.access(Register::Pmccntr, None, el0), Outcome::Value(3));
    }
}

/// Checks that bits of later extensions, which a guest may set in registers that do not trap, keep it from no other PMU.
#[test]
fn a_guest_that_sets_bits_of_later_versions_moves_to_an_emulated_pmu() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmuserenr, 1);
    let mut state = PmuState::reset(PmuVersion::V3p5, 4);
    // FZO and FZS of PMUv3p7, and UEN of PMUv3p9.
    state.pmcr |= E | 1 << 9 | 1 << 32;
    state.pmuserenr = 1 | 1 << 4;
    vm.pmu.restore(&state, &mut vm.machine).unwrap();
    let saved = vm.pmu.save(&mut vm.machine);
    assert_eq!(saved.pmcr & !(0x1f << 11), E);
    assert_eq!(saved.pmuserenr, 1);
}

/// Checks that what a counter leaves out in Streaming SVE mode (FEAT_PMUv3_SME) is kept in a saved guest.
#[test]
fn a_save_keeps_the_filters_of_streaming_mode() {
    const VS: u64 = 0b10 << 56;
    let mut vm = Vm::new(&config());
    let mut state = PmuState::reset(PmuVersion::V3p5, 4);
    (state.pmevtyper[0], state.pmccfiltr) = (VS | 8, VS);
    vm.pmu.restore(&state, &mut vm.machine).unwrap();
    let saved = vm.pmu.save(&mut vm.machine);
    assert_eq!((saved.pmevtyper[0], saved.pmccfiltr), (VS | 8, VS));
}
