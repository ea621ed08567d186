//! The Arm PMU that is emulated on the counters of the CPU.

use vpmu::arm::emulated::BackedPmu;
use vpmu::counter::Counter;

use crate::arm::VpmuArmConfig;
use crate::counter::counter_state;
use crate::filter::VpmuArmFilter;
use crate::partition::{VpmuPartitionConfig, VpmuTraps};
use crate::pmu::{self, Guest};
use crate::registers::{Registers, VpmuRegisters};
use crate::room::{self, Held, Room, promised};
use crate::status::{VpmuOutcome, VpmuStatus};

/// Room for one vCPU's PMU that is emulated on the counters of the CPU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuBacked {
    opaque: [u64; 640],
}

impl Room for VpmuBacked {
    type Value = Held<BackedPmu, Registers>;
    const MARK: u64 = u64::from_le_bytes(*b"vpmuback");
}

impl Guest for VpmuBacked {
    type Pmu = BackedPmu;
    type Host = Registers;
}

/// Makes a PMU out of reset in `pmu`, on a vCPU that runs on this CPU: `config` says what the guest finds, and `cpu`
/// what the CPU has. `VPMU_STATUS_CONFIG`: the guest would have more counters than there are physical ones for it, or as
/// for `vpmu_arm_init` and `vpmu_partition_init`.
///
/// # Safety
///
/// See the crate's page. The functions of `registers` may be called with its context until the PMU
/// is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_init(
    pmu: *mut VpmuBacked,
    config: *const VpmuArmConfig,
    cpu: *const VpmuPartitionConfig,
    registers: *const VpmuRegisters,
) -> VpmuStatus {
    let (Some(config), Some(cpu), Some(registers)) = promised!((
        room::given(config),
        room::given(cpu),
        room::given(registers)
    )) else {
        return VpmuStatus::Misuse;
    };
    let Some(registers) = Registers::new(registers) else {
        return VpmuStatus::Misuse;
    };
    let config = config.config();
    let Some(config) = &config else {
        return VpmuStatus::Config;
    };
    cpu.with_plan(&mut |plan| {
        promised!(pmu::init(pmu, registers, |pmu, registers| {
            let made = pmu.init(config, plan, registers);
            made.map_or(VpmuStatus::Config, |()| VpmuStatus::Ok)
        }))
    })
}

/// Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
/// takes `*value`, a read puts its result there.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_access(
    pmu: *mut VpmuBacked,
    iss: u32,
    el0: bool,
    value: *mut u64,
) -> VpmuOutcome {
    promised!(pmu::access(pmu, iss, el0, value))
}

/// The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_line(pmu: *mut VpmuBacked) -> bool {
    promised!(pmu::line(pmu))
}

/// The vCPU starts to run on this CPU: what the guest has enabled counts again.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_load(pmu: *mut VpmuBacked) -> VpmuStatus {
    promised!(pmu::perform(pmu, BackedPmu::load))
}

/// The vCPU stops running here: nothing of the guest's counts or interrupts, and all that was counted is in memory.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_put(pmu: *mut VpmuBacked) -> VpmuStatus {
    promised!(pmu::perform(pmu, BackedPmu::put))
}

/// The vCPU is reset. No physical counter counts for it.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_reset(pmu: *mut VpmuBacked) -> VpmuStatus {
    promised!(pmu::perform(pmu, BackedPmu::reset))
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. Nothing stops: the PMU can go on.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_save(
    pmu: *mut VpmuBacked,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    promised!(pmu::save(pmu, buffer, room, length))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_restore(
    pmu: *mut VpmuBacked,
    buffer: *const u8,
    length: usize,
) -> VpmuStatus {
    promised!(pmu::restore(pmu, buffer, length))
}

/// What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
/// after each other call: it may have changed.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_traps(
    pmu: *mut VpmuBacked,
    traps: *mut VpmuTraps,
) -> VpmuStatus {
    let Some(traps) = promised!(room::out(traps)) else {
        return VpmuStatus::Misuse;
    };
    promised!(pmu::perform(pmu, |pmu, _| *traps = pmu.trap_registers().into()))
}

/// Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
/// be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_migrate(
    pmu: *mut VpmuBacked,
    config: *const VpmuPartitionConfig,
) -> VpmuStatus {
    let Some(config) = promised!(room::given(config)) else {
        return VpmuStatus::Misuse;
    };
    config.with_plan(&mut |plan| {
        promised!(room::with(pmu, |held: &mut Held<BackedPmu, Registers>| {
            VpmuStatus::of_restore(held.pmu.migrate(*plan))
        }))
    })
}

/// The physical PMU interrupt has come. Lowers the part of it that is the guest's, whose level is `vpmu_backed_line` then. End
/// the physical interrupt afterwards.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_overflow(pmu: *mut VpmuBacked) -> VpmuStatus {
    promised!(pmu::perform(pmu, |pmu, registers| {
        pmu.overflow(registers);
    }))
}

/// Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level.
/// To be asked after each other call: the virtual interrupt is to be changed only then.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_line_changed(pmu: *mut VpmuBacked, level: *mut bool) -> bool {
    let Some(level) = promised!(room::out(level)) else {
        return false;
    };
    promised!(room::with(pmu, |held: &mut Held<BackedPmu, Registers>| {
        let changed = held.pmu.line_changed();
        *level = held.pmu.line();
        changed.is_some()
    }))
}

/// Changes which events the guest may count, from now on. `VPMU_STATUS_CONFIG`: there are too many rules.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_set_filter(
    pmu: *mut VpmuBacked,
    filter: *const VpmuArmFilter,
) -> VpmuStatus {
    promised!(pmu::set_filter(pmu, filter, BackedPmu::set_filter))
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_backed_counter_state(pmu: *mut VpmuBacked, counter: u8) -> i32 {
    promised!(room::with(pmu, |held: &mut Held<BackedPmu, Registers>| {
        counter_state(Counter::new(counter).and_then(|counter| held.pmu.counter_state(counter)))
    }))
}
