//! The Arm PMU that is emulated on the counters of the CPU.

use vpmu::arm::emulated::BackedPmu;

use crate::arm::VpmuArmConfig;
use crate::counter::counter_state;
use crate::filter::VpmuArmFilter;
use crate::partition::{VpmuPartitionConfig, VpmuTraps};
use crate::pmu;
use crate::registers::{Registers, VpmuRegisters};
use crate::room::{self, Mut, Ref, Room, promised};
use crate::state;
use crate::status::{VpmuOutcome, VpmuStatus};

/// Room for one vCPU's PMU that is emulated on the counters of the CPU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuBacked {
    opaque: [u64; 640],
}

impl Room for VpmuBacked {
    type Pmu = BackedPmu;
    type Host = Registers;
    const MARK: u64 = u64::from_le_bytes(*b"vpmuback");
}

/// Makes a PMU out of reset in `pmu`, on a vCPU that runs on this CPU: `config` says what the guest finds, and `cpu`
/// what the CPU has. `VPMU_STATUS_CONFIG`: the guest would have more counters than there are physical ones for it, or as
/// for `vpmu_arm_init` and `vpmu_partition_init`.
///
/// The functions of `registers` may be called with its context until the PMU
/// is used no more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_init(
    mut pmu: Mut<'_, VpmuBacked>,
    config: Ref<'_, VpmuArmConfig>,
    cpu: Ref<'_, VpmuPartitionConfig>,
    registers: Ref<'_, VpmuRegisters>,
) -> VpmuStatus {
    let registers = registers.get().and_then(Registers::new);
    let (Some(config), Some(cpu), Some(registers)) = (config.get(), cpu.get(), registers) else {
        return VpmuStatus::Misuse;
    };
    let config = config.config();
    let Some(config) = &config else {
        return VpmuStatus::Config;
    };
    cpu.with_plan(&mut |plan| {
        pmu::init(pmu.again(), registers, |pmu, registers| {
            let made = pmu.init(config, plan, registers);
            made.map_or(VpmuStatus::Config, |()| VpmuStatus::Ok)
        })
    })
}

/// Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
/// takes `*value`, a read puts its result there.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_access(
    pmu: Mut<'_, VpmuBacked>,
    iss: u32,
    el0: bool,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    pmu::access(pmu, iss, el0, value)
}

/// The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_line(pmu: Mut<'_, VpmuBacked>) -> bool {
    pmu::line(pmu)
}

/// The vCPU starts to run on this CPU: what the guest has enabled counts again.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_load(pmu: Mut<'_, VpmuBacked>) -> VpmuStatus {
    pmu::perform(pmu, BackedPmu::load)
}

/// The vCPU stops running here: nothing of the guest's counts or interrupts, and all that was counted is in memory.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_put(pmu: Mut<'_, VpmuBacked>) -> VpmuStatus {
    pmu::perform(pmu, BackedPmu::put)
}

/// The vCPU is reset. No physical counter counts for it.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_reset(pmu: Mut<'_, VpmuBacked>) -> VpmuStatus {
    pmu::perform(pmu, BackedPmu::reset)
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. Nothing stops: the PMU can go on.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_save(
    pmu: Mut<'_, VpmuBacked>,
    buffer: Mut<'_, u8>,
    room: usize,
    length: Mut<'_, usize>,
) -> VpmuStatus {
    pmu::save(pmu, promised!(state::place(buffer, room, length)))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_restore(
    pmu: Mut<'_, VpmuBacked>,
    buffer: Ref<'_, u8>,
    length: usize,
) -> VpmuStatus {
    pmu::restore(pmu, promised!(state::source(buffer, length)))
}

/// What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
/// after each other call: it may have changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_traps(
    pmu: Mut<'_, VpmuBacked>,
    traps: Mut<'_, VpmuTraps>,
) -> VpmuStatus {
    traps.with(|traps| pmu::perform(pmu, |pmu, _| *traps = pmu.trap_registers().into()))
}

/// Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
/// be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_migrate(
    mut pmu: Mut<'_, VpmuBacked>,
    config: Ref<'_, VpmuPartitionConfig>,
) -> VpmuStatus {
    config.with(|config| {
        config.with_plan(&mut |plan| {
            room::with(pmu.again(), |held| {
                VpmuStatus::of_restore(held.pmu.migrate(*plan))
            })
        })
    })
}

/// The physical PMU interrupt has come. Lowers the part of it that is the guest's, whose level is `vpmu_backed_line` then. End
/// the physical interrupt afterwards.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_overflow(pmu: Mut<'_, VpmuBacked>) -> VpmuStatus {
    pmu::perform(pmu, |pmu, registers| {
        pmu.overflow(registers);
    })
}

/// Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level.
/// To be asked after each other call: the virtual interrupt is to be changed only then.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_line_changed(pmu: Mut<'_, VpmuBacked>, level: Mut<'_, bool>) -> bool {
    level.with(|level| {
        room::with(pmu, |held| {
            let changed = held.pmu.line_changed();
            *level = held.pmu.line();
            changed.is_some()
        })
    })
}

/// Changes which events the guest may count, from now on. `VPMU_STATUS_CONFIG`: there are too many rules.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_set_filter(
    pmu: Mut<'_, VpmuBacked>,
    filter: Ref<'_, VpmuArmFilter>,
) -> VpmuStatus {
    pmu::set_filter(pmu, filter, BackedPmu::set_filter)
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_backed_counter_state(pmu: Mut<'_, VpmuBacked>, counter: u8) -> i32 {
    room::with(pmu, |held| {
        counter_state(counter, |n| held.pmu.counter_state(n))
    })
}
