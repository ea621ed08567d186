//! A host for the vpmu engine: Linux perf events behind the guest's counters.
//!
//! A [`PerfHost`] belongs to one vCPU and is made on that vCPU's thread. Each guest counter that has
//! to count gets a perf event of that thread, so the kernel itself stops and starts it with the
//! thread. An overflow is a signal to the thread ([`PerfOptions::signal`]): it takes the vCPU out of
//! KVM_RUN, and is noted for [`PerfHost::take_overflows`].
//!
//! # What counts
//!
//! - [`Backing::Hardware`]: the processor's counters, only while the guest runs, and only in the
//!   rings that the guest asked for.
//! - [`Backing::Clock`], where there is no hardware PMU (most clouds, nested virtualisation, QEMU
//!   without KVM): the thread's own time on the CPU, as cycles of the time-stamp counter. A halted
//!   guest's thread sleeps and its cycles stand still, as they should. Exits are part of the time:
//!   a guest that exits much seems slower than it is. A clock counts nothing else: cycles and
//!   reference cycles are offered, and instructions and branches only on request, as one for each
//!   cycle. An event of one ring gets the portion of the time for which a [`Sampler`] finds the guest
//!   in that ring.
//!
//! # Limits
//!
//! Overflows of a clock come at least 50 microseconds apart ([`PerfHost::FLOOR`]), and with *n* counters those of each
//! counter *n* times as far apart. Overflows of hardware events keep this distance on average, and up to 32 may follow
//! each other faster. With a shorter period the report is late: the guest is interrupted less often than it asked, and
//! the host does not slow down. perf's own signals arrive some tens of microseconds late.
//!
//! A counter whose event shared its hardware counter in time, or was stopped by the kernel for too many overflows, is
//! [`Lost`](vpmu::counter::Lost): its value is too low from then on. Stopping is noticed where the kernel lends this
//! user the memory for the event's records (two pages for each counter, of `perf_event_mlock_kb`). Without them the
//! overflows of hardware events are 50,000 events apart.
#![cfg(target_os = "linux")]

mod attrs;
mod buffer;
mod choose;
mod descriptors;
mod error;
mod events;
mod host;
mod kernel;
mod kick;
mod kind;
mod notes;
mod options;
mod pace;
mod portion;
mod processor;
mod rings;
mod sampler;
mod slot;
mod support;
#[cfg(test)]
mod tests;

pub use buffer::{CpuMode, PerfRecord, PerfSample};
pub use descriptors::Descriptors;
pub use error::PerfError;
pub use host::{PerfHost, SampledGuest};
pub use kick::{Flag, KICKED, Kick};
pub use notes::{ALARM, overrun};
pub use options::{Backing, Freeze, PerfOptions};
pub use processor::Vendor;
pub use sampler::Sampler;
pub use support::{
    GuestsOnly, Support, check_sampling, guests_only, prepare, reach_thread, support,
};
