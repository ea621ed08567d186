//! AMD's core performance counters. But for its beginning such a PMU is used as Intel's is (`x86`).

use vpmu::x86::amd::{Capability, Interface};

use crate::host::VpmuHost;
use crate::room::{Mut, Ref};
use crate::status::VpmuStatus;
use crate::x86;
use crate::x86::VpmuX86;

/// Four counters at C001_0000H to C001_0007H.
pub const VPMU_AMD_LEGACY: u32 = 0;
/// Six counters at C001_0200H to C001_020BH: PerfCtrExtCore. The fewest exits for a sample.
pub const VPMU_AMD_CORE: u32 = 1;
/// The same, and global registers at C000_0300H to C000_0303H: PerfMonV2.
pub const VPMU_AMD_V2: u32 = 2;

/// What a guest finds of AMD's PMU (AMD64 Architecture Programmer's Manual vol. 2, 13.2).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct VpmuX86AmdConfig {
    /// One of `VPMU_AMD_*`.
    pub interface: u32,
    /// Which of the events that mean the same everywhere can be counted, as in `struct vpmu_x86_config`, but 1: it
    /// can. No register says so to the guest: a counter of another event is lost, and reads as zero.
    pub events: u32,
    /// One of `VPMU_POLICY_*`.
    pub policy: u32,
}

/// Makes AMD's PMU out of reset in `pmu`, on a vCPU that runs. `VPMU_STATUS_CONFIG`: there is no such interface, or
/// no such policy.
///
/// The functions of `host` may be called with its context until the PMU is
/// used no more.
#[unsafe(no_mangle)]
pub extern "C" fn vpmu_x86_init_amd(
    pmu: Mut<'_, VpmuX86>,
    config: Ref<'_, VpmuX86AmdConfig>,
    host: Ref<'_, VpmuHost>,
) -> VpmuStatus {
    let Some(&config) = config.get() else {
        return VpmuStatus::Misuse;
    };
    let interface = match config.interface {
        VPMU_AMD_LEGACY => Some(Interface::Legacy),
        VPMU_AMD_CORE => Some(Interface::Core),
        VPMU_AMD_V2 => Some(Interface::V2),
        _ => None,
    };
    let capability = interface.map(|interface| Capability {
        events: config.events,
        ..Capability::new(interface)
    });
    x86::init(pmu, capability.map(Into::into), config.policy, host)
}
