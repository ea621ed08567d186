//! Intel's architectural performance monitoring, versions 2 to 5.
//!
//! # Why it is driven this way
//!
//! Architectural performance monitoring (Intel SDM vol. 3B, section 20.2, chapter "Performance
//! Monitoring"; section 18.2 in older editions) is a set of MSRs: general counters that count what
//! their IA32_PERFEVTSELx says, fixed counters that always count the same event, and global
//! registers that gate them all and collect their overflow bits. Which of it a processor has is in
//! CPUID leaf 0AH. A guest asks that leaf, and a later version always contains the earlier ones, so
//! here one value, [`Capability`], decides everything: which MSRs exist, which of their bits are
//! reserved, what CPUID says.
//!
//! Linux's handler for one sample touches six MSRs and executes one RDPMC, and each of these leaves the guest. The
//! engine cannot change what the exits cost, only what the host does because of them. [`Pmu`](crate::x86::Pmu) therefore tells
//! [`HostEvents`](crate::counter::HostEvents) only what really changed, and [`HostEvents`](crate::counter::HostEvents)
//! decides, under a [`Policy`](crate::counter::Policy), which calls are left to make.
//!
//! # The interrupt
//!
//! A PMI is an event, not a level (SDM 20.2.2): each overflow of a counter that asks for an interrupt requests one,
//! whether or not IA32_PERF_GLOBAL_STATUS has its bit set already. The engine latches the request where it counts the
//! overflow, under the controls that were in force while it was counted. [`Pmu::take_pmi`](crate::x86::Pmu::take_pmi) takes it. The owner of the
//! local APIC then delivers what LVTPC says, and sets LVTPC's mask bit with the delivery, as Intel's processors do
//! (vol. 3A, 11.5.1). A PMI that finds LVTPC masked is lost, as on a processor. No write of a guest makes a PMI from an
//! overflow bit that is left over.
//!
//! # What is not offered
//!
//! Performance metrics and the uncore: their bits are reserved, so a guest finds a processor
//! without them. [`pebs`](crate::x86::pebs) and [`lbr`](crate::x86::lbr) are offered where the capability
//! has them.

mod capability;
mod config;
mod cpuid;
mod error;
mod registers;
mod state;
mod version;

pub use crate::x86::RawPerfEvtSel;

pub use capability::{Capability, FIXED, MAX_FIXED, MAX_GENERAL, perf_capabilities};
pub use config::{debugctl, fixed_ctrl, global_status};
pub use error::ConfigError;
pub use registers::{Msr, Reserved};
pub(super) use registers::{Registers, to_global};
pub use state::PmuState;
pub use version::Version;
