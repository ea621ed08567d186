//! Tests the partitioned PMU, and the emulated one on physical counters, against a model of the hardware below them.

mod backed;
mod exits;
mod hostile;
mod machine;
mod migrate;
mod overflows;
mod place;
mod plans;
mod probe;
mod regressions;
mod switch;
mod switch_between;
mod types;

use machine::{EVENTS, Machine, Place, Quirks};
use vpmu::arm::partition::{Features, Isolation, PartitionConfig, PartitionedPmu, Plan};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuVersion, Register};

/// Returns a CPU as the architecture has it since PMUv3p5: six event counters, two of them the host's.
fn config() -> PartitionConfig {
    PartitionConfig {
        implemented: 6,
        host_counters: 2,
        features: Features {
            version: PmuVersion::V3p5,
            fgt: true,
            hpmn0: true,
            mtpmu: false,
            multithreaded: false,
        },
        isolation: Isolation::ALL,
        filter: EventFilter::allow_all(),
        events: EVENTS,
    }
}

/// Returns the same CPU as QEMU makes it: HPMN isolates nothing but counting.
fn leaky() -> PartitionConfig {
    PartitionConfig {
        isolation: Isolation {
            partition: false,
            ..Isolation::ALL
        },
        ..config()
    }
}

/// Returns the value that a read of `register` gave.
#[track_caller]
fn value_read(register: Register, outcome: Outcome) -> u64 {
    match outcome {
        Outcome::Value(value) => value,
        other => panic!("read of {}: {other:?}", register.name()),
    }
}

#[track_caller]
fn assert_written(register: Register, outcome: Outcome) {
    assert_eq!(outcome, Outcome::Done, "write of {}", register.name());
}

/// Returns the machine that `config` describes.
fn machine(config: &PartitionConfig) -> Machine {
    let quirks = if config.isolation.partition {
        Quirks::default()
    } else {
        Quirks::OPEN
    };
    let quirks = Quirks {
        no_hpmd: !config.isolation.hpmd,
        no_hccd: !config.isolation.hccd,
        ..quirks
    };
    Machine::new(config.implemented, config.features, quirks)
}

fn plan(config: &PartitionConfig) -> Plan {
    Plan::new(config).expect("a possible partition")
}

/// One vCPU on one CPU, with a hypervisor that does what the documentation asks of it.
struct Vm {
    machine: Machine,
    pmu: PartitionedPmu,
    /// Number of the guest's accesses that came to EL2.
    trapped: u64,
}

impl Vm {
    fn new(config: &PartitionConfig) -> Self {
        Self::on(machine(config), plan(config))
    }

    fn on(machine: Machine, plan: Plan) -> Self {
        let mut vm = Self {
            machine,
            pmu: PartitionedPmu::new(plan),
            trapped: 0,
        };
        vm.machine.traps = vm.pmu.trap_registers();
        vm
    }

    fn access(&mut self, register: Register, write: Option<u64>, el: ExceptionLevel) -> Outcome {
        let outcome = match self.machine.guest(register, write, el).outcome() {
            Some(outcome) => outcome,
            None => {
                self.trapped += 1;
                self.exit();
                match write {
                    Some(value) => self.pmu.write(register, el, value, &mut self.machine),
                    None => self.pmu.read(register, el, &mut self.machine),
                }
            }
        };
        self.machine.traps = self.pmu.trap_registers();
        outcome
    }

    /// Leaves the guest. The guest's counters do not count what EL2 does from now on.
    fn exit(&mut self) {
        self.pmu.exited(&mut self.machine);
        let mut at_el2 = self.machine.clone();
        for event in [0, 8, 0x11] {
            at_el2.happen(event, Place::El2, 1);
        }
        let counts = self.machine.guest_counts();
        assert_eq!(at_el2.guest_counts(), counts, "counted at EL2");
    }

    fn read(&mut self, register: Register) -> u64 {
        value_read(register, self.access(register, None, ExceptionLevel::El1))
    }

    fn write(&mut self, register: Register, value: u64) {
        let outcome = self.access(register, Some(value), ExceptionLevel::El1);
        assert_written(register, outcome);
    }

    fn put(&mut self) {
        self.exit();
        self.pmu.put(&mut self.machine);
        self.machine.traps = self.pmu.trap_registers();
    }

    fn load(&mut self) {
        self.pmu.load(&mut self.machine);
        self.machine.traps = self.pmu.trap_registers();
    }

    /// Gives the host counters values that could be lost.
    fn busy_host(&mut self) {
        let machine = &mut self.machine;
        machine.cnten |= 0x30;
        machine.inten |= 0x30;
        machine.ovs |= 0x20;
        machine.evcntr[4] = 0x4444;
        machine.evcntr[5] = 0x5555;
        // This counter counts INST_RETIRED at EL2 only.
        machine.evtyper[4] = 1 << 31 | 1 << 30 | 1 << 27 | 8;
        machine.evtyper[5] = 8;
    }
}
