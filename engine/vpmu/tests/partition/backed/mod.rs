//! Checks that a guest of the emulated PMU on physical counters, open or closed, has a PMU of its own.

mod random;

use super::machine::{EVENTS, Machine, Place};
use super::{assert_written, config, leaky, machine, plan, value_read};
use vpmu::arm::emulated::{BackedPmu, ConfigError, EmulatedConfig, Identity};
use vpmu::arm::partition::{Features, MigrateError, PartitionConfig, TrapRegisters};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, Register, pmcr, pmuserenr};
use vpmu::counter::{Counter, CounterState, Lost, Policy};

const TPM_AND_TPMCR: u64 = 3 << 5;

/// One vCPU on one CPU, with a hypervisor that does what the documentation asks of it.
#[derive(Clone)]
pub(super) struct Vm {
    pub(super) machine: Machine,
    pub(super) pmu: BackedPmu,
    pub(super) config: EmulatedConfig,
    /// Number of the guest's accesses that came to EL2.
    trapped: u64,
}

/// Returns the PMU that `config` offers when the guest finds its machine as it is.
fn emulated(config: &PartitionConfig, policy: Policy) -> EmulatedConfig {
    EmulatedConfig {
        counters: config.implemented - config.host_counters,
        version: config.features.version,
        el3: true,
        aarch32: true,
        identity: Identity {
            implementer: 0x41,
            code: 1,
        },
        events: EVENTS,
        pmmir: 5,
        filter: config.filter,
        policy,
    }
}

impl Vm {
    pub(super) fn new(config: &PartitionConfig) -> Self {
        Self::on(machine(config), config, emulated(config, Policy::default()))
    }

    fn on(mut machine: Machine, config: &PartitionConfig, emulated: EmulatedConfig) -> Self {
        let pmu = BackedPmu::new(emulated.clone(), plan(config), &mut machine).unwrap();
        machine.traps = pmu.trap_registers();
        Self {
            machine,
            pmu,
            config: emulated,
            trapped: 0,
        }
    }

    fn access(&mut self, register: Register, write: Option<u64>, el: ExceptionLevel) -> Outcome {
        let outcome = match self.machine.guest(register, write, el).outcome() {
            Some(outcome) => outcome,
            None => {
                self.trapped += 1;
                match write {
                    Some(value) => self.pmu.write(register, el, value, &mut self.machine),
                    None => self.pmu.read(register, el, &mut self.machine),
                }
            }
        };
        self.enter();
        outcome
    }

    fn enter(&mut self) {
        self.machine.traps = self.pmu.trap_registers();
    }

    fn is_open(&self) -> bool {
        self.machine.traps.mdcr_el2 & TPM_AND_TPMCR == 0
    }

    fn read(&mut self, register: Register) -> u64 {
        value_read(register, self.access(register, None, ExceptionLevel::El1))
    }

    pub(super) fn write(&mut self, register: Register, value: u64) {
        let outcome = self.access(register, Some(value), ExceptionLevel::El1);
        assert_written(register, outcome);
    }

    /// Makes event counter 0 count instructions from `value` on, with its interrupt enabled.
    fn sample(&mut self, control: u64, value: u64) {
        self.write(Register::Pmcr, control);
        self.write(Register::Pmevtyper(0), 8);
        self.write(Register::Pmevcntr(0), value);
        self.write(Register::PmintenSet, 1);
        self.write(Register::PmcntenSet, 1);
        self.write(Register::Pmcr, control | pmcr::E);
    }

    /// Takes the physical interrupt for as long as it is asserted.
    fn deliver(&mut self) -> bool {
        // Each counter may report early, once.
        for _ in 0..64 {
            if !self.machine.interrupt() {
                return self.pmu.line();
            }
            self.pmu.overflow(&mut self.machine);
        }
        panic!("the physical interrupt is not taken back");
    }

    fn put(&mut self) {
        self.pmu.put(&mut self.machine);
        self.enter();
    }

    fn load(&mut self) {
        self.pmu.load(&mut self.machine);
        self.enter();
    }
}

#[test]
fn open_registers_trap_what_decides_and_nothing_else() {
    let mut vm = Vm::new(&config());
    assert!(!vm.is_open(), "nobody has touched it");
    vm.write(Register::Pmcr, pmcr::LC);
    let types = 1 << 13 | 1 << 14;
    let enables = 1 << 16 | 1 << 17;
    assert_eq!(
        vm.machine.traps,
        TrapRegisters {
            mdcr_el2: plan(&config()).traps().mdcr_el2,
            // PMMIR_EL1 and PMCEIDn_EL0.
            hdfgrtr_el2: types | enables | 1 << 22 | 1 << 58,
            // PMOVS, PMSWINC_EL0 and PMCR_EL0.
            hdfgwtr_el2: types | enables | 1 << 18 | 1 << 20 | 1 << 21,
        }
    );
    for register in Register::all() {
        for write in [false, true] {
            let el2 = vm.trapped;
            let _ = vm.access(register, write.then_some(0), ExceptionLevel::El1);
            let exists = match register {
                Register::Pmevcntr(n) | Register::Pmevtyper(n) => n < 4,
                _ => register.is_accessible(write),
            };
            if exists {
                let offered = vm.pmu.is_trapped(register, write);
                assert_eq!(vm.trapped > el2, offered, "{register:?} {write}");
            }
        }
    }
}

/// Counts the traps of the accesses that Linux's driver makes for a sample: `armv8pmu_handle_irq`, one counter that has
/// overflowed.
#[test]
fn a_sample_traps_three_times() {
    let vm = &mut Vm::new(&config());
    vm.sample(pmcr::LC | pmcr::LP, 2_u64.wrapping_neg());
    vm.machine.happen(8, Place::El1, 3);
    assert!(vm.deliver());
    vm.trapped = 0;
    assert_eq!(vm.read(Register::PmovsClr), 1);
    vm.write(Register::PmovsClr, 1);
    assert!(!vm.pmu.line());
    let control = vm.read(Register::Pmcr);
    vm.write(Register::Pmcr, control & !pmcr::E);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 1);
    vm.write(Register::Pmevcntr(0), 1_u64.wrapping_neg());
    vm.write(Register::Pmuserenr, 0);
    let control = vm.read(Register::Pmcr);
    vm.write(Register::Pmcr, control | pmcr::E);
    assert_eq!(vm.trapped, 3);
    vm.machine.happen(8, Place::El1, 1);
    assert!(vm.deliver(), "the next sample");
}

#[test]
fn registers_stay_closed_where_the_hardware_would_answer_otherwise() {
    let ours = config();
    let machines = machine(&ours);
    let offered = emulated(&ours, Policy::default());
    let opens = |config: &PartitionConfig, emulated: &EmulatedConfig| {
        let mut vm = Vm::on(machine(config), config, emulated.clone());
        vm.write(Register::Pmcr, pmcr::LC);
        vm.is_open()
    };
    assert!(opens(&ours, &offered));
    let identity = Identity::default();
    assert!(!opens(
        &ours,
        &EmulatedConfig {
            identity,
            ..offered.clone()
        }
    ));
    let version = PmuVersion::V3p1;
    assert!(!opens(
        &ours,
        &EmulatedConfig {
            version,
            ..offered.clone()
        }
    ));
    assert!(!opens(
        &ours,
        &EmulatedConfig {
            counters: 3,
            ..offered.clone()
        }
    ));
    // Registers open neither without fine-grained traps nor where host counters are not proven to be hidden. Where
    // there are no host counters, they open.
    let features = Features {
        fgt: false,
        ..ours.features
    };
    assert!(!opens(&PartitionConfig { features, ..ours }, &offered));
    assert!(!opens(&leaky(), &offered));
    let alone = PartitionConfig {
        host_counters: 0,
        ..leaky()
    };
    assert!(opens(&alone, &emulated(&alone, Policy::default())));

    let too_many = EmulatedConfig {
        counters: 5,
        ..offered
    };
    let refused = BackedPmu::new(too_many, plan(&ours), &mut machines.clone()).unwrap_err();
    let (counters, physical) = (5, 4);
    assert_eq!(refused, ConfigError::Unbacked { counters, physical });
}

#[test]
fn a_chain_counter_closes_the_registers_and_its_end_opens_them() {
    let vm = &mut Vm::new(&config());
    vm.sample(0, 0xffff_fffe);
    vm.write(Register::Pmevcntr(1), 7);
    assert!(vm.is_open());
    vm.write(Register::Pmevtyper(1), 0x1e);
    assert!(!vm.is_open());
    vm.write(Register::PmcntenSet, 0b10);
    vm.machine.happen(8, Place::El0, 3);
    vm.deliver();
    assert_eq!(vm.read(Register::Pmevcntr(1)), 8);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 1 << 32 | 1);
    vm.write(Register::Pmselr, 1);
    vm.write(Register::Pmxevtyper, 8);
    assert!(vm.is_open());
    vm.machine.happen(8, Place::El0, 1);
    assert_eq!(vm.read(Register::Pmevcntr(1)), 9);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 1 << 32 | 2);
    // The write goes by way of PMSELR_EL0, which did not trap.
    vm.write(Register::Pmselr, 3);
    vm.write(Register::Pmxevtyper, 0x1e);
    assert!(!vm.is_open());
    assert_eq!(vm.read(Register::Pmevtyper(3)), 0x1e);
}

#[test]
fn exporting_events_closes_the_registers() {
    let vm = &mut Vm::new(&config());
    vm.sample(0, 5);
    vm.write(Register::Pmcr, pmcr::E | pmcr::X);
    assert!(!vm.is_open());
    assert_eq!(vm.machine.pmcr & pmcr::X, 0, "nothing is exported");
    assert_eq!(vm.read(Register::Pmcr) & 0xff, pmcr::E | pmcr::X);
    vm.write(Register::Pmcr, pmcr::E);
    assert!(vm.is_open());
    assert_eq!(vm.read(Register::Pmevcntr(0)), 5);
}

#[test]
fn a_denied_event_counts_nothing_while_the_registers_are_open() {
    let filter = EventFilter::allow_all().deny(8..=8).unwrap();
    let vm = &mut Vm::new(&PartitionConfig { filter, ..config() });
    vm.sample(0, 5);
    vm.machine.happen(8, Place::El1, 3);
    assert!(vm.is_open());
    assert_eq!(vm.read(Register::Pmevcntr(0)), 5);
    vm.pmu.set_filter(EventFilter::allow_all(), &mut vm.machine);
    vm.machine.happen(8, Place::El1, 3);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 8);
}

#[test]
fn a_put_leaves_nothing_of_the_guests() {
    let vm = &mut Vm::new(&config());
    vm.sample(0, 0xffff_ffff);
    vm.write(Register::Pmuserenr, pmuserenr::ER);
    vm.write(Register::Pmselr, 9);
    vm.machine.happen(8, Place::El1, 1);
    vm.put();
    assert!(vm.pmu.line() && !vm.machine.interrupt());
    let machine = &vm.machine;
    assert_eq!((machine.cnten, machine.inten, machine.ovs), (0, 0, 0));
    assert_eq!((machine.userenr, machine.selr), (0, 0));
    let accesses = machine.el2_accesses;
    let mut idle = Vm::new(&config());
    idle.machine = machine.clone();
    for _ in 0..3 {
        idle.load();
        idle.put();
    }
    assert_eq!(idle.machine.el2_accesses, accesses, "an idle guest is free");
}

#[test]
fn a_counter_that_the_host_takes_is_lost_and_comes_back() {
    let mut vm = Vm::new(&config());
    for n in [2, 3] {
        vm.write(Register::Pmevtyper(n), 0x08);
        vm.write(Register::Pmevcntr(n), 100);
    }
    vm.write(Register::PmcntenSet, 0b1100);
    vm.write(Register::Pmcr, pmcr::E | pmcr::LC);
    let replan = |vm: &mut Vm, host_counters| {
        vm.put();
        let config = PartitionConfig {
            host_counters,
            ..config()
        };
        vm.pmu.migrate(plan(&config)).expect("put, and of this CPU");
        vm.load();
    };
    assert_eq!(vm.pmu.migrate(plan(&config())), Err(MigrateError::Loaded));
    replan(&mut vm, 3);
    let host = 1 << 3;
    assert_eq!(vm.machine.cnten & host, 0);
    vm.machine.ovs |= host;
    let state = |vm: &Vm, n| vm.pmu.counter_state(Counter::new(n).unwrap());
    assert_eq!(state(&vm, 2), Some(CounterState::Counting));
    assert_eq!(state(&vm, 3), Some(CounterState::Lost(Lost::Busy)));
    vm.machine.happen(8, Place::El1, 7);
    assert_eq!(vm.read(Register::Pmevcntr(2)), 107);
    assert_eq!(vm.read(Register::Pmevcntr(3)), 100);
    assert_eq!(vm.read(Register::Pmcr) >> 11 & 0x1f, 4);
    assert!(!vm.is_open());
    // The host's overflow bit and its counter are not the guest's.
    vm.write(Register::PmovsClr, u64::MAX);
    assert_eq!(vm.machine.ovs & host, host);
    assert_eq!(vm.machine.cnten & host, 0);
    vm.machine.ovs &= !host;
    replan(&mut vm, 2);
    vm.machine.happen(8, Place::El1, 1);
    assert_eq!(vm.read(Register::Pmevcntr(3)), 101);
    assert_eq!(state(&vm, 3), Some(CounterState::Counting));
}

/// Checks that a restored guest counts at once, whatever PMCR_EL0 the guest before has left.
#[test]
fn a_loaded_guest_counts_from_its_restore_on() {
    let mut saved = Vm::new(&config());
    saved.sample(pmcr::LC | pmcr::LP, 0);
    saved.put();
    let state = saved.pmu.save(&mut saved.machine);
    let mut vm = Vm::new(&config());
    vm.put();
    // A partitioned guest leaves PMCR_EL0 as it was.
    vm.machine.pmcr = pmcr::D;
    vm.load();
    vm.pmu.restore(&state, &mut vm.machine).unwrap();
    vm.enter();
    vm.machine.happen(8, Place::El1, 10);
    assert_eq!(vm.read(Register::Pmevcntr(0)), 10);
}

/// Checks that the cycle counter is 64 bits long where EL0 has no AArch32, with open registers and with closed.
#[test]
fn lc_is_res1_where_the_machine_has_it_so() {
    let mut machine = machine(&config());
    machine.long_cycles = true;
    let emulated = EmulatedConfig {
        aarch32: false,
        ..emulated(&config(), Policy::default())
    };
    let mut vm = Vm::on(machine, &config(), emulated);
    vm.write(Register::Pmcr, 0);
    vm.write(Register::PmintenSet, 1 << 31);
    vm.write(Register::PmcntenSet, 1 << 31);
    vm.write(Register::Pmcr, pmcr::E);
    assert!(vm.is_open());
    for _ in 0..2 {
        assert_eq!(vm.read(Register::Pmcr) & pmcr::LC, pmcr::LC);
        vm.write(Register::Pmccntr, 0xffff_ffff);
        vm.machine.happen(0x11, Place::El1, 1);
        assert!(!vm.deliver());
        assert_eq!(vm.read(Register::Pmccntr), 1 << 32);
        vm.put();
        vm.load();
    }
}
