//! What a counter is told to count: the raw registers, and what they mean.

use super::{FIXED, Ring, Version};

/// The image of IA32_PERFEVTSELx as a guest wrote it (SDM 20.2.1.1, figures 20-1 and 20-6). Any
/// 64-bit value is possible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RawPerfEvtSel(pub u64);

impl RawPerfEvtSel {
    /// Count at CPL 1 to 3.
    pub const USR: u64 = 1 << 16;
    /// Count at CPL 0.
    pub const OS: u64 = 1 << 17;
    /// Count the moments at which the condition becomes true.
    pub const EDGE: u64 = 1 << 18;
    /// Pin control: there are no pins in a virtual machine. Kept, and without effect.
    pub const PC: u64 = 1 << 19;
    /// Interrupt on overflow.
    pub const INT: u64 = 1 << 20;
    /// Count for all threads of the core. Versions 3 and 4 only.
    pub const ANY_THREAD: u64 = 1 << 21;
    /// The counter is enabled.
    pub const EN: u64 = 1 << 22;
    /// Invert the comparison with the counter mask.
    pub const INV: u64 = 1 << 23;

    /// Bits 7:0, the event select.
    pub const fn select(self) -> u8 {
        self.0 as u8
    }

    /// Bits 15:8, the unit mask.
    pub const fn umask(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Bits 31:24, the counter mask.
    pub const fn threshold(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// Whether all of `bits` are set.
    pub const fn has(self, bits: u64) -> bool {
        self.0 & bits == bits
    }

    /// Bits that must be written as zero.
    pub const fn reserved(version: Version) -> u64 {
        match version {
            Version::V2 | Version::V5 => 0xffff_ffff_0020_0000,
            Version::V3 | Version::V4 => 0xffff_ffff_0000_0000,
        }
    }

    /// What a counter with this register is to count.
    pub const fn config(self, version: Version) -> CounterConfig {
        CounterConfig {
            event: EventKind::General {
                select: self.select(),
                umask: self.umask(),
            },
            user: self.has(Self::USR),
            kernel: self.has(Self::OS),
            edge: self.has(Self::EDGE),
            invert: self.has(Self::INV),
            threshold: self.threshold(),
            only_c0: matches!(version, Version::V5) && self.has(Self::INV),
        }
    }
}

/// Fields of IA32_FIXED_CTR_CTRL, four bits for each counter (SDM 20.2.2, figure 20-2).
pub mod fixed_ctrl {
    use super::{CounterConfig, EventKind};

    /// Count at CPL 0.
    pub const OS: u64 = 1 << 0;
    /// Count at CPL 1 to 3.
    pub const USR: u64 = 1 << 1;
    /// Count for all threads of the core. Versions 3 and 4 only.
    pub const ANY_THREAD: u64 = 1 << 2;
    /// Interrupt on overflow.
    pub const PMI: u64 = 1 << 3;

    /// The field of fixed counter `n`; a counter that the register has no room for has zero.
    pub const fn field(register: u64, n: u8) -> u64 {
        match register.checked_shr(n as u32 * 4) {
            Some(shifted) => shifted & 0xf,
            None => 0,
        }
    }

    /// `bits` in the field of fixed counter `n`.
    pub const fn place(bits: u64, n: u8) -> u64 {
        match (bits & 0xf).checked_shl(n as u32 * 4) {
            Some(placed) => placed,
            None => 0,
        }
    }

    /// What fixed counter `n` with this register is to count.
    pub const fn config(register: u64, n: u8) -> CounterConfig {
        let field = field(register, n);
        CounterConfig {
            event: EventKind::Fixed(n),
            user: field & USR != 0,
            kernel: field & OS != 0,
            edge: false,
            invert: false,
            threshold: 0,
            only_c0: false,
        }
    }
}

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
    /// The event part of an IA32_PERFEVTSELx: event select, unit mask, edge, inversion and counter
    /// mask, which is what Linux takes as a raw event. `None` for a fixed counter's event.
    pub const fn raw(&self) -> Option<u64> {
        let EventKind::General { select, umask } = self.event else {
            return None;
        };
        let mut raw = select as u64 | (umask as u64) << 8 | (self.threshold as u64) << 24;
        if self.edge {
            raw |= RawPerfEvtSel::EDGE;
        }
        if self.invert {
            raw |= RawPerfEvtSel::INV;
        }
        Some(raw)
    }

    /// The architectural event that is counted as it is, with no condition on it.
    pub const fn architectural(&self) -> Option<ArchEvent> {
        if self.edge || self.invert || self.threshold != 0 {
            return None;
        }
        self.event.architectural()
    }

    /// Whether events in `ring` are counted.
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
    /// By event select and unit mask, as in IA32_PERFEVTSELx.
    General {
        /// The event select.
        select: u8,
        /// The unit mask.
        umask: u8,
    },
    /// What the fixed counter of this number counts.
    Fixed(u8),
}

impl EventKind {
    /// The architectural event of this encoding, if it is one.
    pub const fn architectural(self) -> Option<ArchEvent> {
        Some(match self {
            Self::General { select, umask } => match (select, umask) {
                (0x3c, 0x00) => ArchEvent::CoreCycles,
                (0xc0, 0x00) => ArchEvent::Instructions,
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
        })
    }
}

/// Events that mean the same on every processor (SDM 20.2.1.2, table 20-1; 20.2.2, table 20-2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
        Some(match self {
            Self::CoreCycles => 0,
            Self::Instructions => 1,
            Self::ReferenceCycles => 2,
            Self::LlcReferences => 3,
            Self::LlcMisses => 4,
            Self::Branches => 5,
            Self::BranchMisses => 6,
            Self::TopdownSlots => 7,
            Self::TscCycles => return None,
        })
    }
}

/// The fixed counter that `counter` of a [`CounterSet`](crate::counter::CounterSet) is; `None`: it
/// is a general one.
pub(super) const fn fixed_index(counter: u8) -> Option<u8> {
    counter.checked_sub(FIXED)
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

    #[test]
    fn a_raw_event_is_what_the_guest_wrote_without_the_controls() {
        let written = RawPerfEvtSel(0x0ad7_41c0);
        let config = written.config(Version::V2);
        assert_eq!(config.raw(), Some(0x0a84_41c0));
        assert_eq!(config.architectural(), None);
        assert!(config.user && config.kernel && config.edge && config.invert);
        assert!(!config.only_c0 && written.config(Version::V5).only_c0);
    }

    #[test]
    fn fixed_fields_outside_the_register_are_empty() {
        assert_eq!(fixed_ctrl::field(u64::MAX, 15), 0xf);
        assert_eq!(fixed_ctrl::field(u64::MAX, 16), 0);
        assert_eq!(fixed_ctrl::field(u64::MAX, 255), 0);
        assert_eq!(fixed_ctrl::place(0xb, 2), 0xb00);
        assert_eq!(fixed_ctrl::place(0xb, 255), 0);
    }
}
