//! Arm's emulated model, and what both Arm designs decode.

use core::ops::RangeInclusive;

use vpmu::arm::emulated::{ConfigError, EmulatedConfig, EmulatedPmu};
use vpmu::arm::{
    Encoding, EventFilter, ExceptionLevel, Outcome, PmuState, PmuVersion, Register, RestoreError,
    TooManyRules,
};
use vpmu::counter::{Counter, CounterState, Report, Statistics};

use crate::{Host, Watch};

type Watched = EmulatedPmu<Watch>;

#[unsafe(no_mangle)]
pub fn arm_new(config: EmulatedConfig) -> Result<Watched, ConfigError> {
    EmulatedPmu::with_events(config, Watch)
}

#[unsafe(no_mangle)]
pub fn arm_read(
    pmu: &mut Watched,
    register: Register,
    level: ExceptionLevel,
    host: &mut Host,
) -> Outcome {
    pmu.read(register, level, host)
}

#[unsafe(no_mangle)]
pub fn arm_write(
    pmu: &mut Watched,
    register: Register,
    level: ExceptionLevel,
    value: u64,
    host: &mut Host,
) -> Outcome {
    pmu.write(register, level, value, host)
}

#[unsafe(no_mangle)]
pub fn arm_overflow(pmu: &mut Watched, counter: Counter, report: Report, host: &mut Host) -> bool {
    pmu.overflow(counter, report, host)
}

#[unsafe(no_mangle)]
pub fn arm_load(pmu: &mut Watched, host: &mut Host) {
    pmu.load(host);
}

#[unsafe(no_mangle)]
pub fn arm_put(pmu: &mut Watched, host: &mut Host) {
    pmu.put(host);
}

#[unsafe(no_mangle)]
pub fn arm_reset(pmu: &mut Watched, host: &mut Host) {
    pmu.reset(host);
}

#[unsafe(no_mangle)]
pub fn arm_set_filter(pmu: &mut Watched, filter: EventFilter, host: &mut Host) {
    pmu.set_filter(filter, host);
}

#[unsafe(no_mangle)]
pub fn arm_save(pmu: &mut Watched, host: &mut Host) -> PmuState {
    pmu.save(host)
}

#[unsafe(no_mangle)]
pub fn arm_restore(
    pmu: &mut Watched,
    state: &PmuState,
    host: &mut Host,
) -> Result<(), RestoreError> {
    pmu.restore(state, host)
}

#[unsafe(no_mangle)]
pub fn arm_state(pmu: &Watched, counter: Counter) -> (Option<CounterState>, bool, Statistics) {
    (pmu.counter_state(counter), pmu.line(), pmu.statistics())
}

#[unsafe(no_mangle)]
pub fn arm_decode(iss: u32) -> Option<Register> {
    Register::decode(Encoding::from_iss(iss))
}

#[unsafe(no_mangle)]
pub fn arm_encode(register: Register) -> (u32, usize) {
    (register.encoding().to_iss(), register.ordinal())
}

#[unsafe(no_mangle)]
pub fn arm_version(id_aa64dfr0: u64) -> Option<PmuVersion> {
    PmuVersion::from_id_aa64dfr0(id_aa64dfr0)
}

#[unsafe(no_mangle)]
pub fn arm_filter(
    filter: EventFilter,
    events: RangeInclusive<u16>,
    allow: bool,
) -> Result<EventFilter, TooManyRules> {
    if allow {
        filter.allow(events)
    } else {
        filter.deny(events)
    }
}

#[unsafe(no_mangle)]
pub fn arm_allows(filter: &EventFilter, event: u16, pmceid: [u64; 2]) -> (bool, [u64; 2]) {
    (filter.allows(event), filter.pmceid(pmceid))
}

#[unsafe(no_mangle)]
pub fn arm_init(
    pmu: &mut Watched,
    config: &EmulatedConfig,
    host: &mut Host,
) -> Result<(), ConfigError> {
    pmu.init(config, host)
}

#[unsafe(no_mangle)]
pub fn arm_restore_put(
    pmu: &mut Watched,
    state: &PmuState,
    host: &mut Host,
) -> Result<(), RestoreError> {
    pmu.restore_put(state, host)
}

#[unsafe(no_mangle)]
pub fn arm_line_changed(pmu: &mut Watched) -> Option<bool> {
    pmu.line_changed()
}
