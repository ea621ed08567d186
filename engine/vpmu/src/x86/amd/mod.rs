//! AMD's core performance counters: the four that every AMD64 processor has, the six of the core extension, and
//! PerfMonV2.
//!
//! # Why it is driven this way
//!
//! A counter is a pair of MSRs, PERF_CTL and PERF_CTR (AMD64 Architecture Programmer's Manual vol. 2, 13.2; the
//! family's Processor Programming Reference, "Core Performance Monitor Counters"). Three interfaces exist
//! ([`Interface`]), each with all of the one before. Up to the core extension no register gates all counters and
//! none says who has overflowed: a handler reads each counter, and writes it to begin anew. That is two exits for a
//! sample where Intel's handler takes seven. PerfMonV2 has the global registers, and a handler of Linux's uses
//! them all. So the older interface is the cheaper one under a hypervisor, unless a guest switches many counters
//! at once (docs/how/amd.md has figures).
//!
//! AMD's PMU differs from Intel's: reserved bits are ignored and never fault; event selects have 12 bits; there are no
//! fixed counters; no register says which events exist.
//!
//! # The interrupt
//!
//! An overflow of a counter with INT set is one event for LVTPC, latched where it is counted. The local APIC does
//! not set LVTPC's mask bit with the delivery. Linux counts on the latch: having stopped a counter that has overflowed,
//! it waits for the NMI.
//!
//! # What is not offered
//!
//! Instruction-based sampling, branch sampling, northbridge, L3 and data fabric counters: their bits in CPUID are clear. The Merge event, by which families 17H and later make one
//! counter of two, makes both [`Lost`](crate::counter::CounterState::Lost). [`lbr`](crate::x86::lbr) and with it freezing on a PMI are
//! offered where the capability has them.

mod capability;
mod registers;
mod state;

pub use capability::{Capability, Interface};
pub(super) use registers::Registers;
pub use registers::{Msr, perf_ctl};
pub use state::PmuState;

/// No PMU here has more counters.
// CPUID's PerfCtrExtCore stands for six, in Linux AMD64_NUM_COUNTERS_CORE.
pub const MAX_COUNTERS: u8 = 6;
