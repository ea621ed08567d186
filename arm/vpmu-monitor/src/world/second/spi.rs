//! A shared peripheral interrupt of the second guest's, in the machine's distributor, which is the first guest's.
//!
//! The monitor has the interrupt enabled, sent to the shared CPU, and as urgent as its own. The first guest's accesses
//! leave that as it is, and see an interrupt that does not exist (Arm IHI 0069, "The GIC Distributor register map").

use core::ops::Range;

use super::gic::INTIDS;

/// GICD_SETSPI_NSR, GICD_CLRSPI_NSR, GICD_SETSPI_SR, GICD_CLRSPI_SR: what is written names an interrupt.
const MESSAGES: [u64; 4] = [0x40, 0x48, 0x50, 0x58];
const MESSAGE_INTID: u64 = 0x3ff;
/// GICD_IGROUPR.
const GROUPS: Range<u64> = 0x080..0x100;
/// GICD_ISENABLER to GICD_ICACTIVER: a bit that is written as 0 changes nothing.
const SET_AND_CLEAR: Range<u64> = 0x100..0x400;
/// GICD_IPRIORITYR and GICD_ITARGETSR: a byte each.
const BYTES: Range<u64> = 0x400..0xc00;
/// GICD_ICFGR: two bits each.
const CONFIGURATION: Range<u64> = 0xc00..0xd00;
/// GICD_IGRPMODR.
const MODIFIERS: Range<u64> = 0xd00..0xd80;
/// GICD_NSACR: two bits each.
const NON_SECURE_ACCESS: Range<u64> = 0xe00..0xf00;
/// GICD_IROUTER<0>: eight bytes each.
const ROUTES: u64 = 0x6000;

/// Those that the second guest's interrupt controller has.
const SPIS: Range<u32> = 32..INTIDS as u32;
const PAGE: u64 = 0x1000;

/// An interrupt that the first guest does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptSpi(u32);

impl KeptSpi {
    /// The interrupt with this INTID; `None` when it is no shared one, or one that the second guest cannot have.
    pub fn new(intid: u32) -> Option<Self> {
        SPIS.contains(&intid).then_some(Self(intid))
    }

    /// The interrupt's INTID.
    pub const fn intid(self) -> u32 {
        self.0
    }

    /// The offset of the word with its bit in the bitmap that begins at `first`, and the bit.
    pub fn bit(self, first: u64) -> (u64, u64) {
        (first + u64::from(self.0 / 32) * 4, 1 << (self.0 % 32))
    }

    /// The offset of its byte of priority.
    pub fn priority(self) -> u64 {
        BYTES.start + u64::from(self.0)
    }

    /// The offset of GICD_IROUTER.
    pub fn route(self) -> u64 {
        ROUTES + 8 * u64::from(self.0)
    }

    /// The page of the distributor with its route, which the first guest reaches through the monitor only.
    pub fn route_page(self) -> Range<u64> {
        let start = self.route() & !(PAGE - 1);
        start..start + PAGE
    }

    /// What the first guest reads where the machine has `value`, from `bytes` bytes at `offset`.
    pub fn read(self, offset: u64, bytes: u8, value: u64) -> u64 {
        value & !self.bits(offset, bytes)
    }

    /// What the machine gets for the first guest's write of `value`; `None`: nothing. `machine` reads what is at the same
    /// place.
    pub fn write(
        self,
        offset: u64,
        bytes: u8,
        value: u64,
        machine: impl FnOnce() -> u64,
    ) -> Option<u64> {
        if MESSAGES.contains(&offset) {
            return (value & MESSAGE_INTID != self.0.into()).then_some(value);
        }
        match self.bits(offset, bytes) {
            0 => Some(value),
            bits if SET_AND_CLEAR.contains(&offset) => Some(value & !bits),
            bits => Some(value & !bits | machine() & bits),
        }
    }

    /// The bits of the interrupt in what is at `offset`.
    fn bits(self, offset: u64, bytes: u8) -> u64 {
        // The interrupt's first bit, in registers with `width` bits for each INTID from `first` on.
        let of = |first: u64, width: u64| {
            let interrupt = u64::from(self.0) * width;
            let begin = (offset - first) * 8;
            let all = begin..begin + 8 * u64::from(bytes);
            let mask = u64::MAX >> (64 - width);
            let bits = if all.contains(&interrupt) {
                mask << (interrupt - begin)
            } else if interrupt < begin && begin < interrupt + width {
                // The upper half of what is wider than the access.
                mask >> (begin - interrupt)
            } else {
                0
            };
            bits & u64::MAX >> (64 - 8 * u64::from(bytes).clamp(1, 8))
        };
        match offset {
            _ if GROUPS.contains(&offset) => of(GROUPS.start, 1),
            _ if SET_AND_CLEAR.contains(&offset) => of(offset & !0x7f, 1),
            _ if BYTES.contains(&offset) => of(offset & !0x3ff, 8),
            _ if CONFIGURATION.contains(&offset) => of(CONFIGURATION.start, 2),
            _ if MODIFIERS.contains(&offset) => of(MODIFIERS.start, 1),
            _ if NON_SECURE_ACCESS.contains(&offset) => of(NON_SECURE_ACCESS.start, 2),
            _ if offset >= ROUTES => of(ROUTES, 64),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each register with something of interrupt 40: offset, bytes, the interrupt's bits.
    const OF_40: &[(u64, u8, u64)] = &[
        (0x084, 4, 1 << 8),
        (0x104, 4, 1 << 8),
        (0x184, 4, 1 << 8),
        (0x204, 4, 1 << 8),
        (0x284, 4, 1 << 8),
        (0x304, 4, 1 << 8),
        (0x384, 4, 1 << 8),
        (0x428, 4, 0xff),
        (0x428, 1, 0xff),
        (0x828, 4, 0xff),
        (0xc08, 4, 3 << 16),
        (0xd04, 4, 1 << 8),
        (0xe08, 4, 3 << 16),
        (0x6140, 8, u64::MAX),
        (0x6140, 4, 0xffff_ffff),
        (0x6144, 4, 0xffff_ffff),
    ];

    #[test]
    fn nothing_of_the_interrupt_is_reached_and_all_else_is() {
        let spi = KeptSpi::new(40).unwrap();
        assert_eq!(spi.route_page(), 0x6000..0x7000);
        assert_eq!(spi.bit(0x380), (0x384, 1 << 8));
        let machine = 0x1234_5678_9abc_def0;
        for offset in (0..0x1000).chain(0x6000..0x8000) {
            for bytes in [1, 4, 8] {
                let bits = OF_40
                    .iter()
                    .find(|(at, wide, _)| (*at, *wide) == (offset, bytes))
                    .map_or(0, |(_, _, bits)| *bits);
                // Other alignments and widths do not come here.
                let defined = match bytes {
                    8 => offset >= ROUTES && offset % 8 == 0,
                    4 => offset % 4 == 0,
                    _ => (0x400..0x800).contains(&offset),
                };
                if !defined || MESSAGES.contains(&offset) {
                    continue;
                }
                let place = format!("{bytes} bytes at {offset:#x}");
                assert_eq!(spi.read(offset, bytes, !0), !bits, "{place}");
                let written = spi.write(offset, bytes, !machine, || machine).unwrap();
                let kept = match SET_AND_CLEAR.contains(&offset) {
                    true => 0,
                    false => machine & bits,
                };
                assert_eq!(written, !machine & !bits | kept, "{place}");
            }
        }
    }

    #[test]
    fn no_message_raises_it() {
        let spi = KeptSpi::new(40).unwrap();
        for offset in MESSAGES {
            assert_eq!(spi.write(offset, 4, 40, || 0), None);
            assert_eq!(spi.write(offset, 4, 0xfc00 | 40, || 0), None);
            assert_eq!(spi.write(offset, 4, 41, || 0), Some(41));
        }
    }

    #[test]
    fn only_shared_interrupts() {
        for intid in [0, 31, 288, 1019, 1020, 1023, 4096, u32::MAX] {
            assert_eq!(KeptSpi::new(intid), None);
        }
        assert_eq!(KeptSpi::new(287).unwrap().route_page(), 0x6000..0x7000);
    }
}
