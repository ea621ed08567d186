//! What a guest does that counters can count.

use vpmu::x86::{CounterConfig, EventKind, Ring};

/// A guest's activity that counters can count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happening {
    Instructions,
    Cycles,
    TscCycles,
    /// Any event with this event select and unit mask.
    Other(u8, u8),
}

impl Happening {
    pub(crate) fn is_counted_by(self, config: &CounterConfig, ring: Ring) -> bool {
        let own = match self {
            Self::Instructions => (0xc0, 0, 0),
            Self::Cycles => (0x3c, 0, 1),
            Self::TscCycles => (0, 0, 2),
            Self::Other(select, umask) => (select, umask, 99),
        };
        let instructions = EventKind::General {
            select: 0xc0,
            umask: 0,
        };
        // No processor retires 16 instructions in a cycle.
        let is_cycles =
            config.event == instructions && config.invert && !config.edge && config.threshold >= 16;
        let plain = !config.edge && !config.invert && config.threshold == 0;
        let same = match config.event {
            _ if is_cycles => self == Self::Cycles,
            EventKind::General { select, umask } => {
                self != Self::TscCycles && (select, umask) == (own.0, own.1)
            }
            EventKind::Fixed(n) => n == own.2,
            EventKind::Amd { select, umask } => {
                let own = match self {
                    Self::Instructions => (0xc0, 0),
                    Self::Cycles => (0x76, 0),
                    Self::TscCycles => (0x120, 1),
                    Self::Other(select, umask) => (select.into(), umask),
                };
                (select, umask) == own
            }
        };
        let here = if ring == Ring::User {
            config.user
        } else {
            config.kernel
        };
        (plain || is_cycles) && same && here
    }
}
