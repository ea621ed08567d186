//! What a guest finds of the device.

use core::fmt;

use super::page::MAX_COUNTERS;
use crate::x86::{ArchEvent, CpuidLeaf, EventFilter};

/// What a guest is offered, as opposed to what it does with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Counters: 1 to 16.
    pub counters: u8,
    /// Architectural events: bit [`ArchEvent::cpuid_bit`] for each.
    pub events: u32,
    /// Whether events can be counted in one ring alone.
    pub rings: bool,
    /// Whether events that are not architectural may be asked for.
    pub raw: bool,
    /// Which events may be counted at all.
    pub filter: EventFilter,
}

impl Offer {
    /// Returns the leaf that a guest reads: EAX bits 7:0 counters, 8 rings, 9 raw events, 10 records; EBX the architectural events,
    /// of which a set bit is one that is there; ECX the layout of the page, 1.
    pub const fn leaf(&self) -> CpuidLeaf {
        // The device's, whatever its host can do: one that takes no samples interrupts.
        const RECORDS: u32 = 1 << 10;
        let (rings, raw) = ((self.rings as u32) << 8, (self.raw as u32) << 9);
        CpuidLeaf {
            eax: self.counters as u32 | rings | raw | RECORDS,
            ebx: self.events,
            // A driver of another layout finds out before it shares a page that the host would refuse.
            ecx: 1,
            edx: 0,
        }
    }

    /// Returns whether `event` is offered.
    pub const fn has_event(&self, event: ArchEvent) -> bool {
        event.is_in(self.events)
    }

    pub(super) fn check(&self) -> Result<(), BadOffer> {
        // None is no offer: the driver would register a PMU that counts nothing.
        if (1..=MAX_COUNTERS).contains(&self.counters) {
            Ok(())
        } else {
            Err(BadOffer(self.counters))
        }
    }
}

/// A page has no room for so many counters, or none was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadOffer(pub u8);

impl fmt::Display for BadOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offer {} counters: from 1 to {MAX_COUNTERS}", self.0)
    }
}

impl core::error::Error for BadOffer {}
