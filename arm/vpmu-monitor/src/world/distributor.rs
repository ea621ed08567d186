//! The GIC's distributor as the guest reaches it. It is the guest's: what the guest breaks there is its own
//! interrupts. But some of what the distributor offers the monitor does not pass on, so the pages with
//! those registers are served here: LPIs (see [`super::redistributor`]) and non-maskable interrupts,
//! which are acknowledged through a register of their own.
//!
//! Arm IHI 0069, "The GIC Distributor register map".

use core::ops::Range;

use super::redistributor;

const CTLR: u64 = 0x0000;
const TYPER: u64 = 0x0004;
/// Virtual LPIs of GICv4.1.
const TYPER2: u64 = 0x000c;

/// GICD_ISPENDR0E, GICD_IPRIORITYR0E: extended SPIs.
pub(super) const ISPENDR0E: u64 = 0x1600;
pub(super) const IPRIORITYR0E: u64 = 0x2000;

/// GICD_CTLR.ARE (ARE_NS): without it the redistributors' registers would be banked here.
const CTLR_ARE: u64 = 1 << 4;
/// GICD_TYPER: num_LPIs, DVIS, LPIS, NMI.
const TYPER_HIDDEN: u64 = 0x1f << 11 | 1 << 18 | 1 << 17 | 1 << 9;

/// The pages, by offset, that have INMIR registers: all others go through untouched.
pub const PAGES: [Range<u64>; 2] = [0x0000..0x1000, 0x3000..0x4000];
const INMIR: Range<u64> = 0x0f80..0x1000;
const INMIR_EXTENDED: Range<u64> = 0x3b00..0x3c00;

/// GICD_IROUTER, of 64 bits. Its pages go through untouched where no guest has an interrupt there that another has not.
const ROUTES: Range<u64> = 0x6000..0x8000;

/// GICD_IPRIORITYR and GICD_IPRIORITYRnE: a byte for each interrupt.
const PRIORITIES: [Range<u64>; 2] = [0x0400..0x0800, IPRIORITYR0E..0x2400];

/// The page of the extended SPIs' priorities, which go through [`less_urgent`] where two guests share a CPU.
pub const EXTENDED_PRIORITIES_PAGE: Range<u64> = 0x2000..0x3000;

/// What the machine gets for `value`, where no interrupt of the guest's may be as urgent as the monitor's own: a priority
/// below `least` is that one.
pub fn less_urgent(offset: u64, bytes: u8, value: u64, least: u8) -> u64 {
    if !PRIORITIES.iter().any(|range| range.contains(&offset)) {
        return value;
    }
    let mut priorities = value.to_le_bytes();
    for priority in priorities.iter_mut().take(bytes.into()) {
        *priority = least.max(*priority);
    }
    u64::from_le_bytes(priorities)
}

/// Whether the distributor has an access of `bytes` bytes at `offset`.
fn is_defined(offset: u64, bytes: u8) -> bool {
    let is_route = bytes == 8 && ROUTES.contains(&offset) && offset.is_multiple_of(8);
    is_route || redistributor::is_defined(offset, bytes)
}

/// What the guest reads from `bytes` bytes at `offset`; `machine` reads the same there.
pub fn read(offset: u64, bytes: u8, machine: impl FnOnce() -> u64) -> u64 {
    match offset {
        _ if !is_defined(offset, bytes) => 0,
        TYPER => machine() & !TYPER_HIDDEN,
        TYPER2 => 0,
        _ if is_hidden(offset) => 0,
        _ => machine(),
    }
}

/// GICD_CTLR.EnableGrp1: without it no interrupt of the monitor's arrives, those that end a guest's turn included.
pub const CTLR_GROUP1: u64 = 1 << 1;

/// What the machine gets for the guest's write of `value`; `None`: nothing. The bits `kept` of GICD_CTLR stay set.
pub fn write(offset: u64, bytes: u8, value: u64, kept: u64) -> Option<u64> {
    match offset {
        _ if !is_defined(offset, bytes) || is_hidden(offset) => None,
        CTLR => Some(value | CTLR_ARE | kept),
        _ => Some(value),
    }
}

fn is_hidden(offset: u64) -> bool {
    INMIR.contains(&offset) || INMIR_EXTENDED.contains(&offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_lpis_nor_non_maskable_interrupts_are_offered() {
        assert_eq!(read(TYPER, 4, || 0xffff_ffff), 0xfff9_05ff);
        assert_eq!(read(TYPER2, 4, || 0xffff_ffff), 0);
        for offset in [0xf84, 0xffc, 0x3b00] {
            assert_eq!(write(offset, 4, !0, 0), None);
            assert_eq!(read(offset, 4, || !0), 0);
        }
    }

    #[test]
    fn no_interrupt_becomes_as_urgent_as_the_monitors() {
        assert_eq!(less_urgent(0x420, 4, 0x00a0_0700, 8), 0x08a0_0808);
        assert_eq!(less_urgent(0x7ff, 1, 0, 16), 16);
        assert_eq!(less_urgent(0x2004, 4, 0, 8), 0x0808_0808);
        assert_eq!(less_urgent(0x100, 4, 0, 8), 0, "no priority");
    }

    #[test]
    fn affinity_routing_stays_on() {
        assert_eq!(write(CTLR, 4, 0, 0), Some(0x10));
        assert_eq!(write(CTLR, 4, 0, CTLR_GROUP1), Some(0x12));
    }

    #[test]
    fn the_rest_is_the_machines_in_the_widths_it_has() {
        for offset in [0x104, 0x40, 0x7fc, 0xc08, 0x3000] {
            assert_eq!(
                write(offset, 4, 0x1234_5678, CTLR_GROUP1),
                Some(0x1234_5678)
            );
            assert_eq!(read(offset, 4, || 0x1234_5678), 0x1234_5678);
        }
        assert_eq!(write(0x421, 1, 0xa0, 0), Some(0xa0));
        assert_eq!(write(0x6140, 8, 0x1_0000_0002, 0), Some(0x1_0000_0002));
        for (offset, bytes) in [
            (0x6144, 8),
            (0x6140, 2),
            (0xf7e, 4),
            (0xf7c, 8),
            (0xf84, 1),
            (0x3afe, 4),
            (0x3af8, 8),
        ] {
            assert_eq!(write(offset, bytes, !0, 0), None);
        }
    }
}
