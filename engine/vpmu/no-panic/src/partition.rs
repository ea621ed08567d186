//! The partitioned design.

use core::hint::black_box;

use vpmu::arm::partition::{
    MigrateError, OverflowSplit, PartitionConfig, PartitionedPmu, Plan, PlanError, PmuRegisters,
    TrapRegisters, Why,
};
use vpmu::arm::{ExceptionLevel, Outcome, PmuState, Register, RestoreError};
use vpmu::counter::{Counter, CounterState};

/// Registers that may hold anything.
pub struct Registers;

impl PmuRegisters for Registers {
    fn read(&mut self, register: Register) -> u64 {
        black_box(register.ordinal() as u64)
    }
    fn write(&mut self, register: Register, value: u64) {
        black_box((register, value));
    }
}

#[unsafe(no_mangle)]
pub fn partition_plan(config: &PartitionConfig) -> Result<Plan, PlanError> {
    Plan::new(config)
}

#[unsafe(no_mangle)]
pub fn partition_trapped(plan: &Plan, register: Register, write: bool) -> Option<Why> {
    plan.is_trapped(register, write)
}

#[unsafe(no_mangle)]
pub fn partition_told(plan: &Plan) -> ([u64; 2], u32, u32) {
    let sets = (plan.guest_counters().bits(), plan.host_counters().bits());
    (plan.events(), sets.0, sets.1)
}

#[unsafe(no_mangle)]
pub fn partition_new(plan: Plan) -> PartitionedPmu {
    PartitionedPmu::new(plan)
}

#[unsafe(no_mangle)]
pub fn partition_read(
    pmu: &mut PartitionedPmu,
    register: Register,
    level: ExceptionLevel,
    regs: &mut Registers,
) -> Outcome {
    pmu.read(register, level, regs)
}

#[unsafe(no_mangle)]
pub fn partition_write(
    pmu: &mut PartitionedPmu,
    register: Register,
    level: ExceptionLevel,
    value: u64,
    regs: &mut Registers,
) -> Outcome {
    pmu.write(register, level, value, regs)
}

#[unsafe(no_mangle)]
pub fn partition_overflow(pmu: &mut PartitionedPmu, regs: &mut Registers) -> OverflowSplit {
    pmu.overflow(regs)
}

#[unsafe(no_mangle)]
pub fn partition_line(pmu: &PartitionedPmu, regs: &mut Registers) -> (bool, TrapRegisters) {
    (pmu.line(regs), pmu.trap_registers())
}

#[unsafe(no_mangle)]
pub fn partition_load(pmu: &mut PartitionedPmu, regs: &mut Registers) {
    pmu.load(regs);
}

#[unsafe(no_mangle)]
pub fn partition_put(pmu: &mut PartitionedPmu, regs: &mut Registers) {
    pmu.put(regs);
}

#[unsafe(no_mangle)]
pub fn partition_migrate(pmu: &mut PartitionedPmu, plan: Plan) -> Result<(), MigrateError> {
    pmu.migrate(plan)
}

#[unsafe(no_mangle)]
pub fn partition_save(pmu: &mut PartitionedPmu, regs: &mut Registers) -> PmuState {
    pmu.save(regs)
}

#[unsafe(no_mangle)]
pub fn partition_restore(
    pmu: &mut PartitionedPmu,
    state: &PmuState,
    regs: &mut Registers,
) -> Result<(), RestoreError> {
    pmu.restore(state, regs)
}

#[unsafe(no_mangle)]
pub fn partition_init(pmu: &mut PartitionedPmu, plan: &Plan, regs: &mut Registers) {
    pmu.init(plan, regs);
}

#[unsafe(no_mangle)]
pub fn partition_reset(pmu: &mut PartitionedPmu, regs: &mut Registers) {
    pmu.reset(regs);
}

#[unsafe(no_mangle)]
pub fn partition_load_after(pmu: &mut PartitionedPmu, left: &PartitionedPmu, regs: &mut Registers) {
    pmu.load_after(left, regs);
}

#[unsafe(no_mangle)]
pub fn partition_exited(pmu: &mut PartitionedPmu, regs: &mut Registers) -> bool {
    pmu.exited(regs);
    pmu.acts_at_exit()
}

#[unsafe(no_mangle)]
pub fn partition_state(
    pmu: &PartitionedPmu,
    counter: Counter,
    regs: &mut Registers,
) -> Option<CounterState> {
    pmu.counter_state(counter, regs)
}
