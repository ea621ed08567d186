//! Processor event-based sampling (PEBS): records of counters that overflow, written into the guest's own memory.
//!
//! # Why the host writes them
//!
//! A sample that a guest takes by a PMI costs it the handler, and an exit for each register that the handler
//! touches. With PEBS the processor writes a record of its state at the overflow, gives the counter its next period, and
//! interrupts when the buffer has filled up to a threshold. Here the engine is that processor: one exit a sample, and
//! a PMI for hundreds of them.
//!
//! The engine models record format 4 with the baseline, as Linux knows it from Ice Lake on: Intel SDM vol. 3B, revision
//! 083, 20.9 ("PEBS Facility"), with 20.8 (IA32_PERF_CAPABILITIES) and 18.4.9 ("BTS and DS Save Area"). Every counter
//! can have records, of any event.
//!
//! # An overflow
//!
//! 1. The overflow of a counter that IA32_PEBS_ENABLE names sets no status bit and requests no PMI.
//! 2. The head of the DS save area at IA32_DS_AREA is read, and the counter's reset value. Each field is read once.
//! 3. The counter goes on from its reset value. What it has counted beyond the overflow stays, modulo the period: one
//!    that was noticed late would be beyond its end at once, and silent for its whole width.
//! 4. The record is written at the index, and the index moves. A record has the basic group, and where the counter is
//!    an adaptive one, those that MSR_PEBS_DATA_CFG names.
//! 5. Where the index has reached the threshold, IA32_PERF_GLOBAL_STATUS bit 62 is set and a PMI requested.
//!
//! A record that cannot be written is [lost](Statistics::lost), and hurts only its guest. The SDM leaves open what
//! becomes of a counter whose record does not fit into the buffer: here it goes on from its reset value, and the PMI is
//! requested again. So a guest that has missed a PMI does not lose its counter.
//!
//! Where the host can sample its guest, records of the basic group need no exit: the host's samples become records later
//! ([`Host::begin_sampling`]).
//!
//! # Addresses of the other ring
//!
//! An overflow is noticed a little after it happened, when the guest may have changed its ring. Linux believes a
//! processor that an address is of a ring that the counter counts. So a counter that counts one ring gets no record
//! while the guest is in the other.
//!
//! # Last branches
//!
//! Where the guest is followed for its [last branch records](super::lbr), a record that has them waits, and its counter with
//! it: from the overflow on the guest is followed, and the record is written when that ends, of the moment then. So its
//! branches lead to its address. It does not wait where a PMI would not: at an access of the guest, while a PMI is due, and
//! while the branches are not recorded. The group is then what the registers have, or zero where those are not the last
//! branches.
//!
//! # What is not offered
//!
//! Addresses and latencies of loads: their group is there, and zero.

mod area;
mod guest;
mod host;
mod record;
mod registers;
mod sampling;
mod unit;

pub(super) use area::Area;
pub use guest::{Fault, GeneralRegisters, Guest, Sample};
pub use host::{Host, TakenSamples};
pub use record::data_cfg;
pub(super) use record::{BASIC, Record, basic};
pub(super) use registers::Registers;
pub use registers::{Capability, misc_enable};
pub(crate) use sampling::{BATCH, MANY, NOWHERE, Sampling};
pub(super) use unit::Unit;

/// What became of the overflows of counters that ask for records. Survives a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Records that were written.
    pub records: u64,
    /// Records that could not be written: no access to the guest, no buffer, a full one.
    pub lost: u64,
    /// Overflows without a record, because the guest was in a ring that the counter does not count.
    pub filtered: u64,
    /// Those of the records that are the host's own samples ([`Host::begin_sampling`]).
    pub sampled: u64,
    /// The host's own samples that have no record, because the host was at work for the guest: there is no address.
    pub outside: u64,
    /// Periods that were over before their overflow was noticed, beyond the one that has a record.
    pub skipped: u64,
}
