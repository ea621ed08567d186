//! The emulated design on physical counters, on the model of the hardware that its tests use.
//!
//! Invariants: no access of the guest changes a host counter or its bits, trapped or not; nothing at EL2 and no other
//! thread moves a guest counter; after a put, nothing does, and no interrupt is left enabled; the physical interrupt
//! is always taken back; a saved state restores to itself. That the guest's PMU is right is the tests' to compare.

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use vpmu::arm::emulated::{BackedPmu, EmulatedConfig, Identity};
use vpmu::arm::partition::Plan;
use vpmu::arm::{EventFilter, ExceptionLevel, Register};
use vpmu::counter::Policy;

use super::partitioned::config;
use super::partitioned::machine::{EVENTS, Machine, Place};

struct Vm {
    machine: Machine,
    pmu: BackedPmu,
    config: EmulatedConfig,
}

pub(crate) fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let (config, quirks) = config(input)?;
    let Ok(plan) = Plan::new(&config) else {
        return Ok(());
    };
    let emulated = EmulatedConfig {
        // What the guest finds need not be what the machine has.
        counters: input.int_in_range(0..=31)?,
        version: super::version(input)?,
        el3: true,
        aarch32: true,
        identity: Identity {
            implementer: 0x41,
            code: 1,
        },
        events: EVENTS,
        pmmir: 5,
        filter: config.filter,
        policy: *input.choose(&Policy::ALL)?,
    };
    let mut machine = Machine::new(config.implemented, config.features, quirks);
    let Ok(pmu) = BackedPmu::new(emulated.clone(), plan, &mut machine) else {
        return Ok(());
    };
    let mut vm = Vm {
        machine,
        pmu,
        config: emulated,
    };
    vm.enter();
    while !input.is_empty() {
        vm.step(input)?;
        vm.enter();
    }
    Ok(())
}

impl Vm {
    fn enter(&mut self) {
        self.machine.traps = self.pmu.trap_registers();
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.int_in_range(0..=15)? {
            0..=8 => {
                let write = match input.arbitrary()? {
                    true => Some(super::value(input)?),
                    false => None,
                };
                self.access(super::register(input)?, write, super::level(input)?);
            }
            9..=10 => {
                let place = *input.choose(&[Place::El0, Place::El1])?;
                let times = input.int_in_range(0..=3)?;
                self.machine.happen(super::event(input)?, place, times);
            }
            11 => {
                let before = self.machine.guest_counts();
                let place = *input.choose(&[Place::El2, Place::OtherThread])?;
                self.machine.happen(super::event(input)?, place, 1);
                let after = self.machine.guest_counts();
                assert_eq!(after, before, "counted outside the guest");
            }
            12 => self.deliver(),
            13 => self.switch(super::event(input)?),
            14 => {
                let denied: u16 = input.arbitrary()?;
                let filter = EventFilter::allow_all();
                let filter = filter.deny(denied..=denied).unwrap_or(filter);
                self.pmu.set_filter(filter, &mut self.machine);
            }
            _ => self.migrate(),
        }
        Ok(())
    }

    fn access(&mut self, register: Register, write: Option<u64>, level: ExceptionLevel) {
        let host = self.machine.host_part();
        if self
            .machine
            .guest(register, write, level)
            .outcome()
            .is_none()
        {
            let _ = match write {
                Some(value) => self.pmu.write(register, level, value, &mut self.machine),
                None => self.pmu.read(register, level, &mut self.machine),
            };
        }
        let after = self.machine.host_part();
        assert_eq!(after, host, "{register:?} {write:x?} reached the host");
    }

    /// Takes the physical interrupt for as long as it is asserted. Each counter may report early, once.
    fn deliver(&mut self) {
        for _ in 0..64 {
            if !self.machine.interrupt() {
                return;
            }
            self.pmu.overflow(&mut self.machine);
        }
        panic!("the physical interrupt is not taken back");
    }

    fn switch(&mut self, event: u16) {
        self.pmu.put(&mut self.machine);
        assert_eq!(self.machine.inten, 0, "interrupts after a put");
        let before = self.machine.guest_counts();
        let mut elsewhere = self.machine.clone();
        elsewhere.happen(event, Place::El1, 1);
        assert_eq!(elsewhere.guest_counts(), before, "counted after a put");
        self.pmu.load(&mut self.machine);
    }

    fn migrate(&mut self) {
        self.pmu.put(&mut self.machine);
        let state = self.pmu.save(&mut self.machine);
        let plan = *self.pmu.plan();
        self.pmu =
            BackedPmu::new(self.config.clone(), plan, &mut self.machine).expect("the same machine");
        self.pmu
            .restore(&state, &mut self.machine)
            .expect("its own state");
        assert_eq!(self.pmu.save(&mut self.machine), state);
        self.pmu.load(&mut self.machine);
    }
}
