//! The guest's events in the unit of a perf event, and back.

use std::num::NonZeroU64;

use crate::choose::Backing;
use crate::event::ENDLESS;

/// The shortest distance between overflows: see [`PerfHost::FLOOR`](crate::PerfHost::FLOOR).
pub(crate) const FLOOR: u64 = 50_000;

const NS: u64 = 1_000_000_000;

/// The relation of the guest's events to what a perf event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Units {
    /// The perf event counts the guest's events.
    Events,
    /// The perf event counts ns, the guest's event cycles at so many Hz.
    Cycles(u64),
}

impl Units {
    pub(crate) fn new(backing: Backing, tsc_hz: u64) -> Self {
        match backing {
            Backing::Hardware => Self::Events,
            Backing::Clock => Self::Cycles(tsc_hz),
        }
    }

    /// Converts the guest's `events` to the perf event's unit, rounded up.
    pub(crate) fn to_count(self, events: u64) -> u64 {
        match self {
            Self::Events => events,
            Self::Cycles(hz) => {
                let ns = u128::from(events) * u128::from(NS);
                // Rounded up, because a report that comes early vouches for events that have not been.
                u64::try_from(ns.div_ceil(u128::from(hz))).unwrap_or(ENDLESS)
            }
        }
    }

    /// Returns the period of the perf event for so many of the guest's events, while `sharing` counters wait for
    /// overflows and nothing but the period bounds these.
    pub(crate) fn period(self, events: NonZeroU64, sharing: u64) -> u64 {
        self.to_count(events.get()).clamp(FLOOR * sharing, ENDLESS)
    }

    /// Converts the perf event's count to the guest's events. The product is taken modulo 2^64, as every total.
    pub(crate) fn to_guest(self, count: u64) -> u64 {
        match self {
            Self::Events => count,
            // A product of 128 bits: ns of a day by GHz have more than 64.
            Self::Cycles(hz) => (u128::from(count) * u128::from(hz) / u128::from(NS)) as u64,
        }
    }

    /// Converts the perf event's count to the guest's events, rounded up.
    pub(crate) fn to_guest_up(self, count: u64) -> u64 {
        match self {
            Self::Events => count,
            Self::Cycles(hz) => {
                let cycles = u128::from(count) * u128::from(hz);
                u64::try_from(cycles.div_ceil(u128::from(NS))).unwrap_or(ENDLESS)
            }
        }
    }
}
