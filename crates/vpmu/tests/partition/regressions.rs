//! What the published implementation, or its review, got wrong, and what is easy to get wrong.

use super::machine::{EVENTS, Place};
use super::{Vm, config, leaky};
use vpmu::arm::partition::{Features, PartitionConfig};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, Register};

const E: u64 = 1;
const P: u64 = 2;
const C: u64 = 4;

/// Writes of types trap: other threads could be counted.
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
        // But there is no event counter 31.
        let outcome = vm.access(Register::Pmxevcntr, None, ExceptionLevel::El1);
        assert_eq!(outcome, Outcome::Undefined);
    }
}

#[test]
fn the_selection_is_the_hardwares_and_survives_a_switch() {
    let mut vm = Vm::new(&trapping_types());
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, E);
    // Not trapped, so no copy of it could be up to date.
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
    // On the same CPU, another guest selects a counter that does not exist: whoever accesses
    // PMXEVTYPER_EL0 then is undefined, before EL2 could see it.
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
fn an_overflow_is_lost_neither_by_a_put_nor_by_a_load() {
    let mut vm = Vm::new(&config());
    vm.busy_host();
    vm.write(Register::Pmevtyper(0), 0x11);
    vm.write(Register::Pmevcntr(0), 0xffff_ffff);
    vm.write(Register::PmintenSet, 1);
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, E);
    vm.machine.happen(0x11, Place::El1, 1);
    assert!(vm.machine.interrupt());
    vm.put();
    assert_eq!(vm.machine.ovs & 0x8000_000f, 0);
    // Who waits for an interrupt must learn of it here.
    assert!(vm.pmu.line(&mut vm.machine));
    // What another guest left behind is no overflow of this one.
    vm.machine.ovs |= 0xe;
    vm.load();
    assert_eq!(vm.read(Register::PmovsSet), 1);
    assert!(vm.pmu.overflow(&mut vm.machine).guest);
    vm.write(Register::PmovsClr, 1);
    assert!(!vm.pmu.overflow(&mut vm.machine).guest);
}

#[test]
fn a_halted_vcpu_is_woken_by_its_interrupt() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmccntr, u64::MAX);
    vm.write(Register::PmintenSet, 1 << 31);
    vm.write(Register::PmcntenSet, 1 << 31);
    // The cycle counter overflows at 2^64.
    vm.write(Register::Pmcr, E | 1 << 6);
    // WFI, and the CPU does not go to anybody else: the physical interrupt wakes it.
    vm.machine.happen(0x11, Place::El1, 1);
    assert!(vm.machine.interrupt());
    assert!(vm.pmu.overflow(&mut vm.machine).guest);
    // It does go to somebody else: nothing physical is left, so the line is asked for.
    vm.put();
    assert!(!vm.machine.interrupt());
    assert!(vm.pmu.line(&mut vm.machine));
    vm.load();
    assert!(vm.machine.interrupt());
}

/// A machine that counts on while EL2 reads its registers: each PMOVS read is followed by an
/// overflow of counter 0, unless the counter has been stopped by then.
struct Racing(super::machine::Machine);

impl vpmu::arm::partition::PmuRegisters for Racing {
    fn read(&mut self, register: Register) -> u64 {
        let value = self.0.read(register);
        if matches!(register, Register::PmovsSet | Register::PmovsClr) {
            self.0.evcntr[0] = 0xffff_ffff;
            self.0.happen(0x11, Place::El1, 1);
        }
        value
    }

    fn write(&mut self, register: Register, value: u64) {
        self.0.write(register, value);
    }
}

#[test]
fn no_overflow_falls_between_reading_and_clearing() {
    let mut vm = Vm::new(&config());
    vm.write(Register::Pmevtyper(0), 0x11);
    vm.write(Register::PmcntenSet, 1);
    vm.write(Register::Pmcr, E);
    let mut racing = Racing(vm.machine);
    vm.pmu.put(&mut racing);
    // Had the counter still run, its overflow would have been cleared unseen, and its value zero.
    assert_eq!(racing.0.evcntr[0], 0xffff_ffff);
    let state = vm.pmu.save(&mut racing);
    assert_eq!(state.pmcnten, 1);
}

#[test]
fn no_counter_runs_on_after_a_put() {
    let mut vm = Vm::new(&config());
    vm.busy_host();
    for n in 0..4 {
        vm.write(Register::Pmevtyper(n), 0x11);
    }
    vm.write(Register::PmcntenSet, u64::MAX);
    vm.write(Register::PmintenSet, u64::MAX);
    vm.write(Register::Pmcr, E);
    vm.put();
    assert_eq!(vm.machine.cnten, 0x30);
    assert_eq!(vm.machine.inten, 0x30);
    let counts = vm.machine.guest_counts();
    vm.machine.happen(0x11, Place::El1, 3);
    assert_eq!(vm.machine.guest_counts(), counts);
}

#[test]
fn a_reset_by_the_guest_resets_the_guests_counters() {
    // Where PMCR_EL0.P isolates, where it traps, and where everything traps.
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
fn a_software_increment_carries_into_a_chain() {
    // Where PMSWINC_EL0 goes to the hardware, and where it is performed at EL2.
    for config in [config(), leaky()] {
        let mut vm = Vm::new(&config);
        vm.busy_host();
        // The host counts software increments too.
        vm.machine.evtyper[5] = 0;
        let host = vm.machine.host_part();
        vm.write(Register::Pmevtyper(0), 0);
        vm.write(Register::Pmevtyper(1), 0x1e);
        vm.write(Register::Pmevtyper(2), 8);
        vm.write(Register::Pmevcntr(0), 0xffff_ffff);
        vm.write(Register::PmcntenSet, 3);
        // Not enabled by PMCR_EL0.E yet.
        vm.write(Register::Pmswinc, u64::MAX);
        vm.write(Register::Pmcr, E);
        vm.write(Register::Pmswinc, u64::MAX);
        assert_eq!(vm.machine.guest_counts()[..3], [0x1_0000_0000, 1, 0]);
        assert_eq!(vm.read(Register::PmovsSet), 1);
        // Filtered away at EL1.
        vm.write(Register::Pmevtyper(0), 1 << 31);
        vm.write(Register::Pmswinc, 1);
        assert_eq!(vm.machine.evcntr[0], 0x1_0000_0000);
        // No carry into what is no CHAIN, nor out of an odd counter.
        vm.write(Register::PmcntenSet, 0xf);
        vm.write(Register::Pmevtyper(1), 0);
        vm.write(Register::Pmevtyper(2), 0x1e);
        vm.write(Register::Pmevcntr(1), 0xffff_ffff);
        vm.write(Register::Pmswinc, 2);
        assert_eq!(vm.machine.guest_counts()[1..3], [0x1_0000_0000, 0]);
        vm.write(Register::Pmevtyper(2), 0);
        vm.write(Register::Pmevtyper(3), 8);
        vm.write(Register::Pmevcntr(2), 0xffff_ffff);
        vm.write(Register::Pmswinc, 4);
        assert_eq!(vm.machine.guest_counts()[2..4], [0x1_0000_0000, 0]);
        assert_eq!(vm.machine.host_part(), host);
    }
}

#[test]
fn a_counter_of_64_bits_carries_into_no_chain() {
    let lp = 1 << 7;
    for config in [config(), leaky()] {
        for (control, carries) in [(E, 1), (E | lp, 0)] {
            let mut vm = Vm::new(&config);
            vm.write(Register::Pmevtyper(0), 0);
            vm.write(Register::Pmevtyper(1), 0x1e);
            vm.write(Register::Pmevcntr(0), u64::MAX);
            vm.write(Register::PmcntenSet, 3);
            vm.write(Register::Pmcr, control);
            vm.write(Register::Pmswinc, 1);
            assert_eq!(vm.machine.guest_counts()[..2], [0, carries]);
            assert_eq!(vm.read(Register::PmovsSet), 1);
        }
    }
}

#[test]
fn an_interrupt_is_split_between_guest_and_host() {
    let mut vm = Vm::new(&config());
    vm.busy_host();
    vm.write(Register::PmintenSet, 1);
    vm.write(Register::PmovsSet, 1);
    // The guest's line is low while PMCR_EL0.E is clear: the interrupt is the host's alone.
    let split = vm.pmu.overflow(&mut vm.machine);
    assert_eq!((split.guest, split.host.bits()), (false, 0x20));
    assert_eq!(
        vm.machine.ovs, 1,
        "the host's is cleared, the guest's is not"
    );
    vm.write(Register::Pmcr, E);
    let split = vm.pmu.overflow(&mut vm.machine);
    assert_eq!((split.guest, split.host.bits()), (true, 0));
    // A host counter that overflowed without its interrupt enabled caused nothing.
    vm.machine.ovs |= 0x10;
    vm.machine.inten = 1;
    let split = vm.pmu.overflow(&mut vm.machine);
    assert_eq!((split.guest, split.host.bits()), (true, 0));
    assert_eq!(vm.machine.ovs, 0x11);
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
