//! Interrupts for the guest, through the list registers of GICv3's virtual CPU interface.
//!
//! Every physical interrupt is taken at EL2, its priority dropped, and offered to the guest in a list
//! register. With the *hardware bit* set, the guest's own end-of-interrupt also deactivates the physical
//! interrupt, so a device interrupt costs one exit and not two (Arm IHI 0069, "Virtual LPIs, SGIs,
//! PPIs and SPIs"). SGIs, LPIs and the emulated PMU's line have no physical twin to deactivate and
//! go in without it.
//!
//! A processor has few list registers (QEMU: four). What finds none waits in a queue; the *underflow*
//! maintenance interrupt says when they run empty.

/// The list registers of this CPU and the control of their maintenance interrupt.
pub trait ListRegisters {
    /// How many there are, 1 to 16.
    fn count(&self) -> usize;
    /// `ICH_LR<n>_EL2`.
    fn read(&self, n: usize) -> u64;
    /// `ICH_LR<n>_EL2`.
    fn write(&mut self, n: usize, value: u64);
    /// `ICH_ELRSR_EL2`: bit n = list register n is free.
    fn empty(&self) -> u32;
    /// `ICH_EISR_EL2`: bit n = the guest has ended list register n, which asked for a notice. Such a
    /// register is not [empty](Self::empty), and its notice is raised, until it is cleared.
    fn ended(&self) -> u32;
    /// `ICH_HCR_EL2.UIE`.
    fn want_underflow(&mut self, enable: bool);
}

/// What drives an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A physical interrupt of the same INTID, which the guest deactivates.
    Hardware,
    /// The monitor, once: an SGI or an LPI.
    Software,
    /// The monitor, for as long as a virtual line is high: its end must be noticed.
    Line,
}

/// One interrupt on its way to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupt {
    /// INTID, the same for guest and machine.
    pub intid: u32,
    /// Priority, 0 is the most urgent.
    pub priority: u8,
    /// Group 1 (IRQ) rather than group 0 (FIQ).
    pub group1: bool,
    /// Who deactivates it.
    pub source: Source,
}

const STATE_PENDING: u64 = 1 << 62;
const STATE_ACTIVE: u64 = 1 << 63;
const HARDWARE: u64 = 1 << 61;
const GROUP1: u64 = 1 << 60;
/// With `HARDWARE` clear, bit 41: raise a maintenance interrupt when the guest ends this one.
const END_NOTICE: u64 = 1 << 41;

impl Interrupt {
    fn encode(self) -> u64 {
        let physical = match self.source {
            Source::Hardware => HARDWARE | u64::from(self.intid & 0x3ff) << 32,
            Source::Software => 0,
            Source::Line => END_NOTICE,
        };
        let group = if self.group1 { GROUP1 } else { 0 };
        STATE_PENDING | physical | group | u64::from(self.priority) << 48 | u64::from(self.intid)
    }

    fn decode(register: u64) -> Self {
        Self {
            intid: register as u32,
            priority: (register >> 48) as u8,
            group1: register & GROUP1 != 0,
            source: if register & HARDWARE != 0 {
                Source::Hardware
            } else if register & END_NOTICE != 0 {
                Source::Line
            } else {
                Source::Software
            },
        }
    }
}

/// How many interrupts can wait beside the list registers. When as many wait, the caller leaves
/// further ones pending in the physical GIC, where nothing is lost.
pub const QUEUE: usize = 64;

/// The guest-bound interrupts of one CPU.
#[derive(Debug)]
pub struct VirtualInterface {
    queue: [Option<Interrupt>; QUEUE],
    queued: usize,
}

impl Default for VirtualInterface {
    fn default() -> Self {
        Self::new()
    }
}

impl VirtualInterface {
    /// No interrupt on its way.
    pub const fn new() -> Self {
        Self {
            queue: [None; QUEUE],
            queued: 0,
        }
    }

    /// No more interrupts can be taken; acknowledge none until [`Self::refill`] made room.
    pub fn is_full(&self) -> bool {
        self.queued == QUEUE
    }

    /// Offers `interrupt` to the guest.
    ///
    /// One that is already pending is not doubled; one that the guest is handling becomes pending again.
    pub fn inject(&mut self, interrupt: Interrupt, registers: &mut impl ListRegisters) {
        if let Some((n, value)) = find(interrupt.intid, registers) {
            // The architecture forbids "pending and active" with the hardware bit; a physical
            // interrupt fires again only once it is inactive, so the old entry is stale there.
            let value = match interrupt.source {
                Source::Hardware => interrupt.encode(),
                Source::Software | Source::Line => value | STATE_PENDING,
            };
            registers.write(n, value);
            return;
        }
        if self.waits(interrupt.intid) {
            return;
        }
        let empty = registers.empty();
        if empty != 0 {
            registers.write(empty.trailing_zeros() as usize, interrupt.encode());
            return;
        }
        let waiting = match least_urgent(registers) {
            Some((n, least)) if least.priority > interrupt.priority => {
                registers.write(n, interrupt.encode());
                least
            }
            _ => interrupt,
        };
        self.enqueue(waiting);
        registers.want_underflow(true);
    }

    /// Serves the maintenance interrupt: takes note of ended interrupts and moves waiting ones, most
    /// urgent first, into free list registers.
    pub fn refill(&mut self, registers: &mut impl ListRegisters) {
        let mut ended = registers.ended();
        while ended != 0 {
            registers.write(ended.trailing_zeros() as usize, 0);
            ended &= ended - 1;
        }
        let mut empty = registers.empty();
        while self.queued != 0 && empty != 0 {
            let Some(interrupt) = self.dequeue() else {
                break;
            };
            registers.write(empty.trailing_zeros() as usize, interrupt.encode());
            empty &= empty - 1;
        }
        registers.want_underflow(self.queued != 0);
    }

    /// Makes the guest's view of a level-triggered virtual line agree with `high`.
    ///
    /// A high line is offered once, and the guest's end of the interrupt raises a maintenance
    /// interrupt, so that the caller can look at the line and offer it again. A line that falls while
    /// the guest handles it, as it does in every driver, takes that wish back: no exit. A line that
    /// fell before the guest took the interrupt is withdrawn.
    ///
    /// Returns whether the interrupt was newly offered.
    pub fn set_line(
        &mut self,
        high: bool,
        line: Interrupt,
        registers: &mut impl ListRegisters,
    ) -> bool {
        match (find(line.intid, registers), high) {
            (None, true) => {
                let offered = !self.waits(line.intid);
                self.inject(line, registers);
                return offered;
            }
            (None, false) => self.withdraw(line.intid),
            (Some((n, value)), _) if value & STATE_ACTIVE != 0 => {
                let notice = if high { END_NOTICE } else { 0 };
                registers.write(n, value & !(END_NOTICE | STATE_PENDING) | notice);
            }
            (Some((n, _)), false) => registers.write(n, 0),
            (Some(_), true) => {}
        }
        false
    }

    fn waits(&self, intid: u32) -> bool {
        self.queued != 0 && self.queue.iter().flatten().any(|i| i.intid == intid)
    }

    fn enqueue(&mut self, interrupt: Interrupt) {
        if let Some(slot) = self.queue.iter_mut().find(|slot| slot.is_none()) {
            *slot = Some(interrupt);
            self.queued += 1;
        }
    }

    fn dequeue(&mut self) -> Option<Interrupt> {
        let next = self
            .queue
            .iter_mut()
            .filter(|slot| slot.is_some())
            .min_by_key(|slot| slot.map(|interrupt| interrupt.priority))?
            .take();
        self.queued -= 1;
        next
    }

    fn withdraw(&mut self, intid: u32) {
        if self.queued == 0 {
            return;
        }
        for slot in &mut self.queue {
            if slot.is_some_and(|interrupt| interrupt.intid == intid) {
                *slot = None;
                self.queued -= 1;
            }
        }
    }
}

/// The list register that holds `intid` pending or active, with its value.
fn find(intid: u32, registers: &impl ListRegisters) -> Option<(usize, u64)> {
    in_use(registers)
        .map(|n| (n, registers.read(n)))
        .find(|&(_, value)| value as u32 == intid && value & (STATE_PENDING | STATE_ACTIVE) != 0)
}

fn in_use<L: ListRegisters>(registers: &L) -> impl Iterator<Item = usize> + use<L> {
    let empty = registers.empty();
    (0..registers.count()).filter(move |n| empty >> n & 1 == 0)
}

/// The least urgent interrupt that the guest has not yet taken.
fn least_urgent(registers: &impl ListRegisters) -> Option<(usize, Interrupt)> {
    in_use(registers)
        .map(|n| (n, registers.read(n)))
        .filter(|&(_, value)| value & (STATE_ACTIVE | STATE_PENDING) == STATE_PENDING)
        .map(|(n, value)| (n, Interrupt::decode(value)))
        .max_by_key(|(_, interrupt)| interrupt.priority)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Fake {
        lr: [u64; 4],
        underflow: bool,
    }

    impl Fake {
        /// The guest takes the most urgent pending interrupt.
        fn acknowledge(&mut self) -> Option<u32> {
            let n = (0..4)
                .filter(|&n| self.lr[n] & STATE_PENDING != 0)
                .min_by_key(|&n| Interrupt::decode(self.lr[n]).priority)?;
            self.lr[n] = self.lr[n] & !STATE_PENDING | STATE_ACTIVE;
            Some(self.lr[n] as u32)
        }

        fn end(&mut self, intid: u32) -> bool {
            let n = (0..4)
                .find(|&n| self.lr[n] as u32 == intid && self.lr[n] & STATE_ACTIVE != 0)
                .unwrap();
            self.lr[n] &= !STATE_ACTIVE;
            let notice = self.lr[n] & HARDWARE == 0 && self.lr[n] & END_NOTICE != 0;
            if self.lr[n] & STATE_PENDING == 0 && !notice {
                self.lr[n] = 0;
            }
            notice
        }
    }

    impl ListRegisters for Fake {
        fn count(&self) -> usize {
            4
        }
        fn read(&self, n: usize) -> u64 {
            self.lr[n]
        }
        fn write(&mut self, n: usize, value: u64) {
            self.lr[n] = value;
        }
        fn empty(&self) -> u32 {
            (0..4).filter(|&n| self.lr[n] == 0).map(|n| 1 << n).sum()
        }
        fn ended(&self) -> u32 {
            let ended = |lr: u64| lr >> 62 == 0 && lr & END_NOTICE != 0;
            (0..4).filter(|&n| ended(self.lr[n])).map(|n| 1 << n).sum()
        }
        fn want_underflow(&mut self, enable: bool) {
            self.underflow = enable;
        }
    }

    fn sgi(intid: u32, priority: u8) -> Interrupt {
        Interrupt {
            intid,
            priority,
            group1: true,
            source: Source::Software,
        }
    }

    fn device(intid: u32) -> Interrupt {
        Interrupt {
            source: Source::Hardware,
            ..sgi(intid, 0xa0)
        }
    }

    #[test]
    fn a_device_interrupt_carries_the_hardware_bit() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        vgic.inject(device(33), &mut fake);
        assert_eq!(fake.lr[0] & HARDWARE, HARDWARE);
        assert_eq!(fake.lr[0] >> 32 & 0x3ff, 33);
        assert_eq!(fake.acknowledge(), Some(33));
        assert!(!fake.end(33));
    }

    #[test]
    fn more_interrupts_than_list_registers_all_arrive_once_and_in_order() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        for intid in 0..16 {
            vgic.inject(sgi(intid, 0xf0 - intid as u8 * 8), &mut fake);
            vgic.inject(sgi(intid, 0xf0 - intid as u8 * 8), &mut fake);
        }
        assert!(fake.underflow);
        for expected in (0..16).rev() {
            assert_eq!(fake.acknowledge(), Some(expected));
            fake.end(expected);
            vgic.refill(&mut fake);
        }
        assert_eq!(fake.acknowledge(), None);
        assert!(!fake.underflow);
    }

    #[test]
    fn an_sgi_sent_while_it_is_handled_comes_again() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        vgic.inject(sgi(3, 0xa0), &mut fake);
        fake.acknowledge();
        vgic.inject(sgi(3, 0xa0), &mut fake);
        fake.end(3);
        assert_eq!(fake.acknowledge(), Some(3));
        fake.end(3);
        assert_eq!(fake.acknowledge(), None);
    }

    #[test]
    fn the_queue_fills_up_and_says_so() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        for intid in 0..(4 + QUEUE as u32) {
            assert!(!vgic.is_full());
            vgic.inject(device(32 + intid), &mut fake);
        }
        assert!(vgic.is_full());
    }

    fn pmi() -> Interrupt {
        Interrupt {
            source: Source::Line,
            ..sgi(23, 0xa0)
        }
    }

    #[test]
    fn a_line_that_stays_high_is_offered_again_after_the_end() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        assert!(vgic.set_line(true, pmi(), &mut fake));
        assert!(!vgic.set_line(true, pmi(), &mut fake));
        assert_eq!(fake.acknowledge(), Some(23));
        assert!(
            fake.end(23),
            "the end of a line that is still high is noticed"
        );
        assert_eq!(fake.ended(), 1);
        vgic.refill(&mut fake);
        assert_eq!(fake.ended(), 0, "and its notice taken back");
        assert!(vgic.set_line(true, pmi(), &mut fake));
        assert_eq!(fake.acknowledge(), Some(23));
        vgic.set_line(false, pmi(), &mut fake);
        assert!(!fake.end(23), "and one that fell costs no exit");
        assert_eq!(fake.acknowledge(), None);
    }

    #[test]
    fn a_line_that_rises_again_while_it_is_handled_comes_again() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        vgic.set_line(true, pmi(), &mut fake);
        fake.acknowledge();
        vgic.set_line(false, pmi(), &mut fake);
        vgic.set_line(true, pmi(), &mut fake);
        assert!(fake.end(23));
        vgic.refill(&mut fake);
        assert!(vgic.set_line(true, pmi(), &mut fake));
    }

    #[test]
    fn a_line_that_fell_is_withdrawn_from_register_and_queue() {
        let (mut vgic, mut fake) = (VirtualInterface::new(), Fake::default());
        vgic.set_line(true, pmi(), &mut fake);
        vgic.set_line(false, pmi(), &mut fake);
        assert_eq!(fake.acknowledge(), None);
        for intid in 0..4 {
            vgic.inject(sgi(intid, 0), &mut fake);
        }
        vgic.set_line(true, pmi(), &mut fake);
        vgic.set_line(false, pmi(), &mut fake);
        let taken = fake.acknowledge().unwrap();
        fake.end(taken);
        vgic.refill(&mut fake);
        assert!(!fake.lr.iter().any(|&lr| lr as u32 == 23));
    }
}
