//! The interrupt controller of the second guest: a GICv3 in memory, with one CPU.
//!
//! The machine's distributor and redistributors are the first guest's. The second guest's frames have no device behind
//! them: every access to them is served here (`frames`), and what is to be delivered goes into list
//! registers each time the guest is entered and comes back at each exit (Arm IHI 0069, "The List registers"). So
//! between an exit and the next entry all of the state is in this value.
//!
//! An interrupt of a private device of the CPU (timer, PMU) is the physical interrupt of the same INTID while the
//! second guest is in the CPU. It is left active until the guest ends its own, by the hardware bit of the list register.

use crate::regs::list_register as lr;
use crate::world::redistributor::FRAME;
use crate::world::vgic::{ListRegisters, MOST};

/// Bytes of the guest's distributor.
pub const DISTRIBUTOR: u64 = FRAME;
/// Bytes of its one redistributor.
pub const REDISTRIBUTOR: u64 = 2 * FRAME;

/// INTIDs that exist: SGIs, PPIs and 256 SPIs, which nothing but the guest's own writes raises.
pub const INTIDS: usize = 288;
const WORDS: usize = INTIDS / 32;

/// One bit for each INTID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bits([u32; WORDS]);

impl Bits {
    pub(super) fn word(&self, n: usize) -> u32 {
        // Offsets come from the guest: beyond the last word nothing exists.
        self.0.get(n).copied().unwrap_or(0)
    }

    pub(super) fn set_word(&mut self, n: usize, value: u32) {
        if let Some(word) = self.0.get_mut(n) {
            *word = value;
        }
    }

    fn contains(&self, intid: usize) -> bool {
        self.word(intid / 32) >> (intid % 32) & 1 != 0
    }

    fn put(&mut self, intid: usize, set: bool) {
        let bit = 1 << (intid % 32);
        let word = self.word(intid / 32);
        self.set_word(intid / 32, if set { word | bit } else { word & !bit });
    }
}

/// What has no list register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Something pending: an exit is wanted when the list registers run low (`ICH_HCR_EL2.UIE`).
    pub pending: bool,
    /// Something active: an exit is wanted when the guest ends it (`ICH_HCR_EL2.LRENPIE`).
    pub active: bool,
}

/// The controller's state.
#[derive(Clone, Debug)]
pub struct VirtualGic {
    /// The CPU's affinity, as MPIDR_EL1 has it.
    pub affinity: u64,
    /// `GICD_CTLR.{EnableGrp1, EnableGrp0}`.
    pub(super) groups_enabled: u32,
    pub(super) asleep: bool,
    pub(super) enabled: Bits,
    /// Pending until it is taken.
    pub(super) pending: Bits,
    pub(super) active: Bits,
    /// Group 1 rather than group 0.
    pub(super) group1: Bits,
    pub(super) edge: Bits,
    pub(super) priorities: [u8; INTIDS],
    /// Lines that the monitor computes; pending while high.
    lines: Bits,
    /// The physical interrupt of the same INTID is active, on this one's behalf.
    pub(super) held: Bits,
    /// Physical interrupts that nobody holds any more, to be made inactive.
    released: Bits,
    /// What [`Self::enter`] wrote, and how many.
    loaded: [u64; MOST],
    count: usize,
}

impl VirtualGic {
    /// A controller out of reset, for the CPU with this affinity.
    pub const fn new(affinity: u64) -> Self {
        let none = Bits([0; WORDS]);
        Self {
            affinity,
            groups_enabled: 0,
            asleep: true,
            enabled: none,
            pending: none,
            active: none,
            group1: none,
            edge: none,
            priorities: [0; INTIDS],
            lines: none,
            held: none,
            released: none,
            loaded: [0; MOST],
            count: 0,
        }
    }

    /// The physical interrupt `intid` has been acknowledged for this guest, and stays active.
    pub fn hold(&mut self, intid: u32) {
        self.pending.put(intid as usize, true);
        self.held.put(intid as usize, true);
    }

    /// Sets the level of a line that the monitor computes.
    pub fn set_line(&mut self, intid: u32, high: bool) {
        self.lines.put(intid as usize, high);
    }

    /// The private interrupts whose physical ones are active, bit n = INTID n.
    pub fn held(&self) -> u32 {
        self.held.word(0)
    }

    /// Returns, once, the physical interrupts that are to be made inactive, bit n = INTID 32 * `word` + n.
    pub fn take_released(&mut self, word: usize) -> u32 {
        let released = self.released.word(word);
        self.released.set_word(word, 0);
        released
    }

    /// Whether an interrupt waits for the guest, whatever its priority: WFI ends.
    pub fn has_pending(&self) -> bool {
        (0..INTIDS).any(|n| self.is_deliverable(n))
    }

    /// Performs a write of ICC_SGI1R_EL1 (op2 = 5), ICC_ASGI1R_EL1 (6) or ICC_SGI0R_EL1 (7).
    pub fn send_sgi(&mut self, op2: u8, value: u64) {
        const ALL_OTHERS: u64 = 1 << 40;
        let field = |shift: u32| value >> shift & 0xff;
        let cluster = field(48) << 32 | field(32) << 16 | field(16) << 8;
        // RS chooses 16 CPUs of the cluster, and the target list is a bit for each of them.
        let within = (self.affinity & 0xff).wrapping_sub((value >> 44 & 0xf) * 16);
        let is_target = cluster == self.affinity & !0xff && within < 16 && value >> within & 1 != 0;
        let intid = (value >> 24 & 0xf) as usize;
        let same_group = self.group1.contains(intid) == (op2 != 7);
        // "All but self" is nobody: the guest has one CPU. An SGI of the wrong group is not forwarded.
        if value & ALL_OTHERS == 0 && is_target && same_group {
            self.pending.put(intid, true);
        }
    }

    /// Fills the list registers, and returns what is left out.
    pub fn enter(&mut self, cpu: &mut impl ListRegisters) -> Left {
        let room = cpu.count().min(MOST);
        let mut chosen = Bits::default();
        self.count = 0;
        while let Some(intid) = self.most_urgent(&chosen) {
            if self.count == room {
                // What is pending comes first, so if this one is active there is nothing else.
                return Left {
                    pending: self.is_deliverable(intid),
                    active: self.has_active(&chosen),
                };
            }
            // As urgent ones first, so that what has no room waits for the maintenance interrupt.
            chosen.put(intid, true);
            let value = self.encode(intid);
            cpu.write(self.count, value);
            self.loaded[self.count] = value;
            self.count += 1;
        }
        Left::default()
    }

    /// Takes back what [`Self::enter`] wrote. `ended` is `ICH_HCR_EL2.EOIcount`: so many interrupts were ended that no
    /// list register had.
    pub fn exit(&mut self, ended: u32, cpu: &mut impl ListRegisters) {
        let mut loaded = Bits::default();
        for n in 0..self.count {
            let (before, now) = (self.loaded[n], cpu.read(n));
            // The first guest's interrupts come into the same list registers.
            cpu.write(n, 0);
            let intid = (before & lr::VINTID) as usize;
            loaded.put(intid, true);
            self.active.put(intid, now & lr::ACTIVE != 0);
            // Taken. What has become pending since, by the guest's own write, was put down there already.
            if before & lr::PENDING != 0 && now & lr::PENDING == 0 {
                self.pending.put(intid, false);
            }
            // The guest has ended it, and the hardware bit made the physical one inactive with it.
            if before & lr::HW != 0 && now & (lr::PENDING | lr::ACTIVE) == 0 {
                self.held.put(intid, false);
            }
        }
        self.count = 0;
        for _ in 0..ended {
            let others = (0..INTIDS).filter(|&n| self.active.contains(n) && !loaded.contains(n));
            // EOIcount says how many and not which: a guest ends the most urgent first, because it has preempted the others.
            let Some(intid) = others.min_by_key(|&n| self.priorities[n]) else {
                break;
            };
            self.active.put(intid, false);
            self.release_unused(intid / 32);
        }
    }

    /// Makes physical interrupts inactive that are held for nothing: neither pending nor active.
    pub(super) fn release_unused(&mut self, word: usize) {
        let used = self.pending.word(word) | self.active.word(word);
        let unused = self.held.word(word) & !used;
        self.held.set_word(word, self.held.word(word) & used);
        self.released
            .set_word(word, self.released.word(word) | unused);
    }

    /// Forgets the interrupts of physical lines that the guest enables only now: what came while they were disabled may be
    /// over. Where a line is high still, its interrupt comes again at once.
    pub(super) fn ask_lines_again(&mut self, word: usize, enabled: u32) {
        let late = enabled & !self.enabled.word(word) & self.held.word(word);
        self.pending.set_word(word, self.pending.word(word) & !late);
    }

    pub(super) fn pending_word(&self, n: usize) -> u32 {
        self.pending.word(n) | self.lines.word(n)
    }

    fn is_deliverable(&self, intid: usize) -> bool {
        let group = 1 << u32::from(self.group1.contains(intid));
        let is_pending = self.pending.contains(intid) || self.lines.contains(intid);
        is_pending && self.enabled.contains(intid) && self.groups_enabled & group != 0
    }

    fn has_active(&self, chosen: &Bits) -> bool {
        (0..WORDS).any(|n| self.active.word(n) & !chosen.word(n) != 0)
    }

    /// The next to be put into a list register: what is pending first, because what is active can be ended without one.
    fn most_urgent(&self, chosen: &Bits) -> Option<usize> {
        let mut best = None;
        for word in 0..WORDS {
            let enabled = self.pending_word(word) & self.enabled.word(word);
            let mut bits = (enabled | self.active.word(word)) & !chosen.word(word);
            while bits != 0 {
                let intid = word * 32 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                let pending = self.is_deliverable(intid);
                // Among equals the lowest INTID, which the architecture leaves open.
                let key = (!pending, self.priorities[intid], intid);
                if (pending || self.active.contains(intid)) && best.is_none_or(|best| key < best) {
                    best = Some(key);
                }
            }
        }
        best.map(|(_, _, intid)| intid)
    }

    fn encode(&self, intid: usize) -> u64 {
        let held = self.held.contains(intid);
        let active = self.active.contains(intid);
        // Pending and active at once is forbidden with the hardware bit, and cannot be: what is active cannot fire.
        let pending = self.is_deliverable(intid) && !(held && active);
        let mut value = intid as u64 | u64::from(self.priorities[intid]) << lr::PRIORITY_SHIFT;
        if self.group1.contains(intid) {
            value |= lr::GROUP1;
        }
        if active {
            value |= lr::ACTIVE;
        }
        if pending {
            value |= lr::PENDING;
        }
        if held {
            value |= lr::HW | (intid as u64 & lr::PINTID) << lr::PINTID_SHIFT;
        } else if self.lines.contains(intid) {
            // The line may still be high when the guest has ended it.
            value |= lr::EOI;
        }
        value
    }
}

#[cfg(test)]
mod tests;
