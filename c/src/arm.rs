//! The Arm PMU that is emulated: every access traps, and functions of the caller's count.

use vpmu::arm::PmuVersion;
use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
use vpmu::counter::Counter;

use crate::counter::{counter_state, policy, report};
use crate::filter::VpmuArmFilter;
use crate::host::{Host, VpmuHost};
use crate::pmu;
use crate::room::{self, Mut, Ref, Room, promised};
use crate::state;
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
    type Pmu = EmulatedPmu;
    type Host = Host;
    const MARK: u64 = u64::from_le_bytes(*b"vpmu-arm");
}

/// Makes a PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: the ID register
/// says that there is no PMUv3, there are too many counters or rules, or no such policy.
///
/// The functions of `host` may be called with its context until the PMU is
/// used no more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_init(
    pmu: Mut<'_, VpmuArm>,
    config: Ref<'_, VpmuArmConfig>,
    host: Ref<'_, VpmuHost>,
) -> VpmuStatus {
    let (Some(config), Some(host)) = (config.get(), host.get().and_then(Host::new)) else {
        return VpmuStatus::Misuse;
    };
    let Some(config) = config.config() else {
        return VpmuStatus::Config;
    };
    pmu::init(pmu, host, |pmu, host| {
        let made = pmu.init(&config, host);
        made.map_or(VpmuStatus::Config, |()| VpmuStatus::Ok)
    })
}

/// Performs a trapped MRS or MSR (exception class 0x18) with this ISS, made at EL0 or EL1. A write
/// takes `*value`, a read puts its result there.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_access(
    pmu: Mut<'_, VpmuArm>,
    iss: u32,
    el0: bool,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    pmu::access(pmu, iss, el0, value)
}

/// The level of the guest's PMU interrupt. Ask after each other call: it is a level, not an edge.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_line(pmu: Mut<'_, VpmuArm>) -> bool {
    pmu::line(pmu)
}

/// The vCPU starts to run: what the guest has enabled counts again.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_load(pmu: Mut<'_, VpmuArm>) -> VpmuStatus {
    pmu::perform(pmu, EmulatedPmu::load)
}

/// The vCPU stops running: nothing counts, and all that was counted is in the registers.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_put(pmu: Mut<'_, VpmuArm>) -> VpmuStatus {
    pmu::perform(pmu, EmulatedPmu::put)
}

/// The vCPU is reset. No host counter is left.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_reset(pmu: Mut<'_, VpmuArm>) -> VpmuStatus {
    pmu::perform(pmu, EmulatedPmu::reset)
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. Nothing stops: the PMU can go on.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_save(
    pmu: Mut<'_, VpmuArm>,
    buffer: Mut<'_, u8>,
    room: usize,
    length: Mut<'_, usize>,
) -> VpmuStatus {
    pmu::save(pmu, promised!(state::place(buffer, room, length)))
}

/// Goes on from the `length` bytes at `buffer`, which a save has written.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_restore(
    pmu: Mut<'_, VpmuArm>,
    buffer: Ref<'_, u8>,
    length: usize,
) -> VpmuStatus {
    pmu::restore(pmu, promised!(state::source(buffer, length)))
}

/// Whether the level of the guest's PMU interrupt is another than when this was asked last; `*level` becomes the level.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_line_changed(pmu: Mut<'_, VpmuArm>, level: Mut<'_, bool>) -> bool {
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
pub extern "C" fn vpmu_arm_set_filter(
    pmu: Mut<'_, VpmuArm>,
    filter: Ref<'_, VpmuArmFilter>,
) -> VpmuStatus {
    pmu::set_filter(pmu, filter, EmulatedPmu::set_filter)
}

/// The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
/// `vpmu_arm_line` next.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_overflow(pmu: Mut<'_, VpmuArm>, counter: u8, what: u32) -> VpmuStatus {
    let Some(report) = report(what) else {
        return VpmuStatus::Misuse;
    };
    room::with(pmu, |held| {
        let counter = Counter::new(counter).filter(|&n| held.pmu.counter_state(n).is_some());
        let Some(counter) = counter else {
            return VpmuStatus::Misuse;
        };
        held.pmu.overflow(counter, report, &mut held.host);
        VpmuStatus::Ok
    })
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_arm_counter_state(pmu: Mut<'_, VpmuArm>, counter: u8) -> i32 {
    room::with(pmu, |held| {
        counter_state(counter, |n| held.pmu.counter_state(n))
    })
}
