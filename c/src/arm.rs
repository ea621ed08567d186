//! The Arm PMU that is emulated: every access traps.

use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
use vpmu::arm::{Encoding, EventFilter, ExceptionLevel, Outcome, PmuState, PmuVersion, Register};
use vpmu::counter::Counter;

use crate::counter::{counter_state, policy, report};
use crate::host::Host;
use crate::room::{self, Room, promised};
use crate::{VpmuHost, VpmuOutcome, VpmuStatus, state};

/// What a guest is told about its PMUv3 (Arm ARM DDI 0487, chapter D13).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuArmConfig {
    /// The guest's ID_AA64DFR0_EL1, of which PMUVer is used.
    pub id_aa64dfr0: u64,
    /// Event counters, 0 to 31. The cycle counter comes on top.
    pub counters: u8,
    /// Whether the guest's ID_AA64PFR0_EL1 says that EL3 exists.
    pub el3: bool,
    /// PMCR_EL0.IMP.
    pub implementer: u8,
    /// PMCR_EL0.IDCODE.
    pub idcode: u8,
    /// PMCEID0_EL0 and PMCEID1_EL0: the common events that the host can count.
    pub pmceid: [u64; 2],
    /// PMMIR_EL1, seen from PMUv3p4 on.
    pub pmmir: u64,
    /// One of `VPMU_POLICY_*`.
    pub policy: u32,
}

/// Room for one vCPU's emulated Arm PMU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuArm {
    opaque: [u64; 512],
}

#[derive(Debug)]
pub(crate) struct Arm {
    pmu: EmulatedPmu,
    host: Host,
}

impl Room for VpmuArm {
    type Value = Arm;
    const MARK: u64 = u64::from_le_bytes(*b"vpmu-arm");
}

/// The register that a trapped MRS or MSR names, and whether it is written, by ESR_ELx.ISS of
/// exception class 0x18. Bit 0 is the direction: 1 is a read.
pub(crate) fn decode(iss: u32) -> Option<(Register, bool)> {
    Register::decode(Encoding::from_iss(iss)).map(|register| (register, iss & 1 == 0))
}

pub(crate) const fn level(el0: bool) -> ExceptionLevel {
    if el0 {
        ExceptionLevel::El0
    } else {
        ExceptionLevel::El1
    }
}

/// Makes a PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: the ID register
/// says that there is no PMUv3, there are too many counters, or no such policy.
///
/// # Safety
///
/// See the crate's page. The functions of `host` may be called with its context until the PMU is
/// used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_init(
    pmu: *mut VpmuArm,
    config: *const VpmuArmConfig,
    host: *const VpmuHost,
) -> VpmuStatus {
    let (Some(config), Some(host)) = promised!((room::given(config), room::given(host))) else {
        return VpmuStatus::Misuse;
    };
    let Some(host) = Host::new(host) else {
        return VpmuStatus::Misuse;
    };
    let made = PmuVersion::from_id_aa64dfr0(config.id_aa64dfr0).and_then(|version| {
        EmulatedPmu::new(EmulatedConfig {
            counters: config.counters,
            version,
            el3: config.el3,
            identity: Identity {
                implementer: config.implementer,
                code: config.idcode,
            },
            events: config.pmceid,
            pmmir: config.pmmir,
            filter: EventFilter::default(),
            policy: policy(config.policy)?,
        })
        .ok()
    });
    let Some(made) = made else {
        return VpmuStatus::Config;
    };
    promised!(room::fill(pmu, Arm { pmu: made, host }, |before| {
        before.pmu.reset(&mut before.host);
    }))
}

/// Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
/// takes `*value`, a read puts its result there.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_access(
    pmu: *mut VpmuArm,
    iss: u32,
    el0: bool,
    value: *mut u64,
) -> VpmuOutcome {
    let (Some(arm), Some(value)) = promised!((room::value(pmu), room::out(value))) else {
        return VpmuOutcome::Misuse;
    };
    let outcome = match decode(iss) {
        None => Outcome::NotHandled,
        Some((register, true)) => arm.pmu.write(register, level(el0), *value, &mut arm.host),
        Some((register, false)) => arm.pmu.read(register, level(el0), &mut arm.host),
    };
    VpmuOutcome::of_arm(outcome, value)
}

/// The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
/// `vpmu_arm_line` next.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_overflow(
    pmu: *mut VpmuArm,
    counter: u8,
    what: u32,
) -> VpmuStatus {
    let Some(report) = report(what) else {
        return VpmuStatus::Misuse;
    };
    promised!(room::with(pmu, |held| {
        let counter = Counter::new(counter).filter(|&n| held.pmu.counter_state(n).is_some());
        let Some(counter) = counter else {
            return VpmuStatus::Misuse;
        };
        held.pmu.overflow(counter, report, &mut held.host);
        VpmuStatus::Ok
    }))
}

/// The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_line(pmu: *mut VpmuArm) -> bool {
    promised!(room::with(pmu, |held| held.pmu.line()))
}

/// The vCPU starts to run: what the guest has enabled counts again.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_load(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.load(&mut held.host)))
}

/// The vCPU stops running: nothing counts, and all that was counted is in the registers.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_put(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.put(&mut held.host)))
}

/// The vCPU is reset. No host counter is left.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_reset(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(room::perform(pmu, |held| held.pmu.reset(&mut held.host)))
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_counter_state(pmu: *mut VpmuArm, counter: u8) -> i32 {
    promised!(room::with(pmu, |held| counter_state(
        Counter::new(counter).and_then(|counter| held.pmu.counter_state(counter))
    )))
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. Nothing stops: the PMU can go on.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_save(
    pmu: *mut VpmuArm,
    buffer: *mut u8,
    room: usize,
    length: *mut usize,
) -> VpmuStatus {
    promised!(room::with(pmu, |held| {
        state::save(|| held.pmu.save(&mut held.host), buffer, room, length)
    }))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_restore(
    pmu: *mut VpmuArm,
    buffer: *const u8,
    length: usize,
) -> VpmuStatus {
    promised!(room::with(pmu, |held| {
        state::restore(buffer, length, |state: &PmuState| {
            VpmuStatus::of_restore(held.pmu.restore(state, &mut held.host))
        })
    }))
}
