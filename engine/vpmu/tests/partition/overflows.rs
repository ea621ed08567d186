//! Checks that no overflow or carry is lost or made up, whatever the published implementation or its review got wrong.

use super::machine::Place;
use super::{Vm, config, leaky};
use vpmu::arm::Register;

const E: u64 = 1;

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
    // A guest that waits for an interrupt must learn of it here.
    assert!(vm.pmu.line(&mut vm.machine));
    // Overflow bits that another guest left behind are no overflows of this guest.
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
    // The guest executes WFI and the CPU stays with it, so the physical interrupt wakes it.
    vm.machine.happen(0x11, Place::El1, 1);
    assert!(vm.machine.interrupt());
    assert!(vm.pmu.overflow(&mut vm.machine).guest);
    // The CPU goes to another guest. Nothing physical is left, so the host asks for the line.
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
    // A counter that still ran would overflow to zero, and the put would clear that overflow unseen.
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
fn a_software_increment_carries_into_a_chain() {
    // In one configuration PMSWINC_EL0 goes to the hardware, in the other EL2 performs the write.
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
        // PMCR_EL0.E does not enable the counters yet.
        vm.write(Register::Pmswinc, u64::MAX);
        vm.write(Register::Pmcr, E);
        vm.write(Register::Pmswinc, u64::MAX);
        assert_eq!(vm.machine.guest_counts()[..3], [0x1_0000_0000, 1, 0]);
        assert_eq!(vm.read(Register::PmovsSet), 1);
        // The filter excludes EL1.
        vm.write(Register::Pmevtyper(0), 1 << 31);
        vm.write(Register::Pmswinc, 1);
        assert_eq!(vm.machine.evcntr[0], 0x1_0000_0000);
        // Nothing carries into an event other than CHAIN, nor out of an odd counter.
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
