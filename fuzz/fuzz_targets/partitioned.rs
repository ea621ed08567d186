//! The partitioned design on the model of the hardware that its tests use.
//!
//! Invariants: no access of the guest changes a host counter or its bits; nothing at EL2 and no
//! other thread moves a guest counter; after a put, nothing does; the host's part survives a
//! switch; a saved state restores to itself.

#[path = "../../engine/vpmu/tests/partition/machine/mod.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
pub(crate) mod machine;

use libfuzzer_sys::arbitrary::{Result, Unstructured};
use machine::{EVENTS, Exit, Machine, Place, Quirks};
use vpmu::arm::partition::{Features, Isolation, PartitionConfig, PartitionedPmu, Plan};
use vpmu::arm::{EventFilter, ExceptionLevel, Register};

struct Vm {
    machine: Machine,
    pmu: PartitionedPmu,
}

pub(crate) fn run(input: &mut Unstructured<'_>) -> Result<()> {
    let (config, quirks) = config(input)?;
    // A plan may refuse: fewer counters than the host wants, none without FEAT_HPMN0.
    let Ok(plan) = Plan::new(&config) else {
        return Ok(());
    };
    let machine = Machine::new(config.implemented, config.features, quirks);
    let mut vm = Vm {
        machine,
        pmu: PartitionedPmu::new(plan),
    };
    vm.machine.traps = vm.pmu.trap_registers();
    while !input.is_empty() {
        vm.step(input)?;
        vm.machine.traps = vm.pmu.trap_registers();
    }
    Ok(())
}

/// A configuration, and a machine that it is true of.
pub(crate) fn config(input: &mut Unstructured<'_>) -> Result<(PartitionConfig, Quirks)> {
    let mut bit = || input.arbitrary::<bool>();
    let isolation = Isolation {
        partition: bit()?,
        hpmd: bit()?,
        hccd: bit()?,
    };
    let (fgt, hpmn0, mtpmu, multithreaded, filtered) = (bit()?, bit()?, bit()?, bit()?, bit()?);
    let version = super::version(input)?;
    let filter = EventFilter::default();
    let quirks = Quirks {
        open: if isolation.partition {
            0
        } else {
            input.arbitrary()?
        },
        from: 7,
        no_hpmd: !isolation.hpmd,
        no_hccd: !isolation.hccd,
        tpm_asks_only_en: input.arbitrary()?,
        ..Quirks::default()
    };
    let config = PartitionConfig {
        implemented: input.int_in_range(0..=31)?,
        host_counters: input.int_in_range(0..=31)?,
        features: Features {
            version,
            fgt,
            hpmn0,
            mtpmu,
            multithreaded,
        },
        isolation,
        filter: if filtered {
            filter.deny(0x13..=0x20).unwrap_or(filter)
        } else {
            filter
        },
        events: EVENTS,
    };
    Ok((config, quirks))
}

impl Vm {
    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.int_in_range(0..=15)? {
            0..=7 => {
                let write = if input.arbitrary()? {
                    Some(super::value(input)?)
                } else {
                    None
                };
                self.access(super::register(input)?, write, super::level(input)?);
            }
            8..=9 => {
                let place = *input.choose(&[Place::El0, Place::El1])?;
                self.machine
                    .happen(super::event(input)?, place, input.int_in_range(0..=3)?);
            }
            10 => {
                self.pmu.exited(&mut self.machine);
                let before = self.machine.guest_counts();
                let place = *input.choose(&[Place::El2, Place::OtherThread])?;
                self.machine.happen(super::event(input)?, place, 1);
                assert_eq!(
                    self.machine.guest_counts(),
                    before,
                    "counted outside the guest"
                );
            }
            11 => self.switch(super::event(input)?),
            12 => {
                let split = self.pmu.overflow(&mut self.machine);
                assert!((split.host & self.pmu.plan().guest_counters()).is_empty());
            }
            13 => {
                let host = self.pmu.plan().host_counters();
                let n = input.int_in_range(0..=30_u8)?;
                if host.bits() >> n & 1 != 0 {
                    self.machine.evcntr[usize::from(n)] = input.arbitrary::<u32>()?.into();
                    self.machine.cnten |= 1 << n;
                    self.machine.inten |= 1 << n;
                    self.machine.ovs |= input.arbitrary::<u64>()? & 1 << n;
                }
            }
            _ => {
                let state = self.pmu.save(&mut self.machine);
                self.pmu
                    .restore(&state, &mut self.machine)
                    .expect("its own state");
                self.machine.traps = self.pmu.trap_registers();
                assert_eq!(self.pmu.save(&mut self.machine), state);
            }
        }
        Ok(())
    }

    fn access(&mut self, register: Register, write: Option<u64>, level: ExceptionLevel) {
        let host = self.machine.host_part();
        if self.machine.guest(register, write, level) == Exit::TrapToEl2 {
            let _ = match write {
                Some(value) => self.pmu.write(register, level, value, &mut self.machine),
                None => self.pmu.read(register, level, &mut self.machine),
            };
        }
        assert_eq!(
            self.machine.host_part(),
            host,
            "{register:?} {write:x?} reached the host"
        );
    }

    fn switch(&mut self, event: u16) {
        let host = self.machine.host_part();
        self.pmu.put(&mut self.machine);
        let before = self.machine.guest_counts();
        let mut elsewhere = self.machine.clone();
        elsewhere.happen(event, Place::El1, 1);
        assert_eq!(elsewhere.guest_counts(), before, "counted after a put");
        self.pmu.load(&mut self.machine);
        assert_eq!(
            self.machine.host_part(),
            host,
            "a switch touched the host's part"
        );
    }
}
