//! The private interrupts of the shared CPU that belong to whichever guest is in it: the timers', and the PMU's where it
//! is not the monitor's.
//!
//! The first guest has the physical redistributor while it runs. For the second guest these interrupts are always
//! enabled, as urgent as the monitor's own, and what that guest makes of them is in its own interrupt controller. So is
//! the interrupt of its serial port, at any time.

use vpmu_monitor::world::{
    redistributor::{
        CTLR, CTLR_RWP, FRAME, ICACTIVER0, ICENABLER0, ICFGR1, ICPENDR0, IGROUPR0, IPRIORITYR0,
        ISACTIVER0, ISENABLER0, ISPENDR0, two_bits_each,
    },
    second::spi::KeptSpi,
};

use super::super::{
    gic::OWN_PRIORITY,
    mmio::{read_device, write_device},
};

/// GICD_CTLR.RWP.
const GICD_CTLR_PENDING: u64 = 1 << 31;

/// Has `spi` of the distributor at `distributor` sent to the CPU with this affinity, as urgent as the monitor's own.
pub(super) fn own_shared(distributor: u64, spi: KeptSpi, affinity: u64) {
    let write = |(register, bit): (u64, u64)| write_device(distributor + register, 4, bit);
    write(spi.bit(ICENABLER0));
    // Until it is disabled for certain: its group must not change while it can be delivered (Arm IHI 0069, "GICD_CTLR", RWP).
    while read_device(distributor, 4) & GICD_CTLR_PENDING != 0 {}
    let (group, bit) = spi.bit(IGROUPR0);
    write((group, read_device(distributor + group, 4) | bit));
    write_device(distributor + spi.priority(), 1, OWN_PRIORITY.into());
    write_device(distributor + spi.route(), 8, affinity);
    write(spi.bit(ICPENDR0));
    write(spi.bit(ICACTIVER0));
    write(spi.bit(ISENABLER0));
}

/// What is pending, active and enabled, in the order in which it is put back: no interrupt is to be delivered half restored.
const STATE: [u64; 3] = [ISPENDR0, ISACTIVER0, ISENABLER0];

/// The state of the shared CPU's private interrupts, as a guest has left it.
#[derive(Clone, Debug, Default)]
pub(super) struct Private {
    /// By [`STATE`].
    state: [u32; 3],
    group1: u32,
    configuration: u32,
    priorities: [u8; 32],
}

/// The interrupts, in the redistributor whose SGI frame is at `frame`.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrivateInterrupts {
    pub(super) frame: u64,
    /// Bit n = INTID n.
    pub(super) intids: u32,
}

impl PrivateInterrupts {
    fn each(self) -> impl Iterator<Item = u32> {
        (0..32).filter(move |n| self.intids >> n & 1 != 0)
    }

    fn read(self, register: u64) -> u32 {
        read_device(self.frame + register, 4) as u32
    }

    fn write(self, register: u64, value: u32) {
        write_device(self.frame + register, 4, value.into());
    }

    /// Writes the bits of these interrupts in a register that has others', too.
    fn replace(self, register: u64, mask: u32, value: u32) {
        self.write(register, self.read(register) & !mask | value & mask);
    }

    /// Takes the first guest's state, and leaves nothing of it. Its lines are low: timers and PMU have been put away.
    pub(super) fn save(self) -> Private {
        let mut saved = Private {
            state: STATE.map(|register| self.read(register) & self.intids),
            group1: self.read(IGROUPR0) & self.intids,
            configuration: self.read(ICFGR1),
            priorities: [0; 32],
        };
        for n in self.each() {
            saved.priorities[n as usize] =
                read_device(self.frame + IPRIORITYR0 + u64::from(n), 1) as u8;
        }
        self.clear();
        saved
    }

    /// Leaves nothing of the guest that was in the CPU.
    pub(super) fn clear(self) {
        self.write(ICENABLER0, self.intids);
        self.write(ICPENDR0, self.intids);
        self.write(ICACTIVER0, self.intids);
        while read_device(self.frame - FRAME + CTLR, 4) & CTLR_RWP != 0 {}
    }

    /// Puts a guest's state back.
    pub(super) fn load(self, saved: &Private) {
        self.replace(IGROUPR0, self.intids, saved.group1);
        // ICFGR0 is the SGIs', which are edges for ever.
        let mask = two_bits_each((self.intids >> 16) as u16);
        self.replace(ICFGR1, mask, saved.configuration);
        for n in self.each() {
            let register = self.frame + IPRIORITYR0 + u64::from(n);
            write_device(register, 1, saved.priorities[n as usize].into());
        }
        for (register, state) in STATE.into_iter().zip(saved.state) {
            self.write(register, state);
        }
    }

    /// Makes the interrupts the second guest's; those of `held` are active.
    pub(super) fn load_second(self, held: u32) {
        self.load(&Private {
            state: [0, held & self.intids, self.intids],
            // Group 1, as the monitor's: they arrive as IRQs whatever the guest makes of them.
            group1: self.intids,
            // Levels, as timers and PMUs are.
            configuration: 0,
            priorities: [OWN_PRIORITY; 32],
        });
    }

    /// Ends those of `intids` that are active.
    pub(super) fn deactivate(self, intids: u32) {
        self.write(ICACTIVER0, intids & self.intids);
    }
}
