//! The guest's events in the perf event's unit, and back.

use super::{NS, PerfHost};
use crate::choose::Backing;
use crate::event::ENDLESS;

impl PerfHost {
    /// Converts `events` to the perf event's unit, rounded up.
    pub(super) fn to_count(&self, events: u64) -> u64 {
        let count = match self.chooser.backing {
            Backing::Hardware => u128::from(events),
            Backing::Clock => {
                let ns = u128::from(events) * u128::from(NS);
                ns.div_ceil(u128::from(self.tsc_hz))
            }
        };
        u64::try_from(count).unwrap_or(ENDLESS)
    }

    /// Converts `events` to a period of the perf event's, which leaves others time.
    pub(super) fn to_host(&self, events: u64) -> u64 {
        let count = self.to_count(events);
        count.clamp(self.floor(), ENDLESS)
    }

    /// Returns the shortest period, in the perf event's unit.
    pub(super) fn floor(&self) -> u64 {
        let made = self.slots.iter().flatten();
        // Counters that only count interrupt nobody. Nothing tells which one-shot reports come back.
        let sharing = match self.repeating {
            true => made.filter(|slot| slot.armed && slot.running).count(),
            false => made.count(),
        };
        Self::FLOOR * sharing.max(1) as u64
    }

    /// Converts the perf event's count to the guest's events.
    pub(super) fn to_guest(&self, count: u64) -> u64 {
        match self.chooser.backing {
            Backing::Hardware => count,
            Backing::Clock => to_events(count, self.tsc_hz),
        }
    }
}

/// Converts a clock's ns to the guest's events. The product is taken modulo 2^64, as every total.
pub(super) fn to_events(ns: u64, hz: u64) -> u64 {
    (u128::from(ns) * u128::from(hz) / u128::from(NS)) as u64
}
