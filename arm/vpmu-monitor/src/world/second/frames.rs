//! The registers of the second guest's interrupt controller (Arm IHI 0069, "The GIC Distributor register map" and "The
//! GIC Redistributor register map"). What does not exist reads as zero and ignores writes.

use core::ops::Range;

use super::gic::{INTIDS, VirtualGic};
use crate::world::redistributor::{
    self, FRAME, ICACTIVER0, ICENABLER0, ICFGR0, ICPENDR0, IGROUPR0, IPRIORITYR0, ISACTIVER0,
    ISENABLER0, ISPENDR0, WAKER_CHILDREN_ASLEEP, WAKER_PROCESSOR_SLEEP, is_defined,
};

/// Registers with a bit for each INTID begin at these offsets, and have 128 bytes each.
const BITMAP: u64 = 0x080;
const BITMAPS: Range<u64> = IGROUPR0..0x400;
const PRIORITIES: Range<u64> = IPRIORITYR0..IPRIORITYR0 + INTIDS as u64;
/// Two bits for each INTID.
const CONFIGURATION: Range<u64> = ICFGR0..ICFGR0 + INTIDS as u64 / 4;
/// SGIs are edges.
const SGIS_ARE_EDGES: u32 = 0xffff;

const CTLR: u64 = 0x0000;
const TYPER: u64 = 0x0004;
const IIDR: u64 = 0x0008;
const PIDR2: u64 = 0xffe8;
/// GICv3.
const ARCHITECTURE: u64 = 0x3b;
/// Arm.
const IMPLEMENTER: u64 = 0x43b;

/// GICD_CTLR: DS and ARE are fixed, and no write is ever on its way.
const CTLR_FIXED: u64 = 1 << 6 | 1 << 4;
const CTLR_GROUPS: u64 = 0b11;
/// GICD_TYPER: No1N, 16 bits of INTIDs, and how many SPIs.
const TYPER_VALUE: u64 = 1 << 25 | 0xf << 19 | (INTIDS as u64 / 32 - 1);

impl VirtualGic {
    /// Serves the guest's access of `bytes` bytes at `offset` of its distributor: a read, whose answer is returned, or the write
    /// of a value. Every SPI is routed to its one CPU.
    pub fn distributor(&mut self, offset: u64, bytes: u8, written: Option<u64>) -> u64 {
        match (offset, written) {
            _ if !is_defined(offset, bytes) => {}
            (CTLR, Some(value)) => self.groups_enabled = (value & CTLR_GROUPS) as u32,
            (CTLR, None) => return CTLR_FIXED | u64::from(self.groups_enabled),
            (TYPER, None) => return TYPER_VALUE,
            (IIDR, None) => return IMPLEMENTER,
            (PIDR2, None) => return ARCHITECTURE,
            // What is private is in the redistributor.
            _ if is_private(offset) => {}
            (_, Some(value)) => self.write_interrupts(offset, bytes, value),
            (_, None) => return self.read_interrupts(offset, bytes),
        }
        0
    }

    /// Serves the guest's access of `bytes` bytes at `offset` of its redistributor, likewise.
    pub fn redistributor(&mut self, offset: u64, bytes: u8, written: Option<u64>) -> u64 {
        use redistributor::{IIDR, TYPER, TYPER_HIGH, TYPER_LAST, WAKER};
        let affinity = self.affinity >> 8 & 0xff00_0000 | self.affinity & 0xff_ffff;
        match (offset / FRAME, offset % FRAME, written) {
            // Linux reads all 64 bits at once, others by halves.
            (0, TYPER, None) if bytes == 8 => return affinity << 32 | TYPER_LAST,
            (_, offset, _) if !is_defined(offset, bytes) => {}
            (0, TYPER, None) => return TYPER_LAST,
            (0, TYPER_HIGH, None) => return affinity,
            (0, IIDR, None) => return IMPLEMENTER,
            (0, WAKER, Some(value)) => self.asleep = value & WAKER_PROCESSOR_SLEEP != 0,
            // Asleep the moment it is told to: nothing is on its way to this CPU.
            (0, WAKER, None) if self.asleep => {
                return WAKER_PROCESSOR_SLEEP | WAKER_CHILDREN_ASLEEP;
            }
            (0 | 1, PIDR2, None) => return ARCHITECTURE,
            (1, offset, Some(value)) if is_private(offset) => {
                self.write_interrupts(offset, bytes, value);
            }
            (1, offset, None) if is_private(offset) => return self.read_interrupts(offset, bytes),
            _ => {}
        }
        0
    }

    fn read_interrupts(&self, offset: u64, bytes: u8) -> u64 {
        if BITMAPS.contains(&offset) {
            let word = (offset % BITMAP / 4) as usize;
            return u64::from(match offset & !(BITMAP - 1) {
                IGROUPR0 => self.group1.word(word),
                ISENABLER0 | ICENABLER0 => self.enabled.word(word),
                ISPENDR0 | ICPENDR0 => self.pending_word(word),
                _ => self.active.word(word),
            });
        }
        if PRIORITIES.contains(&offset) {
            let first = (offset - IPRIORITYR0) as usize;
            let bytes = self.priorities.iter().skip(first).take(bytes.into());
            return bytes.rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
        }
        if CONFIGURATION.contains(&offset) {
            let half = (offset - ICFGR0) / 4;
            let edges = self.edges((half / 2) as usize) >> (half % 2 * 16);
            // The upper bit of each pair says edge; the lower one is reserved.
            return (0..16).fold(0, |all, n| all | u64::from(edges >> n & 1) << (2 * n + 1));
        }
        0
    }

    fn edges(&self, word: usize) -> u32 {
        let fixed = if word == 0 { SGIS_ARE_EDGES } else { 0 };
        self.edge.word(word) | fixed
    }

    fn write_interrupts(&mut self, offset: u64, bytes: u8, value: u64) {
        if BITMAPS.contains(&offset) {
            let word = (offset % BITMAP / 4) as usize;
            // Bitmaps are accessed by words alone (`is_defined`).
            let value = value as u32;
            let (bits, set) = match offset & !(BITMAP - 1) {
                IGROUPR0 => {
                    self.group1.set_word(word, value);
                    return;
                }
                ISENABLER0 => {
                    self.ask_lines_again(word, value);
                    (&mut self.enabled, true)
                }
                ICENABLER0 => (&mut self.enabled, false),
                ISPENDR0 => (&mut self.pending, true),
                ICPENDR0 => (&mut self.pending, false),
                ISACTIVER0 => (&mut self.active, true),
                ICACTIVER0 => (&mut self.active, false),
                _ => return,
            };
            let before = bits.word(word);
            bits.set_word(word, if set { before | value } else { before & !value });
            // A guest that clears what was pending gives the physical interrupt back with it.
            self.release_unused(word);
        } else if PRIORITIES.contains(&offset) {
            let first = (offset - IPRIORITYR0) as usize;
            let bytes = self.priorities.iter_mut().skip(first).take(bytes.into());
            for (n, byte) in bytes.enumerate() {
                *byte = (value >> (8 * n)) as u8;
            }
        } else if CONFIGURATION.contains(&offset) {
            let half = (offset - ICFGR0) / 4;
            let edges = (0..16).fold(0, |all, n| all | (value >> (2 * n + 1) & 1) << n) as u32;
            let (word, shift) = ((half / 2) as usize, half % 2 * 16);
            let others = self.edge.word(word) & !(0xffff << shift);
            self.edge.set_word(word, others | edges << shift);
        }
    }
}

/// Whether the register of interrupts at `offset` has those below 32. With affinity routing each INTID is in one of the two
/// frames, and reads as 0 in the other.
fn is_private(offset: u64) -> bool {
    match offset {
        ..IPRIORITYR0 => offset % BITMAP < 4,
        IPRIORITYR0..ICFGR0 => offset - IPRIORITYR0 < 32,
        _ => offset - ICFGR0 < 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::second::gic::REDISTRIBUTOR;

    impl VirtualGic {
        fn read_distributor(&mut self, offset: u64, bytes: u8) -> u64 {
            self.distributor(offset, bytes, None)
        }

        fn write_distributor(&mut self, offset: u64, bytes: u8, value: u64) {
            self.distributor(offset, bytes, Some(value));
        }

        fn read_redistributor(&mut self, offset: u64, bytes: u8) -> u64 {
            self.redistributor(offset, bytes, None)
        }

        fn write_redistributor(&mut self, offset: u64, bytes: u8, value: u64) {
            self.redistributor(offset, bytes, Some(value));
        }
    }

    #[test]
    fn what_is_private_is_in_the_redistributor_only() {
        let mut gic = VirtualGic::new(0x100);
        gic.write_distributor(ISENABLER0, 4, !0);
        assert_eq!(gic.read_redistributor(FRAME + ISENABLER0, 4), 0);
        gic.write_redistributor(FRAME + ISENABLER0, 4, 0x0880_0001);
        gic.write_redistributor(FRAME + ICENABLER0, 4, 1);
        assert_eq!(gic.read_redistributor(FRAME + ISENABLER0, 4), 0x0880_0000);
        assert_eq!(gic.read_distributor(ISENABLER0, 4), 0);
        gic.write_distributor(ISENABLER0 + 4, 4, 5);
        gic.write_redistributor(FRAME + ISENABLER0 + 4, 4, 2);
        assert_eq!(gic.read_distributor(ICENABLER0 + 4, 4), 5);
        assert_eq!(
            gic.read_redistributor(redistributor::TYPER, 8),
            0x100 << 32 | 1 << 4
        );
    }

    #[test]
    fn a_line_that_rose_while_its_interrupt_was_disabled_is_asked_again() {
        const PMI: u32 = 23;
        let mut gic = VirtualGic::new(0);
        gic.write_distributor(CTLR, 4, 3);
        gic.hold(PMI);
        gic.write_redistributor(FRAME + ISENABLER0, 4, 1 << PMI);
        assert!(!gic.has_pending(), "its line may be low by now");
        assert_eq!(gic.take_released(0), 1 << PMI, "and comes if it is not");
        gic.hold(PMI);
        gic.write_redistributor(FRAME + ISENABLER0, 4, 1 << PMI);
        assert!(gic.has_pending(), "it was enabled when the line rose");
    }

    #[test]
    fn priorities_and_configuration_keep_what_is_written() {
        let mut gic = VirtualGic::new(0);
        gic.write_redistributor(FRAME + IPRIORITYR0 + 25, 1, 0xa0);
        gic.write_redistributor(FRAME + IPRIORITYR0 + 28, 4, 0x8070_6050);
        assert_eq!(gic.read_redistributor(FRAME + IPRIORITYR0 + 24, 4), 0xa000);
        assert_eq!(gic.read_redistributor(FRAME + IPRIORITYR0 + 31, 1), 0x80);
        gic.write_redistributor(FRAME + ICFGR0 + 4, 4, 0x8000_0002);
        assert_eq!(gic.read_redistributor(FRAME + ICFGR0 + 4, 4), 0x8000_0002);
        assert_eq!(gic.read_redistributor(FRAME + ICFGR0, 4), 0xaaaa_aaaa);
        gic.write_distributor(ICFGR0 + 8, 4, !0);
        assert_eq!(gic.read_distributor(ICFGR0 + 8, 4), 0xaaaa_aaaa);
    }

    #[test]
    fn no_access_does_what_is_not_there() {
        let mut gic = VirtualGic::new(0);
        for bytes in [1, 2, 4, 8] {
            for offset in 0..REDISTRIBUTOR {
                gic.write_redistributor(offset, bytes, u64::MAX);
                gic.read_redistributor(offset, bytes);
                gic.write_distributor(offset, bytes, u64::MAX);
                gic.read_distributor(offset, bytes);
            }
        }
        assert_eq!(gic.take_released(0), 0, "nothing was held");
    }
}
