//! What a guest finds of its PMU.

use super::MAX_COUNTERS;
use crate::counter::CounterSet;
use crate::x86::{ArchEvent, CpuidLeaf, lbr, status};

/// How software reaches the counters. Later ones order higher, and contain the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Interface {
    /// Four counters at C001_0000H to C001_0007H.
    Legacy,
    /// Six counters at C001_0200H to C001_020BH: PerfCtrExtCore, families 15H and later.
    Core,
    /// Global registers at C000_0300H to C000_0303H: PerfMonV2, Zen 4 and later.
    V2,
}

/// What a guest finds of its PMU. It decides which MSRs and which of their bits exist.
///
/// ```
/// use vpmu::x86::amd::{Capability, Interface};
///
/// let capability = Capability::new(Interface::V2);
/// assert_eq!(capability.leaf_8000_0001_ecx(), 1 << 23); // PerfCtrExtCore
/// assert_eq!(capability.leaf_8000_0022().eax, 1);       // PerfMonV2
/// assert_eq!(capability.leaf_8000_0022().ebx, 6);       // counters
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Capability {
    /// How the guest reaches its counters.
    pub interface: Interface,
    /// Which of the events that mean the same everywhere are backed: bit [`ArchEvent::cpuid_bit`] for each. A guest
    /// has no register that names them: a counter of another event is lost, and the host is not asked.
    pub events: u32,
    /// The counters of [`Interface::V2`], 1 to 6: where others have counters of the host's, as its watchdog has, a guest can
    /// be offered fewer. CPUID says nothing of the number to software that knows the earlier interfaces alone.
    #[cfg_attr(feature = "serde", serde(default = "all_counters"))]
    pub v2_counters: u8,
    /// Last branch records: the stack of LbrExtV2. With [`Interface::V2`] only, whose status register freezes them;
    /// else there are none.
    #[cfg_attr(feature = "serde", serde(default))]
    pub lbr: Option<lbr::amd::Capability>,
}

#[cfg(feature = "serde")]
const fn all_counters() -> u8 {
    MAX_COUNTERS
}

impl Capability {
    /// Makes a capability with every event, and without last branch records.
    pub const fn new(interface: Interface) -> Self {
        Self {
            interface,
            events: u32::MAX,
            v2_counters: MAX_COUNTERS,
            lbr: None,
        }
    }

    /// Returns the interface's version number: 2 with PerfMonV2, else 1.
    pub const fn version(&self) -> u8 {
        match self.interface {
            Interface::Legacy | Interface::Core => 1,
            Interface::V2 => 2,
        }
    }

    /// Returns the number of counters.
    pub const fn count(&self) -> u8 {
        match self.interface {
            Interface::Legacy => 4,
            Interface::Core => MAX_COUNTERS,
            Interface::V2 => match self.v2_counters {
                0 => 1,
                n if n < MAX_COUNTERS => n,
                _ => MAX_COUNTERS,
            },
        }
    }

    /// Returns every counter there is.
    pub const fn counters(&self) -> CounterSet {
        CounterSet::first(self.count())
    }

    /// Returns the bits of CPUID.8000_0001H:ECX that say what this PMU has: PerfCtrExtCore.
    pub const fn leaf_8000_0001_ecx(&self) -> u32 {
        const PERF_CTR_EXT_CORE: u32 = 1 << 23;
        match self.interface {
            Interface::Legacy => 0,
            Interface::Core | Interface::V2 => PERF_CTR_EXT_CORE,
        }
    }

    /// Returns CPUID leaf 8000_0022H: PerfMonV2, the LBR stack, and their numbers. All zero for an earlier interface.
    pub const fn leaf_8000_0022(&self) -> CpuidLeaf {
        const PERF_MON_V2: u32 = 1;
        const LBR_STACK_AND_PMC_FREEZE: u32 = 0b110;
        let counters = self.count() as u32;
        let (eax, ebx) = match (self.interface, self.offered_lbr()) {
            (Interface::Legacy | Interface::Core, _) => (0, 0),
            (Interface::V2, None) => (PERF_MON_V2, counters),
            (Interface::V2, Some(_)) => (
                PERF_MON_V2 | LBR_STACK_AND_PMC_FREEZE,
                counters | (lbr::amd::DEPTH as u32) << 4,
            ),
        };
        CpuidLeaf {
            eax,
            ebx,
            ecx: 0,
            edx: 0,
        }
    }

    /// Returns the last branch records that the guest has.
    pub const fn offered_lbr(&self) -> Option<lbr::amd::Capability> {
        match self.interface {
            // Without a global status register no PMI could freeze the records.
            Interface::Legacy | Interface::Core => None,
            Interface::V2 => self.lbr,
        }
    }

    /// Bits of PerfCntrGlobalStatus that can be set and are no counter's.
    pub(super) const fn status_bits(&self) -> u64 {
        match self.offered_lbr() {
            Some(_) => status::BRANCHES_FROZEN | status::COUNTERS_FROZEN,
            None => 0,
        }
    }

    /// Returns whether `event` is backed.
    pub const fn has_event(&self, event: ArchEvent) -> bool {
        event.is_in(self.events)
    }
}
