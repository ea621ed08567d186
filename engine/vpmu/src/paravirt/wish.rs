//! What the guest wishes of one counter.

use super::page::flag;
use crate::x86::intel::RawPerfEvtSel;
use crate::x86::{CounterConfig, EventKind};

/// No period or distance is longer: the sum of two is no wrap.
pub(super) const LONGEST: u64 = 1 << 62;

/// Bits of a configuration that have a meaning.
pub(super) const EVENT: u64 = 0xffff | RawPerfEvtSel::EDGE | RawPerfEvtSel::INV | 0xff << 24;

/// A wish that has been taken over, and what became of it. The count itself is the bank's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) config: u64,
    pub(super) flags: u64,
    /// The period that the page had when it was last read. The guest may change it at any time.
    pub(super) period: u64,
    pub(super) generation: u64,
    /// The count at which the next overflow is.
    pub(super) next: u64,
    /// The length of the period that the next overflow ends.
    pub(super) length: u64,
    /// The length of the period that the last overflow ended.
    pub(super) last: u64,
    pub(super) overflows: u64,
}

impl Wish {
    pub(super) fn event(&self) -> CounterConfig {
        let raw = RawPerfEvtSel(self.config);
        let (select, umask) = (raw.select(), raw.umask());
        CounterConfig {
            user: self.flags & flag::USER != 0,
            kernel: self.flags & flag::KERNEL != 0,
            ..raw.counts(EventKind::General { select, umask })
        }
    }

    pub(super) const fn interrupts(&self) -> bool {
        self.flags & flag::INTERRUPT != 0
    }

    pub(super) const fn may_be_recorded(&self) -> bool {
        self.flags & flag::RECORD != 0
    }
}
