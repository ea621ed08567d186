//! The Arm PMU that is emulated: every access traps, and functions of the caller's count.

use vpmu::arm::PmuVersion;
use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
use vpmu::counter::Counter;

use crate::counter::{counter_state, policy, report};
use crate::filter::VpmuArmFilter;
use crate::host::{Host, VpmuHost};
use crate::pmu::{self, Guest};
use crate::room::{self, Held, Room, promised};
use crate::status::{VpmuOutcome, VpmuStatus};

/// What a guest finds of its PMUv3 (Arm ARM DDI 0487, chapter D13).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuArmConfig {
    /// The guest's ID_AA64DFR0_EL1, of which PMUVer is used.
    pub id_aa64dfr0: u64,
    /// Event counters, 0 to 31. The cycle counter comes on top.
    pub counters: u8,
    /// Whether the guest's ID_AA64PFR0_EL1 says that EL3 exists.
    pub el3: bool,
    /// Whether the guest's ID_AA64PFR0_EL1 says that EL0 may use AArch32. Without it PMCR_EL0.LC is RES1.
    pub aarch32: bool,
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
    /// Which events the guest may count.
    pub filter: VpmuArmFilter,
}

impl VpmuArmConfig {
    /// `None`: the ID register says that there is no PMUv3, there are too many rules, or no such policy.
    pub(crate) fn config(&self) -> Option<EmulatedConfig> {
        Some(EmulatedConfig {
            counters: self.counters,
            version: PmuVersion::from_id_aa64dfr0(self.id_aa64dfr0)?,
            el3: self.el3,
            aarch32: self.aarch32,
            identity: Identity {
                implementer: self.implementer,
                code: self.idcode,
            },
            events: self.pmceid,
            pmmir: self.pmmir,
            filter: self.filter.filter()?,
            policy: policy(self.policy)?,
        })
    }
}

/// Room for one vCPU's emulated Arm PMU.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuArm {
    opaque: [u64; 512],
}

impl Room for VpmuArm {
    type Value = Held<EmulatedPmu, Host>;
    const MARK: u64 = u64::from_le_bytes(*b"vpmu-arm");
}

impl Guest for VpmuArm {
    type Pmu = EmulatedPmu;
    type Host = Host;
}

/// Makes a PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: the ID register
/// says that there is no PMUv3, there are too many counters or rules, or no such policy.
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
    let Some(config) = config.config() else {
        return VpmuStatus::Config;
    };
    promised!(pmu::init(pmu, host, |pmu, host| {
        let made = pmu.init(&config, host);
        made.map_or(VpmuStatus::Config, |()| VpmuStatus::Ok)
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
    promised!(pmu::access(pmu, iss, el0, value))
}

/// The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_line(pmu: *mut VpmuArm) -> bool {
    promised!(pmu::line(pmu))
}

/// The vCPU starts to run: what the guest has enabled counts again.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_load(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(pmu::perform(pmu, EmulatedPmu::load))
}

/// The vCPU stops running: nothing counts, and all that was counted is in the registers.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_put(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(pmu::perform(pmu, EmulatedPmu::put))
}

/// The vCPU is reset. No host counter is left.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_reset(pmu: *mut VpmuArm) -> VpmuStatus {
    promised!(pmu::perform(pmu, EmulatedPmu::reset))
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
    promised!(pmu::save(pmu, buffer, room, length))
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
    promised!(pmu::restore(pmu, buffer, length))
}

/// Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_line_changed(pmu: *mut VpmuArm, level: *mut bool) -> bool {
    let Some(level) = promised!(room::out(level)) else {
        return false;
    };
    promised!(room::with(pmu, |held: &mut Held<EmulatedPmu, Host>| {
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
pub unsafe extern "C" fn vpmu_arm_set_filter(
    pmu: *mut VpmuArm,
    filter: *const VpmuArmFilter,
) -> VpmuStatus {
    promised!(pmu::set_filter(pmu, filter, EmulatedPmu::set_filter))
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
    promised!(room::with(pmu, |held: &mut Held<EmulatedPmu, Host>| {
        let counter = Counter::new(counter).filter(|&n| held.pmu.counter_state(n).is_some());
        let Some(counter) = counter else {
            return VpmuStatus::Misuse;
        };
        held.pmu.overflow(counter, report, &mut held.host);
        VpmuStatus::Ok
    }))
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
///
/// # Safety
///
/// See the crate's page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmu_arm_counter_state(pmu: *mut VpmuArm, counter: u8) -> i32 {
    promised!(room::with(pmu, |held: &mut Held<EmulatedPmu, Host>| {
        counter_state(Counter::new(counter).and_then(|counter| held.pmu.counter_state(counter)))
    }))
}
