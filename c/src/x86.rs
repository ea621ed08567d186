//! The x86 PMU: Intel's architectural performance monitoring, or AMD's counters (`amd`).

use vpmu::counter::Counter;
use vpmu::x86::intel::Version;
use vpmu::x86::{
    Capability, CpuidLeaf, EventFilter, Outcome, Pmu, PmuConfig, PmuState, Ring, intel,
};

use crate::counter::{VPMU_POLICY_REUSE_PAUSED, counter_state, policy, report};
use crate::host::{Host, VpmuHost};
use crate::room::{self, Held, Mut, Ref, Room, promised};
use crate::state;
use crate::status::{VpmuOutcome, VpmuStatus};

/// What a guest finds of Intel's PMU (Intel SDM vol. 3B, section 20.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuX86Config {
    /// The version of architectural performance monitoring: 2 to 5.
    pub version: u8,
    /// General counters: 1 to 8.
    pub general: u8,
    /// Their width in bits: 32 to 63.
    pub general_width: u8,
    /// The width of fixed counters in bits: 32 to 63.
    pub fixed_width: u8,
    /// Fixed counters, bit *n* for counter *n*.
    pub fixed: u32,
    /// The architectural events that can be counted, in the order of CPUID.0AH:EBX, but 1: it can.
    pub events: u32,
    /// Whether IA32_PERF_CAPABILITIES exists.
    pub pdcm: bool,
    /// Whether general counters can be written in full width. Needs `pdcm`.
    pub full_width_writes: bool,
    /// One of `VPMU_POLICY_*`.
    pub policy: u32,
    /// Bits of IA32_DEBUGCTL that the hypervisor implements, for instance BTF (bit 1): the PMU keeps them as written.
    /// Others than its own and these are #GP.
    pub other_debugctl: u64,
}

/// One CPUID leaf. For leaves 1, 7 and 8000_0001H only the bits that concern the PMU: set those, and clear the
/// PMU's others (PDCM, DS, DTES64; PerfCtrExtCore, PerfCtrExtNB, PerfCtrExtLLC, IBS).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuCpuid {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// Room for one vCPU's x86 PMU, of either vendor.
#[repr(C)]
#[derive(Debug)]
pub struct VpmuX86 {
    opaque: [u64; 1024],
}

impl Room for VpmuX86 {
    type Pmu = Pmu;
    type Host = Host;
    const MARK: u64 = u64::from_le_bytes(*b"vpmu-x86");
}

impl VpmuX86Config {
    fn capability(&self) -> Option<intel::Capability> {
        let version = Version::from_number(self.version).filter(|_| self.version <= 5)?;
        Some(intel::Capability {
            general: self.general,
            general_width: self.general_width,
            fixed: self.fixed,
            fixed_width: self.fixed_width,
            events: self.events,
            pdcm: self.pdcm,
            full_width_writes: self.full_width_writes,
            other_debugctl: self.other_debugctl,
            ..intel::Capability::new(version)
        })
    }
}

/// Makes a PMU out of reset in `room`; `capability` is `None` where there can be no such PMU.
pub(crate) fn init(
    room: Mut<'_, VpmuX86>,
    capability: Option<Capability>,
    policy_number: u32,
    host: Ref<'_, VpmuHost>,
) -> VpmuStatus {
    let Some(host) = host.get().and_then(Host::new) else {
        return VpmuStatus::Misuse;
    };
    let made = capability.and_then(|capability| {
        Pmu::new(PmuConfig {
            capability,
            filter: EventFilter::deny_listed(),
            policy: policy(policy_number)?,
        })
        .ok()
    });
    let Some(pmu) = made else {
        return VpmuStatus::Config;
    };
    room::fill(room, Held { pmu, host }, |before| {
        before.pmu.reset(&mut before.host);
    })
}

/// Fills `config` with what most processors of this version have. `VPMU_STATUS_CONFIG`: the version
/// is not 2 to 5.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_config(version: u8, config: Mut<'_, VpmuX86Config>) -> VpmuStatus {
    let Some(config) = config.get() else {
        return VpmuStatus::Misuse;
    };
    let Some(known) = Version::from_number(version).filter(|_| version <= 5) else {
        return VpmuStatus::Config;
    };
    let most = intel::Capability::new(known);
    *config = VpmuX86Config {
        version,
        general: most.general,
        general_width: most.general_width,
        fixed_width: most.fixed_width,
        fixed: most.fixed,
        events: most.events,
        pdcm: most.pdcm,
        full_width_writes: most.full_width_writes,
        policy: VPMU_POLICY_REUSE_PAUSED,
        other_debugctl: most.other_debugctl,
    };
    VpmuStatus::Ok
}

/// Makes Intel's PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: there is no such PMU, or
/// no such policy.
///
/// The functions of `host` may be called with its context until the PMU is
/// used no more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_init(
    pmu: Mut<'_, VpmuX86>,
    config: Ref<'_, VpmuX86Config>,
    host: Ref<'_, VpmuHost>,
) -> VpmuStatus {
    config.with(|config| {
        let capability = config.capability().map(Into::into);
        init(pmu, capability, config.policy, host)
    })
}

/// What CPUID says of the PMU: Intel's in leaves 01H, 07H (subleaf 1), 0AH and 23H, AMD's in 8000_0001H and
/// 8000_0022H. Any other leaf is zero.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_cpuid(
    pmu: Mut<'_, VpmuX86>,
    leaf: u32,
    subleaf: u32,
    answer: Mut<'_, VpmuCpuid>,
) -> VpmuStatus {
    let (Some(x86), Some(answer)) = (room::value(pmu), answer.get()) else {
        return VpmuStatus::Misuse;
    };
    let with = |eax, ecx| CpuidLeaf {
        eax,
        ecx,
        ..CpuidLeaf::default()
    };
    let CpuidLeaf { eax, ebx, ecx, edx } = match (x86.pmu.capability(), leaf, subleaf) {
        (Capability::Intel(intel), 0x01, _) => with(0, intel.leaf_01_ecx()),
        (Capability::Intel(intel), 0x07, 1) => with(intel.leaf_07_1_eax(), 0),
        (Capability::Intel(intel), 0x0a, _) => intel.leaf_0a(),
        (Capability::Intel(intel), 0x23, _) => intel.leaf_23(subleaf),
        (Capability::Amd(amd), 0x8000_0001, _) => with(0, amd.leaf_8000_0001_ecx()),
        (Capability::Amd(amd), 0x8000_0022, _) => amd.leaf_8000_0022(),
        _ => CpuidLeaf::default(),
    };
    *answer = VpmuCpuid { eax, ebx, ecx, edx };
    VpmuStatus::Ok
}

/// The MSRs to intercept: their number to `count`, and as many as there is `room` for to `msrs`. `VPMU_STATUS_ROOM`: there
/// are more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_msrs(
    pmu: Mut<'_, VpmuX86>,
    msrs: Mut<'_, u32>,
    room: usize,
    count: Mut<'_, usize>,
) -> VpmuStatus {
    room::with(pmu, |held| {
        let numbers = held.pmu.capability().msrs();
        promised!(room::list(numbers, msrs, room, count))
    })
}

/// An access, whose value goes to `value`.
fn access(
    pmu: Mut<'_, VpmuX86>,
    value: Option<&mut u64>,
    perform: impl FnOnce(&mut Pmu, &mut Host) -> Outcome,
) -> VpmuOutcome {
    let (Some(x86), Some(value)) = (room::value(pmu), value) else {
        return VpmuOutcome::Misuse;
    };
    VpmuOutcome::of_x86(perform(&mut x86.pmu, &mut x86.host), value)
}

/// Performs a guest's RDMSR.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_rdmsr(
    pmu: Mut<'_, VpmuX86>,
    msr: u32,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    access(pmu, value.get(), |pmu, host| pmu.rdmsr(msr, host))
}

/// Performs a guest's WRMSR.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_wrmsr(pmu: Mut<'_, VpmuX86>, msr: u32, value: u64) -> VpmuOutcome {
    access(pmu, Some(&mut 0), |pmu, host| pmu.wrmsr(msr, value, host))
}

/// Performs a guest's RDPMC with `index` in ECX. `user`: its CPL is not 0; `pce`: its CR4.PCE is
/// set.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_rdpmc(
    pmu: Mut<'_, VpmuX86>,
    index: u32,
    user: bool,
    pce: bool,
    value: Mut<'_, u64>,
) -> VpmuOutcome {
    let ring = if user { Ring::User } else { Ring::Kernel };
    access(pmu, value.get(), |pmu, host| {
        pmu.rdpmc(index, ring, pce, host)
    })
}

/// The host reports (`VPMU_REPORT_*`) that `counter` has counted as far as was asked. Ask
/// `vpmu_x86_take_pmi` next.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_overflow(pmu: Mut<'_, VpmuX86>, counter: u8, what: u32) -> VpmuStatus {
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

/// Whether a PMI is due; it is not any more. Deliver what LVTPC says, and with Intel's PMU set its mask bit. Ask
/// after each other call, and before the vCPU runs.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_take_pmi(pmu: Mut<'_, VpmuX86>) -> bool {
    room::with(pmu, |held| held.pmu.take_pmi())
}

/// The vCPU starts to run: what the guest has enabled counts again.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_load(pmu: Mut<'_, VpmuX86>) -> VpmuStatus {
    room::perform(pmu, |held| held.pmu.load(&mut held.host))
}

/// The vCPU stops running: nothing counts, and all that was counted is in the registers.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_put(pmu: Mut<'_, VpmuX86>) -> VpmuStatus {
    room::perform(pmu, |held| held.pmu.put(&mut held.host))
}

/// The vCPU is reset. No host counter is left.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_reset(pmu: Mut<'_, VpmuX86>) -> VpmuStatus {
    room::perform(pmu, |held| held.pmu.reset(&mut held.host))
}

/// A scheduling slice is over: host counters that the guest did not use in it are released. At any regular moment, for
/// instance each 100 ms.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_end_slice(pmu: Mut<'_, VpmuX86>) -> VpmuStatus {
    room::perform(pmu, |held| held.pmu.end_slice(&mut held.host))
}

/// One of `VPMU_COUNTER_*`, or `VPMU_STATUS_MISUSE` for a counter that does not exist.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_counter_state(pmu: Mut<'_, VpmuX86>, counter: u8) -> i32 {
    room::with(pmu, |held| {
        counter_state(counter, |n| held.pmu.counter_state(n))
    })
}

/// Writes all that the guest could find out to the `room` bytes at `buffer`, and their number to
/// `length`. Nothing stops: the PMU can go on.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_save(
    pmu: Mut<'_, VpmuX86>,
    buffer: Mut<'_, u8>,
    room: usize,
    length: Mut<'_, usize>,
) -> VpmuStatus {
    let place = promised!(state::place(buffer, room, length));
    room::with(pmu, |held| {
        state::save(|| held.pmu.save(&mut held.host), place)
    })
}

/// Goes on from the `length` bytes at `buffer`, which a save has written.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_restore(
    pmu: Mut<'_, VpmuX86>,
    buffer: Ref<'_, u8>,
    length: usize,
) -> VpmuStatus {
    let source = promised!(state::source(buffer, length));
    room::with(pmu, |held| {
        state::restore(source, |state: &PmuState| {
            VpmuStatus::of_restore(held.pmu.restore(state, &mut held.host))
        })
    })
}
