//! A paravirtual PMU: a page that guest and host share, and a doorbell.
//!
//! # Why a guest gets another PMU
//!
//! A driver of an architectural PMU reads and writes registers, and each access of them is an exit: Linux takes
//! eight for one sample, and several for each event at each context switch. A driver that knows of its host writes
//! what it *wants* into memory instead, and finds there what the host has counted. What remains is one exit where
//! something has to change at once, and the interrupt of an overflow itself.
//!
//! # Who writes what
//!
//! Each vCPU has a page ([`word`] names its words). A word has one writer. The guest's words say what each counter
//! shall be, the host's what it is. Writing a wish costs nothing. One doorbell ([`command`]) applies all wishes, or
//! stops all counters, and brings all counts back. At an overflow the host has counted and reloaded before it
//! interrupts, so the handler reads memory only; a new period holds from the next overflow on.
//!
//! # Samples without interrupts
//!
//! An overflow is an exit, as its interrupt is the host's to send. A host that can sample its guest by itself writes
//! records of overflows into a buffer of the guest's instead, and sends one interrupt for many of them.
//!
//! # What makes it safe
//!
//! The host loads each of the guest's words once and decides on its copy. Whatever the guest writes, and whenever, only
//! its own counters may be wrong and its own interrupts lost.
//!
//! # No interrupt is lost, and none is sent twice
//!
//! `seq` counts interrupts. At an overflow the host publishes counts, has a full barrier, and reads `ack`: where
//! that is `seq`, the next interrupt is due; else one is on its way. The guest's handler writes `seq` into `ack`,
//! has a full barrier, and then reads the overflows. Either the handler sees the overflow or the host its `ack`.
//!
//! The whole protocol, for drivers of other systems: `docs/how/paravirtual-pmu.md`.

mod counters;
mod device;
mod guest;
mod offer;
mod page;
mod records;
mod samples;
mod save;
mod wish;

pub use device::{Device, NotAPage};
pub use guest::GuestHalf;
pub use offer::{BadOffer, Offer};
pub use page::{MAX_COUNTERS, PAGE_SIZE, Page, RECORD, RECORDS, TAG, command, flag, state, word};
pub use save::{DeviceState, RestoreError, SavedCounter};
