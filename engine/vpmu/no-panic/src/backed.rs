//! Arm's emulated model on physical counters.

use vpmu::arm::emulated::{BackedPmu, ConfigError, EmulatedConfig};
use vpmu::arm::partition::{MigrateError, Plan, TrapRegisters};
use vpmu::arm::{EventFilter, ExceptionLevel, Outcome, PmuState, Register, RestoreError};
use vpmu::counter::{Counter, CounterState};

use crate::Watch;
use crate::partition::Registers;

type Watched = BackedPmu<Watch>;

#[unsafe(no_mangle)]
pub fn backed_new(
    config: EmulatedConfig,
    plan: Plan,
    regs: &mut Registers,
) -> Result<Watched, ConfigError> {
    BackedPmu::with_events(config, plan, Watch, regs)
}

#[unsafe(no_mangle)]
pub fn backed_read(
    pmu: &mut Watched,
    register: Register,
    level: ExceptionLevel,
    regs: &mut Registers,
) -> Outcome {
    pmu.read(register, level, regs)
}

#[unsafe(no_mangle)]
pub fn backed_write(
    pmu: &mut Watched,
    register: Register,
    level: ExceptionLevel,
    value: u64,
    regs: &mut Registers,
) -> Outcome {
    pmu.write(register, level, value, regs)
}

#[unsafe(no_mangle)]
pub fn backed_overflow(pmu: &mut Watched, regs: &mut Registers) -> bool {
    pmu.overflow(regs)
}

#[unsafe(no_mangle)]
pub fn backed_load(pmu: &mut Watched, regs: &mut Registers) {
    pmu.load(regs);
}

#[unsafe(no_mangle)]
pub fn backed_put(pmu: &mut Watched, regs: &mut Registers) {
    pmu.put(regs);
}

#[unsafe(no_mangle)]
pub fn backed_set_filter(pmu: &mut Watched, filter: EventFilter, regs: &mut Registers) {
    pmu.set_filter(filter, regs);
}

#[unsafe(no_mangle)]
pub fn backed_save(pmu: &mut Watched, regs: &mut Registers) -> PmuState {
    pmu.save(regs)
}

#[unsafe(no_mangle)]
pub fn backed_restore(
    pmu: &mut Watched,
    state: &PmuState,
    regs: &mut Registers,
) -> Result<(), RestoreError> {
    pmu.restore(state, regs)
}

#[unsafe(no_mangle)]
pub fn backed_traps(pmu: &Watched, register: Register, write: bool) -> (TrapRegisters, bool, bool) {
    (
        pmu.trap_registers(),
        pmu.is_trapped(register, write),
        pmu.line(),
    )
}

#[unsafe(no_mangle)]
pub fn backed_init(
    pmu: &mut Watched,
    config: &EmulatedConfig,
    plan: &Plan,
    regs: &mut Registers,
) -> Result<(), ConfigError> {
    pmu.init(config, plan, regs)
}

#[unsafe(no_mangle)]
pub fn backed_reset(pmu: &mut Watched, regs: &mut Registers) {
    pmu.reset(regs);
}

#[unsafe(no_mangle)]
pub fn backed_migrate(pmu: &mut Watched, plan: Plan) -> Result<(), MigrateError> {
    pmu.migrate(plan)
}

#[unsafe(no_mangle)]
pub fn backed_restore_put(
    pmu: &mut Watched,
    state: &PmuState,
    regs: &mut Registers,
) -> Result<(), RestoreError> {
    pmu.restore_put(state, regs)
}

#[unsafe(no_mangle)]
pub fn backed_state(pmu: &mut Watched, counter: Counter) -> (Option<CounterState>, Option<bool>) {
    (pmu.counter_state(counter), pmu.line_changed())
}
