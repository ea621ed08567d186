//! Arm's models, and what they decode.

use core::hint::black_box;

use vpmu::arm::emulated::{BackedPmu, EmulatedPmu};
use vpmu::arm::partition::{PartitionedPmu, Plan, PmuRegisters};
use vpmu::arm::{Encoding, EventFilter, PmuVersion, Register};

use crate::{Host, Watch};

/// Registers that may hold anything.
struct Registers;

impl PmuRegisters for Registers {
    fn read(&mut self, register: Register) -> u64 {
        black_box(register.ordinal() as u64)
    }
    fn write(&mut self, register: Register, value: u64) {
        black_box((register, value));
    }
}

#[unsafe(no_mangle)]
pub fn emulated() {
    type Pmu = EmulatedPmu<Watch>;
    keep! {
        Pmu::with_events as fn(_, _) -> _,
        Pmu::init::<Host> as fn(_, _, _) -> _,
        Pmu::read::<Host> as fn(_, _, _, _) -> _,
        Pmu::write::<Host> as fn(_, _, _, _, _) -> _,
        Pmu::overflow::<Host> as fn(_, _, _, _) -> _,
        Pmu::load::<Host> as fn(_, _),
        Pmu::put::<Host> as fn(_, _),
        Pmu::reset::<Host> as fn(_, _),
        Pmu::set_filter::<Host> as fn(_, _, _),
        Pmu::save::<Host> as fn(_, _) -> _,
        Pmu::restore::<Host> as fn(_, _, _) -> _,
        Pmu::restore_put::<Host> as fn(_, _, _) -> _,
        Pmu::counter_state as fn(_, _) -> _,
        Pmu::line as fn(_) -> _,
        Pmu::line_changed as fn(_) -> _,
        Pmu::statistics as fn(_) -> _,
    }
}

#[unsafe(no_mangle)]
pub fn backed() {
    type Pmu = BackedPmu<Watch>;
    keep! {
        Pmu::with_events::<Registers> as fn(_, _, _, _) -> _,
        Pmu::init::<Registers> as fn(_, _, _, _) -> _,
        Pmu::read::<Registers> as fn(_, _, _, _) -> _,
        Pmu::write::<Registers> as fn(_, _, _, _, _) -> _,
        Pmu::overflow::<Registers> as fn(_, _) -> _,
        Pmu::load::<Registers> as fn(_, _),
        Pmu::put::<Registers> as fn(_, _),
        Pmu::reset::<Registers> as fn(_, _),
        Pmu::set_filter::<Registers> as fn(_, _, _),
        Pmu::save::<Registers> as fn(_, _) -> _,
        Pmu::restore::<Registers> as fn(_, _, _) -> _,
        Pmu::restore_put::<Registers> as fn(_, _, _) -> _,
        Pmu::migrate as fn(_, _) -> _,
        Pmu::trap_registers as fn(_) -> _,
        Pmu::is_trapped as fn(_, _, _) -> _,
        Pmu::counter_state as fn(_, _) -> _,
        Pmu::line as fn(_) -> _,
        Pmu::line_changed as fn(_) -> _,
    }
}

#[unsafe(no_mangle)]
pub fn partitioned() {
    type Pmu = PartitionedPmu;
    keep! {
        Plan::new as fn(_) -> _,
        Plan::is_trapped as fn(_, _, _) -> _,
        Plan::guest_counters as fn(_) -> _,
        Plan::host_counters as fn(_) -> _,
        Plan::events as fn(_) -> _,
        Pmu::new as fn(_) -> _,
        Pmu::init::<Registers> as fn(_, _, _),
        Pmu::read::<Registers> as fn(_, _, _, _) -> _,
        Pmu::write::<Registers> as fn(_, _, _, _, _) -> _,
        Pmu::overflow::<Registers> as fn(_, _) -> _,
        Pmu::load::<Registers> as fn(_, _),
        Pmu::load_after::<Registers> as fn(_, _, _),
        Pmu::put::<Registers> as fn(_, _),
        Pmu::reset::<Registers> as fn(_, _),
        Pmu::exited::<Registers> as fn(_, _),
        Pmu::acts_at_exit as fn(_) -> _,
        Pmu::save::<Registers> as fn(_, _) -> _,
        Pmu::restore::<Registers> as fn(_, _, _) -> _,
        Pmu::migrate as fn(_, _) -> _,
        Pmu::trap_registers as fn(_) -> _,
        Pmu::counter_state::<Registers> as fn(_, _, _) -> _,
        Pmu::line::<Registers> as fn(_, _) -> _,
    }
}

#[unsafe(no_mangle)]
pub fn decoded() {
    keep! {
        Register::decode as fn(_) -> _,
        Register::encoding as fn(_) -> _,
        Register::ordinal as fn(_) -> _,
        Encoding::from_iss as fn(_) -> _,
        Encoding::to_iss as fn(_) -> _,
        PmuVersion::from_id_aa64dfr0 as fn(_) -> _,
        EventFilter::allow as fn(_, _) -> _,
        EventFilter::deny as fn(_, _) -> _,
        EventFilter::allows as fn(_, _) -> _,
        EventFilter::pmceid as fn(_, _) -> _,
    }
}
