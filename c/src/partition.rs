//! The Arm PMU that is partitioned: the guest owns hardware counters.

use vpmu::arm::partition::{
    Features, Isolation, PartitionConfig, PartitionedPmu, Plan, TrapRegisters,
};

use crate::filter::VpmuArmFilter;
use crate::pmu;
use crate::registers::{Registers, VpmuRegisters};
use crate::room::{self, Mut, Ref, Room, promised};
use crate::state;
use crate::status::{VpmuOutcome, VpmuStatus};

/// `isolation`: MDCR_EL2.HPMN divides the counters. Nothing below EL2 sees or changes those of the host. Matters only where
/// the host keeps counters: without this bit each access of the guest traps then.
pub const VPMU_ISOLATES_PARTITION: u32 = 1;
/// `isolation`: MDCR_EL2.HPMD keeps event counters from counting at EL2. Without this bit, and before PMUv3p1,
/// `vpmu_partition_exited` reads a register for each counter.
pub const VPMU_ISOLATES_HPMD: u32 = 2;
/// `isolation`: MDCR_EL2.HCCD keeps the cycle counter from counting at EL2. Without this bit, and before PMUv3p5,
/// `vpmu_partition_exited` reads a register.
pub const VPMU_ISOLATES_HCCD: u32 = 4;

/// What the plan is made from, one for each physical CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuPartitionConfig {
    /// ID_AA64DFR0_EL1 of the CPU.
    pub id_aa64dfr0: u64,
    /// ID_AA64MMFR0_EL1 of the CPU.
    pub id_aa64mmfr0: u64,
    /// PMCEID0_EL0 and PMCEID1_EL0 of the CPU.
    pub pmceid: [u64; 2],
    /// How many event counters the CPU has: PMCR_EL0.N as EL2 reads it.
    pub implemented: u8,
    /// How many of them the host keeps, counted from the top.
    pub host_counters: u8,
    /// Bits `VPMU_ISOLATES_*`: what a probe has found this CPU to keep. 0 is always safe, and costs more.
    pub isolation: u32,
    /// Whether another CPU has the affinity of this one (MPIDR_EL1) from level 1 up, so that the two
    /// are threads of a core. `true` is always safe, and traps more.
    pub shares_core: bool,
    /// Which events the guest may count.
    pub filter: VpmuArmFilter,
}

/// What the trap registers must hold while the guest runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuTraps {
    /// The PMU's fields of MDCR_EL2: HPMN, TPM, TPMCR, HPMD, HCCD, HPME and HLP.
    pub mdcr_el2: u64,
    /// The PMU's bits of HDFGRTR_EL2. Not to be written where FEAT_FGT is missing.
    pub hdfgrtr_el2: u64,
    /// The PMU's bits of HDFGWTR_EL2. Not to be written where FEAT_FGT is missing.
    pub hdfgwtr_el2: u64,
}

impl From<TrapRegisters> for VpmuTraps {
    fn from(traps: TrapRegisters) -> Self {
        Self {
            mdcr_el2: traps.mdcr_el2,
            hdfgrtr_el2: traps.hdfgrtr_el2,
            hdfgwtr_el2: traps.hdfgwtr_el2,
        }
    }
}

/// Room for one vCPU's partitioned PMU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuPartition {
    mark: u64,
    /// Whether `vpmu_partition_exited` has something to do at the next exit. To be read only.
    pub acts_at_exit: u64,
    opaque: [u64; 254],
}

impl Room for VpmuPartition {
    type Pmu = PartitionedPmu;
    type Host = Registers;
    const MARK: u64 = u64::from_le_bytes(*b"vpmupart");

    fn note(pmu: &PartitionedPmu) -> u64 {
        pmu.acts_at_exit().into()
    }
}

impl VpmuPartitionConfig {
    /// Answers what `act` does with the plan of this CPU, or that there is none: the CPU cannot be divided so, has no
    /// PMUv3, or there are too many rules.
    // Not the plan itself: moved from function to function, it would be on a hypervisor's stack several times.
    // By `dyn`, so that it is there once, and not in each function that makes a plan.
    pub(crate) fn with_plan(&self, act: &mut dyn FnMut(&Plan) -> VpmuStatus) -> VpmuStatus {
        let Some(features) = Features::from_registers(self.id_aa64dfr0, self.id_aa64mmfr0, 0, [])
        else {
            return VpmuStatus::Config;
        };
        let Some(filter) = self.filter.filter() else {
            return VpmuStatus::Config;
        };
        let plan = Plan::new(&PartitionConfig {
            implemented: self.implemented,
            host_counters: self.host_counters,
            features: Features {
                multithreaded: self.shares_core,
                ..features
            },
            isolation: Isolation {
                partition: self.isolation & VPMU_ISOLATES_PARTITION != 0,
                hpmd: self.isolation & VPMU_ISOLATES_HPMD != 0,
                hccd: self.isolation & VPMU_ISOLATES_HCCD != 0,
            },
            filter,
            events: self.pmceid,
        });
        match &plan {
            Ok(plan) => act(plan),
            Err(_) => VpmuStatus::Config,
        }
    }
}

/// Makes a PMU out of reset in `pmu`, not loaded. `VPMU_STATUS_CONFIG`: the CPU cannot be divided
/// so, has no PMUv3, or there are too many rules.
///
/// The functions of `registers` may be called with its context until the PMU
/// is used no more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_init(
    mut pmu: Mut<'_, VpmuPartition>,
    config: Ref<'_, VpmuPartitionConfig>,
    registers: Ref<'_, VpmuRegisters>,
) -> VpmuStatus {
    let registers = registers.get().and_then(Registers::new);
    let (Some(config), Some(registers)) = (config.get(), registers) else {
        return VpmuStatus::Misuse;
    };
    config.with_plan(&mut |plan| {
        pmu::init(pmu.again(), registers, |pmu, registers| {
            pmu.init(plan, registers);
            VpmuStatus::Ok
        })
    })
}

/// Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
/// takes `*value`, a read puts its result there. AArch32 accesses of EL0 (exception classes 0x03 and
/// 0x04) are the caller's to translate to the AArch64 register's ISS.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_access(
    pmu: Mut<'_, VpmuPartition>,
    iss: u32,
    el0: bool,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    pmu::access(pmu, iss, el0, value)
}

/// The level of the guest's PMU interrupt, wherever its registers are.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_line(pmu: Mut<'_, VpmuPartition>) -> bool {
    pmu::line(pmu)
}

/// The guest is about to run on this CPU, whose MDCR_EL2.HPMN is that of `vpmu_partition_traps`. Load and put on the same
/// CPU, with an ISB between a write of MDCR_EL2 and either.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_load(pmu: Mut<'_, VpmuPartition>) -> VpmuStatus {
    pmu::perform(pmu, PartitionedPmu::load)
}

/// The guest no longer runs on this CPU. Its counters stop and are in memory.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_put(pmu: Mut<'_, VpmuPartition>) -> VpmuStatus {
    pmu::perform(pmu, PartitionedPmu::put)
}

/// The vCPU is reset. A loaded PMU is put first.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_reset(pmu: Mut<'_, VpmuPartition>) -> VpmuStatus {
    pmu::perform(pmu, PartitionedPmu::reset)
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. A loaded PMU is put first.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_save(
    pmu: Mut<'_, VpmuPartition>,
    buffer: Mut<'_, u8>,
    room: usize,
    length: Mut<'_, usize>,
) -> VpmuStatus {
    pmu::save(pmu, promised!(state::place(buffer, room, length)))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written. A loaded PMU is put first.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_restore(
    pmu: Mut<'_, VpmuPartition>,
    buffer: Ref<'_, u8>,
    length: usize,
) -> VpmuStatus {
    pmu::restore(pmu, promised!(state::source(buffer, length)))
}

/// What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
/// after each other call: it may have changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_traps(
    pmu: Mut<'_, VpmuPartition>,
    traps: Mut<'_, VpmuTraps>,
) -> VpmuStatus {
    traps.with(|traps| pmu::perform(pmu, |pmu, _| *traps = pmu.trap_registers().into()))
}

/// Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
/// be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_migrate(
    mut pmu: Mut<'_, VpmuPartition>,
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

/// The guest has been left. To be called first at each exit where `acts_at_exit` is not 0: this is what keeps the guest's
/// counters from counting at EL2 where MDCR_EL2 does not.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_exited(pmu: Mut<'_, VpmuPartition>) -> VpmuStatus {
    pmu::perform(pmu, PartitionedPmu::exited)
}

/// Tells whose a physical PMU interrupt is: `guest` becomes whether the guest's line is high, `host`
/// the host's counters that overflowed, whose overflow bits are cleared.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_overflow(
    pmu: Mut<'_, VpmuPartition>,
    guest: Mut<'_, bool>,
    host: Mut<'_, u32>,
) -> VpmuStatus {
    let (Some(guest), Some(host)) = (guest.get(), host.get()) else {
        return VpmuStatus::Misuse;
    };
    pmu::perform(pmu, |pmu, registers| {
        let split = pmu.overflow(registers);
        *guest = split.guest;
        *host = split.host.bits();
    })
}

/// As `vpmu_partition_load`, right after `left`, the PMU of another guest, was put on this CPU. Writes only the registers that
/// `left` had otherwise. Nothing may have accessed PMU registers of guests since. `VPMU_STATUS_MISUSE`: also where `left` is
/// `pmu` itself.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_partition_load_after(
    pmu: Mut<'_, VpmuPartition>,
    left: Mut<'_, VpmuPartition>,
) -> VpmuStatus {
    // Two references to one PMU must not be.
    if pmu.is(&left) {
        return VpmuStatus::Misuse;
    }
    room::with(left, |left| {
        pmu::perform(pmu, |pmu, registers| pmu.load_after(&left.pmu, registers))
    })
}
