//! What a host counter is to count: events, rings and conditions, as Intel and AMD both have them.

use super::{RawPerfEvtSel, Ring};

/// What a host counter is to count. It counts only while the guest runs, in the rings named here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CounterConfig {
    /// Which event.
    pub event: EventKind,
    /// Count while the guest is at CPL 1 to 3.
    pub user: bool,
    /// Count while the guest is at CPL 0.
    pub kernel: bool,
    /// Count rising edges of the condition rather than events.
    pub edge: bool,
    /// With a `threshold`: count cycles with fewer events than it, rather than with as many.
    pub invert: bool,
    /// 0: count events. Else count cycles in which at least so many happen.
    pub threshold: u8,
    /// Do not count while the processor is outside C0, although an inverted condition holds there:
    /// the domain separation of version 5 (SDM 20.2.5.2).
    pub only_c0: bool,
}

impl CounterConfig {
    /// Returns the event part of an event select register: event select, unit mask, edge, inversion and counter mask,
    /// which is what Linux takes as a raw event. `None` for a fixed counter's event.
    pub const fn raw(&self) -> Option<u64> {
        // Both vendors have these bits at the same places.
        // INT, EN and the rings are left out: perf has attributes of their own for them, and drops these bits.
        let (select, umask) = match self.event {
            EventKind::General { select, umask } => (select as u64, umask),
            EventKind::Amd { select, umask } => {
                let select = select as u64;
                (select & 0xff | (select & 0xf00) << 24, umask)
            }
            EventKind::Fixed(_) => return None,
        };
        let mut raw = select | (umask as u64) << 8 | (self.threshold as u64) << 24;
        if self.edge {
            raw |= RawPerfEvtSel::EDGE;
        }
        if self.invert {
            raw |= RawPerfEvtSel::INV;
        }
        Some(raw)
    }

    /// Returns the architectural event that is counted without a condition.
    ///
    /// Linux names core cycles for PEBS as the cycles in which fewer than 16 instructions retire: no processor retires
    /// more.
    pub const fn architectural(&self) -> Option<ArchEvent> {
        if let EventKind::General {
            select: 0xc0,
            umask: 0,
        } = self.event
            && self.invert
            && !self.edge
            && self.threshold >= 16
        {
            return Some(ArchEvent::CoreCycles);
        }
        // With a condition the counter counts cycles in which the event happens, and not the event.
        if self.edge || self.invert || self.threshold != 0 {
            return None;
        }
        self.event.architectural()
    }

    /// Returns whether events in `ring` are counted.
    pub const fn counts_in(&self, ring: Ring) -> bool {
        match ring {
            Ring::Kernel => self.kernel,
            Ring::User => self.user,
        }
    }
}

/// An event a host can count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// By Intel's event select and unit mask, as in IA32_PERFEVTSELx.
    General {
        /// The event select.
        select: u8,
        /// The unit mask.
        umask: u8,
    },
    /// What the fixed counter of this number counts.
    Fixed(u8),
    /// By AMD's event select and unit mask, as in PERF_CTL.
    Amd {
        /// The event select, of 12 bits.
        select: u16,
        /// The unit mask.
        umask: u8,
    },
}

impl EventKind {
    /// Returns the architectural event of this encoding, if it is one.
    pub const fn architectural(self) -> Option<ArchEvent> {
        Some(match self {
            Self::General { select, umask } => match (select, umask) {
                (0x3c, 0x00) => ArchEvent::CoreCycles,
                (0xc0, 0x00) => ArchEvent::Instructions,
                // Not `TscCycles`: this clock may be another one, and only the fixed counter has the TSC's.
                (0x3c, 0x01) => ArchEvent::ReferenceCycles,
                (0x2e, 0x4f) => ArchEvent::LlcReferences,
                (0x2e, 0x41) => ArchEvent::LlcMisses,
                (0xc4, 0x00) => ArchEvent::Branches,
                (0xc5, 0x00) => ArchEvent::BranchMisses,
                (0xa4, 0x01) => ArchEvent::TopdownSlots,
                _ => return None,
            },
            Self::Fixed(n) => match n {
                0 => ArchEvent::Instructions,
                1 => ArchEvent::CoreCycles,
                2 => ArchEvent::TscCycles,
                3 => ArchEvent::TopdownSlots,
                _ => return None,
            },
            // These are the same in every family that has them (the PPRs, "Core Performance Monitor
            // Counters"); the events of caches differ, and no host but AMD's counts them.
            Self::Amd { select, umask } => match (select, umask) {
                (0x076, 0x00) => ArchEvent::CoreCycles,
                (0x0c0, 0x00) => ArchEvent::Instructions,
                (0x0c2, 0x00) => ArchEvent::Branches,
                (0x0c3, 0x00) => ArchEvent::BranchMisses,
                (0x120, 0x01) => ArchEvent::ReferenceCycles,
                _ => return None,
            },
        })
    }
}

/// Events that mean the same on every processor (SDM 20.2.1.2, table 20-1; 20.2.2, table 20-2); of AMD's those
/// that are the same in every family. Encodings are Intel's here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// In the order of their bits in CPUID.0AH:EBX.
pub enum ArchEvent {
    /// Unhalted core cycles: 3CH, 00H; fixed counter 1.
    CoreCycles,
    /// Instructions retired: C0H, 00H; fixed counter 0.
    Instructions,
    /// Unhalted reference cycles, of a clock the processor chooses: 3CH, 01H.
    ReferenceCycles,
    /// Last-level cache references: 2EH, 4FH.
    LlcReferences,
    /// Last-level cache misses: 2EH, 41H.
    LlcMisses,
    /// Branch instructions retired: C4H, 00H.
    Branches,
    /// Mispredicted branch instructions retired: C5H, 00H.
    BranchMisses,
    /// Topdown slots: A4H, 01H; fixed counter 3.
    TopdownSlots,
    /// Unhalted reference cycles of the time-stamp counter's clock: fixed counter 2 only.
    TscCycles,
}

impl ArchEvent {
    /// All events that CPUID leaf 0AH can take away, in the order of its EBX.
    pub const ENUMERATED: [Self; 8] = [
        Self::CoreCycles,
        Self::Instructions,
        Self::ReferenceCycles,
        Self::LlcReferences,
        Self::LlcMisses,
        Self::Branches,
        Self::BranchMisses,
        Self::TopdownSlots,
    ];

    /// Its bit in CPUID.0AH:EBX; `None` for [`TscCycles`](Self::TscCycles), which has none.
    pub const fn cpuid_bit(self) -> Option<u8> {
        match self {
            Self::TscCycles => None,
            event => Some(event as u8),
        }
    }

    /// Returns whether `events` have its bit. [`TscCycles`](Self::TscCycles) are never among them.
    pub(crate) const fn is_in(self, events: u32) -> bool {
        match self.cpuid_bit() {
            Some(bit) => events >> bit & 1 != 0,
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_enumerated_event_has_its_own_bit() {
        for (bit, event) in (0..).zip(ArchEvent::ENUMERATED) {
            assert_eq!(event.cpuid_bit(), Some(bit));
        }
    }
}
