//! The one part of the GIC that the guest does not reach directly: the redistributors' SGI frames.
//!
//! There the enable bits of the PPIs live, and some PPIs belong to the monitor: its maintenance
//! interrupt always, the PMU's when the PMU is emulated. Linux disables every PPI when it starts, so
//! without this filter the monitor would go deaf. The guest keeps its own view of the bits, which is
//! also what decides whether the emulated PMU's interrupt may be offered. Everything else in the
//! frame goes through to the machine (Arm IHI 0069, "The GIC Redistributor register map").

use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Groups, bit n = INTID n.
pub const IGROUPR0: u64 = 0x080;
/// Enables, bit n = INTID n.
pub const ISENABLER0: u64 = 0x100;
/// Priorities, byte n = INTID n.
pub const IPRIORITYR0: u64 = 0x400;
const ICENABLER0: u64 = 0x180;
/// Makes pending, bit n = INTID n.
pub const ISPENDR0: u64 = 0x200;
const ICPENDR0: u64 = 0x280;
const ISACTIVER0: u64 = 0x300;
const ICACTIVER0: u64 = 0x380;

/// Bytes of one CPU's redistributor: the control frame and the SGI frame, 64 KiB each.
pub const STRIDE: u64 = 0x2_0000;
/// Where the SGI frame begins in it.
pub const SGI_FRAME: u64 = 0x1_0000;

/// The guest's view of one CPU's SGI frame.
#[derive(Debug, Default)]
pub struct SgiFrame {
    /// Bit n = INTID n is the monitor's.
    owned: u32,
    /// The guest's enable bits of those.
    enabled: AtomicU32,
}

impl SgiFrame {
    /// A frame in which the INTIDs of `owned` (bit n = INTID n, below 32) are the monitor's.
    pub const fn new(owned: u32) -> Self {
        Self {
            owned,
            enabled: AtomicU32::new(0),
        }
    }

    /// The monitor's INTIDs, bit n = INTID n.
    pub const fn owned(&self) -> u32 {
        self.owned
    }

    /// Whether the guest has enabled the owned interrupt `intid`.
    pub fn enabled(&self, intid: u32) -> bool {
        self.enabled.load(Relaxed) >> intid & 1 != 0
    }

    /// What the guest reads at `offset`, where the machine has `physical`.
    pub fn read(&self, offset: u64, physical: u64) -> u64 {
        let owned = u64::from(self.owned);
        match offset {
            ISENABLER0 | ICENABLER0 => {
                physical & !owned | u64::from(self.enabled.load(Relaxed)) & owned
            }
            ISPENDR0 | ICPENDR0 | ISACTIVER0 | ICACTIVER0 => physical & !owned,
            _ => physical,
        }
    }

    /// What the machine gets for the guest's write of `value` at `offset`.
    pub fn write(&self, offset: u64, value: u64) -> u64 {
        let owned = self.owned;
        match offset {
            ISENABLER0 => {
                self.enabled.fetch_or(value as u32 & owned, Relaxed);
            }
            ICENABLER0 => {
                self.enabled.fetch_and(!(value as u32 & owned), Relaxed);
            }
            // The monitor takes its interrupts in group 1.
            IGROUPR0 => return value | u64::from(owned),
            ISPENDR0 | ICPENDR0 | ISACTIVER0 | ICACTIVER0 => {}
            _ => return value,
        }
        value & !u64::from(owned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAINTENANCE: u32 = 25;

    #[test]
    fn the_guest_cannot_switch_the_monitors_interrupts_off() {
        let frame = SgiFrame::new(1 << MAINTENANCE);
        assert_eq!(
            frame.write(ICENABLER0, 0xffff_ffff),
            !(1 << 25) & 0xffff_ffff
        );
        assert_eq!(
            frame.write(ICACTIVER0, 0xffff_ffff),
            !(1 << 25) & 0xffff_ffff
        );
        assert_eq!(frame.write(ISPENDR0, 1 << 25), 0);
        assert_eq!(frame.write(IGROUPR0, 0), 1 << 25);
    }

    #[test]
    fn the_guest_sees_its_own_enable_bits() {
        let frame = SgiFrame::new(1 << MAINTENANCE);
        assert!(!frame.enabled(MAINTENANCE));
        assert_eq!(frame.read(ISENABLER0, 1 << 25 | 1), 1);
        assert_eq!(frame.write(ISENABLER0, 1 << 25 | 2), 2);
        assert!(frame.enabled(MAINTENANCE));
        assert_eq!(frame.read(ISENABLER0, 3), 1 << 25 | 3);
        frame.write(ICENABLER0, 1 << 25);
        assert!(!frame.enabled(MAINTENANCE));
    }

    #[test]
    fn the_rest_of_the_frame_is_the_machines() {
        let frame = SgiFrame::new(1 << MAINTENANCE);
        for offset in [0x400, 0x418, 0xc00, 0xffe8, 0xffff_ffff] {
            assert_eq!(frame.write(offset, 0xdead_beef), 0xdead_beef);
            assert_eq!(frame.read(offset, 0xdead_beef), 0xdead_beef);
        }
    }
}
