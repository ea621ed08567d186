//! The Arm PMU that is partitioned: the guest owns hardware counters.

use core::ffi::c_void;

use vpmu::arm::partition::{
    Features, Isolation, PartitionConfig, PartitionedPmu, Plan, PmuRegisters,
};
use vpmu::arm::{EventFilter, Outcome, PmuState, Register};

use crate::arm::{decode, level};
use crate::room::{self, Room, promised};
use crate::{VpmuOutcome, VpmuStatus, state};

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
    /// Whether the CPU keeps host counters from EL1, and HPMD and HCCD keep the guest's from EL2, as
    /// the architecture says and a probe has found. `false` is always safe, and traps more.
    pub isolates: bool,
    /// Whether another CPU has the affinity of this one (MPIDR_EL1) from level 1 up, so that the two
    /// are threads of a core. `true` is always safe, and traps more.
    pub shares_core: bool,
}

/// The registers of the CPU that executes this, at EL2. `write` has an ISB behind it.
///
/// Registers are named by the ISS of their own access: op0, op2, op1, CRn and CRm at their places,
/// Rt and the direction zero (`VPMU_REGISTER` makes such a number).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VpmuRegisters {
    /// Handed to both functions.
    pub context: *mut c_void,
    /// Executes an MRS.
    pub read: Option<unsafe extern "C" fn(context: *mut c_void, iss: u32) -> u64>,
    /// Executes an MSR and an ISB.
    pub write: Option<unsafe extern "C" fn(context: *mut c_void, iss: u32, value: u64)>,
}

/// What the trap registers must hold while the guest runs. See `vpmu_partition_traps`.
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

/// Room for one vCPU's partitioned PMU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuPartition {
    opaque: [u64; 256],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Registers {
    context: *mut c_void,
    read: unsafe extern "C" fn(*mut c_void, u32) -> u64,
    write: unsafe extern "C" fn(*mut c_void, u32, u64),
}

impl PmuRegisters for Registers {
    fn read(&mut self, register: Register) -> u64 {
        // SAFETY: the caller of `vpmu_partition_init` promised functions that may be called with
        // its context.
        unsafe { (self.read)(self.context, register.encoding().to_iss()) }
    }

    fn write(&mut self, register: Register, value: u64) {
        // SAFETY: as in `read`.
        unsafe { (self.write)(self.context, register.encoding().to_iss(), value) }
    }
}

#[derive(Debug)]
pub(crate) struct Partition {
    pmu: PartitionedPmu,
    host: Registers,
}

impl Room for VpmuPartition {
    type Value = Partition;
    const MARK: u64 = u64::from_le_bytes(*b"vpmupart");
}

impl VpmuPartitionConfig {
    fn plan(&self) -> Option<Plan> {
        let features = Features::from_registers(self.id_aa64dfr0, self.id_aa64mmfr0, 0, [])?;
        let features = Features {
            multithreaded: self.shares_core,
            ..features
        };
        Plan::new(&PartitionConfig {
            implemented: self.implemented,
            host_counters: self.host_counters,
            features,
            isolation: if self.isolates {
                Isolation::ALL
            } else {
                Isolation::NONE
            },
            filter: EventFilter::default(),
            events: self.pmceid,
        })
        .ok()
    }
}

/// Makes a PMU out of reset in `pmu`, not loaded. `VPMU_STATUS_CONFIG`: the CPU cannot be divided
/// so, or has no PMUv3.
///
/// # Safety
///
/// See the crate's page. The functions of `registers` may be called with its context until the PMU
/// is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_init(
    pmu: *mut VpmuPartition,
    config: *const VpmuPartitionConfig,
    registers: *const VpmuRegisters,
) -> VpmuStatus {
    let (Some(config), Some(registers)) = promised!((room::given(config), room::given(registers)))
    else {
        return VpmuStatus::Misuse;
    };
    let (Some(read), Some(write)) = (registers.read, registers.write) else {
        return VpmuStatus::Misuse;
    };
    let Some(plan) = config.plan() else {
        return VpmuStatus::Config;
    };
    let made = Partition {
        pmu: PartitionedPmu::new(plan),
        host: Registers {
            context: registers.context,
            read,
            write,
        },
    };
    promised!(room::fill(pmu, made, |_| {}))
}

/// What the trap registers must hold when the guest is entered, the caller's own bits ORed in. Ask
/// after each other call: it may have changed.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_traps(
    pmu: *mut VpmuPartition,
    traps: *mut VpmuTraps,
) -> VpmuStatus {
    let (Some(held), Some(traps)) = promised!((room::value(pmu), room::out(traps))) else {
        return VpmuStatus::Misuse;
    };
    let wanted = held.pmu.trap_registers();
    *traps = VpmuTraps {
        mdcr_el2: wanted.mdcr_el2,
        hdfgrtr_el2: wanted.hdfgrtr_el2,
        hdfgwtr_el2: wanted.hdfgwtr_el2,
    };
    VpmuStatus::Ok
}

/// Goes on with the plan of another CPU, before the first load there, and after a put. `VPMU_STATUS_CONFIG`: that CPU cannot
/// be divided so. `VPMU_STATUS_STATE`: the guest would notice, or the PMU is loaded; nothing has changed.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_migrate(
    pmu: *mut VpmuPartition,
    config: *const VpmuPartitionConfig,
) -> VpmuStatus {
    let (Some(held), Some(config)) = promised!((room::value(pmu), room::given(config))) else {
        return VpmuStatus::Misuse;
    };
    match config.plan() {
        Some(plan) => VpmuStatus::of_restore(held.pmu.migrate(plan)),
        None => VpmuStatus::Config,
    }
}

/// Performs a trapped MRS or MSR, as `vpmu_arm_access` does. AArch32 accesses of EL0 (exception classes 0x03 and 0x04)
/// are the caller's to translate to the AArch64 register's ISS.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_access(
    pmu: *mut VpmuPartition,
    iss: u32,
    el0: bool,
    value: *mut u64,
) -> VpmuOutcome {
    let (Some(held), Some(value)) = promised!((room::value(pmu), room::out(value))) else {
        return VpmuOutcome::Misuse;
    };
    let outcome = match decode(iss) {
        None => Outcome::NotHandled,
        Some((register, true)) => held.pmu.write(register, level(el0), *value, &mut held.host),
        Some((register, false)) => held.pmu.read(register, level(el0), &mut held.host),
    };
    VpmuOutcome::of_arm(outcome, value)
}

/// The guest has been left. To be called first at each exit: before PMUv3p5, this is what keeps the
/// guest's counters from counting at EL2.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_exited(pmu: *mut VpmuPartition) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.exited(&mut held.host)))
}

/// Tells whose a physical PMU interrupt is: `guest` becomes whether the guest's line is high, `host`
/// the host's counters that overflowed, whose overflow bits are cleared.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_overflow(
    pmu: *mut VpmuPartition,
    guest: *mut bool,
    host: *mut u32,
) -> VpmuStatus {
    let (Some(held), Some(guest), Some(host)) =
        promised!((room::value(pmu), room::out(guest), room::out(host)))
    else {
        return VpmuStatus::Misuse;
    };
    let split = held.pmu.overflow(&mut held.host);
    *guest = split.guest;
    *host = split.host.bits();
    VpmuStatus::Ok
}

/// The level of the guest's PMU interrupt, wherever its registers are.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_line(pmu: *mut VpmuPartition) -> bool {
    promised!(room::with(pmu, |held| held.pmu.line(&mut held.host)))
}

/// The guest is about to run on this CPU, whose MDCR_EL2.HPMN is that of `vpmu_partition_traps`. Load and put on the same
/// CPU, with an ISB between a write of MDCR_EL2 and either.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_load(pmu: *mut VpmuPartition) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.load(&mut held.host)))
}

/// As `vpmu_partition_load`, right after `left`, the PMU of another guest, was put on this CPU. Writes only the registers that
/// `left` had otherwise. Nothing may have accessed PMU registers of guests since. `VPMU_STATUS_MISUSE`: also where `left` is
/// `pmu` itself.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_load_after(
    pmu: *mut VpmuPartition,
    left: *mut VpmuPartition,
) -> VpmuStatus {
    // Two references to one PMU must not be.
    if core::ptr::eq(pmu, left) {
        return VpmuStatus::Misuse;
    }
    let (Some(held), Some(left)) = promised!((room::value(pmu), room::value(left))) else {
        return VpmuStatus::Misuse;
    };
    held.pmu.load_after(&left.pmu, &mut held.host);
    VpmuStatus::Ok
}

/// The guest no longer runs on this CPU. Its counters stop and are in memory.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_put(pmu: *mut VpmuPartition) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.put(&mut held.host)))
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. A loaded PMU is put first.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_save(
    pmu: *mut VpmuPartition,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    promised!(room::with(pmu, |held| {
        state::save(|| held.pmu.save(&mut held.host), buffer, room, length)
    }))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written. A loaded PMU is put first.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_partition_restore(
    pmu: *mut VpmuPartition,
    buffer: *const u8,
    length: usize,
) -> VpmuStatus {
    promised!(room::with(pmu, |held| {
        state::restore(buffer, length, |state: &PmuState| {
            VpmuStatus::of_restore(held.pmu.restore(state, &mut held.host))
        })
    }))
}
