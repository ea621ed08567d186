//! Interrupts for the guest, through the list registers of GICv3's virtual CPU interface.
//!
//! Every physical interrupt is taken at EL2, its priority dropped, and offered to the guest in a list
//! register. With the *hardware bit* set, the guest's own end-of-interrupt also deactivates the physical
//! interrupt, so a device interrupt costs one exit and not two (Arm IHI 0069, "Virtual LPIs, SGIs,
//! PPIs and SPIs"). SGIs and the emulated PMU's line have no physical twin to deactivate and go in
//! without it. There are no LPIs ([`redistributor`](super::redistributor)).
//!
//! A processor has few list registers (QEMU: four). The monitor keeps no queue beside them: the GIC itself
//! has a place for every pending interrupt. While the list registers are full, the physical priority mask
//! lets in only interrupts that are more urgent than the least urgent offered, which then gives its list
//! register up and is pending in the GIC again. The maintenance interrupt passes any mask, because the most
//! urgent priority is the monitor's own.

use super::distributor::{IPRIORITYR0E, ISPENDR0E};
use super::redistributor::{IPRIORITYR0, ISPENDR0};
use crate::regs::list_register as lr;

/// The most list registers that a CPU has.
pub const MOST: usize = 16;

/// The list registers of this CPU.
pub trait ListRegisters {
    /// How many there are, 1 to [`MOST`].
    fn count(&self) -> usize;
    /// `ICH_LR<n>_EL2`.
    fn read(&self, n: usize) -> u64;
    /// `ICH_LR<n>_EL2`.
    fn write(&mut self, n: usize, value: u64);
}

/// This CPU's interrupts: list registers, the physical priority mask, and the physical interrupts' state.
pub trait CpuInterface: ListRegisters {
    /// `ICH_ELRSR_EL2`: bit n = list register n is free.
    fn empty(&self) -> u32;
    /// `ICH_EISR_EL2`: bit n = the guest has ended list register n, which asked for a notice. Such a
    /// register is not [empty](Self::empty), and its notice is raised, until it is cleared.
    fn ended(&self) -> u32;
    /// Limits which physical interrupts come in, and asks for the maintenance interrupt that ends the limit.
    fn admit(&mut self, limit: Limit);
    /// Makes a taken physical interrupt inactive and pending again.
    fn give_back(&mut self, interrupt: Interrupt);
}

/// Which physical interrupts may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// All of them; no maintenance interrupt is wanted.
    None,
    /// Those more urgent than this priority. A maintenance interrupt is wanted once no list register is
    /// pending (`ICH_HCR_EL2.NPIE`).
    MoreUrgentThan(u8),
    /// The monitor's own. The guest is handling all of the list registers, and a maintenance interrupt is
    /// wanted once at most one is left (`ICH_HCR_EL2.UIE`).
    Own,
}

/// What drives an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A physical interrupt of the same INTID, which the guest deactivates.
    Hardware,
    /// The monitor, once: an SGI.
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

impl Interrupt {
    fn encode(self) -> u64 {
        let physical = match self.source {
            Source::Hardware => lr::HW | (u64::from(self.intid) & lr::PINTID) << lr::PINTID_SHIFT,
            Source::Software => 0,
            Source::Line => lr::EOI,
        };
        let group = if self.group1 { lr::GROUP1 } else { 0 };
        let priority = u64::from(self.priority) << lr::PRIORITY_SHIFT;
        lr::PENDING | physical | group | priority | u64::from(self.intid)
    }

    fn decode(register: u64) -> Self {
        Self {
            intid: (register & lr::VINTID) as u32,
            priority: (register >> lr::PRIORITY_SHIFT) as u8,
            group1: register & lr::GROUP1 != 0,
            source: if register & lr::HW != 0 {
                Source::Hardware
            } else if register & lr::EOI != 0 {
                Source::Line
            } else {
                Source::Software
            },
        }
    }
}

/// The guest-bound interrupts of one CPU; by default none is on its way.
#[derive(Debug, Default)]
pub struct VirtualInterface {
    /// A [`Limit`] is in place.
    limited: bool,
}

impl VirtualInterface {
    /// Offers `interrupt` to the guest. Returns whether it is in a list register now; if not, it has been
    /// given back, or, for a [`Source::Line`], is to be shown again after the next maintenance interrupt.
    ///
    /// An interrupt that is already pending is not doubled; one that the guest is handling becomes pending
    /// again.
    pub fn inject(&mut self, interrupt: Interrupt, cpu: &mut impl CpuInterface) -> bool {
        if let Some((n, value)) = find(interrupt.intid, cpu) {
            // The architecture forbids "pending and active" with the hardware bit; a physical
            // interrupt fires again only once it is inactive, so the old entry is stale there.
            let value = match interrupt.source {
                Source::Hardware => interrupt.encode(),
                Source::Software | Source::Line => value | lr::PENDING,
            };
            cpu.write(n, value);
            return true;
        }
        let empty = cpu.empty();
        let slot = if empty != 0 {
            Some(empty.trailing_zeros() as usize)
        } else {
            least_urgent(cpu)
                // Equal ones stay: to trade them would never end.
                .filter(|(_, least)| least.priority > interrupt.priority)
                .map(|(n, least)| {
                    cpu.give_back(least);
                    n
                })
        };
        match slot {
            Some(n) => cpu.write(n, interrupt.encode()),
            // Pending in the GIC again, which has room for each interrupt, and masked until there is room here.
            None => cpu.give_back(interrupt),
        }
        self.limit(cpu);
        slot.is_some()
    }

    /// Serves the maintenance interrupt: takes note of ended interrupts and lets further ones in.
    pub fn refill(&mut self, cpu: &mut impl CpuInterface) {
        // At least what asked for the notice must be cleared, or the maintenance interrupt comes again at once.
        let mut ended = cpu.ended();
        while ended != 0 {
            cpu.write(ended.trailing_zeros() as usize, 0);
            ended &= ended - 1;
        }
        self.limit(cpu);
    }

    /// Makes the guest's view of a level-triggered virtual line agree with `high`.
    ///
    /// A high line is offered once, and the guest's end of the interrupt raises a maintenance
    /// interrupt, so that the caller can read the line and offer it again. A line that falls while
    /// the guest handles it, as it does in every driver, takes that wish back: no exit. A line that
    /// fell before the guest took the interrupt is withdrawn.
    ///
    /// Returns whether the interrupt was newly offered.
    pub fn set_line(&mut self, high: bool, line: Interrupt, cpu: &mut impl CpuInterface) -> bool {
        match (find(line.intid, cpu), high) {
            (None, true) => return self.inject(line, cpu),
            (Some((n, value)), _) if value & lr::ACTIVE != 0 => {
                // Not PENDING: the architecture would deliver it once more when the guest ends it, although the line may be low
                // by then.
                let notice = if high { lr::EOI } else { 0 };
                cpu.write(n, value & !(lr::EOI | lr::PENDING) | notice);
            }
            (Some((n, _)), false) => {
                cpu.write(n, 0);
                self.limit(cpu);
            }
            (None, false) | (Some(_), true) => {}
        }
        false
    }

    /// Gives everything back that the guest has not taken, because this CPU goes off. What the guest is
    /// handling stays active in the GIC, as on a machine without a monitor.
    pub fn give_all_back(&mut self, cpu: &mut impl CpuInterface) {
        for n in in_use(cpu) {
            let value = cpu.read(n);
            cpu.write(n, 0);
            if value & lr::PENDING != 0 {
                cpu.give_back(Interrupt::decode(value));
            }
        }
        self.limit(cpu);
    }

    /// Whether the CPU may wait for a physical interrupt: nothing is offered, and no interrupt is held back.
    pub fn may_wait(&self, cpu: &impl CpuInterface) -> bool {
        !self.limited && in_use(cpu).all(|n| cpu.read(n) & lr::PENDING == 0)
    }

    /// Makes the physical priority mask agree with the room in the list registers.
    fn limit(&mut self, cpu: &mut impl CpuInterface) {
        let full = cpu.empty() == 0;
        // The way of nearly every interrupt: no register is written.
        if !full && !self.limited {
            return;
        }
        self.limited = full;
        cpu.admit(match (full, least_urgent(cpu)) {
            (false, _) => Limit::None,
            (true, Some((_, least))) => Limit::MoreUrgentThan(least.priority),
            (true, None) => Limit::Own,
        });
    }
}

/// The list register that holds `intid` pending or active, with its value.
fn find(intid: u32, cpu: &impl CpuInterface) -> Option<(usize, u64)> {
    in_use(cpu)
        .map(|n| (n, cpu.read(n)))
        .find(|&(_, value)| value as u32 == intid && value & (lr::PENDING | lr::ACTIVE) != 0)
}

fn in_use<C: CpuInterface>(cpu: &C) -> impl Iterator<Item = usize> + use<C> {
    let empty = cpu.empty();
    (0..cpu.count()).filter(move |n| empty >> n & 1 == 0)
}

/// The least urgent interrupt that the guest has not yet taken.
fn least_urgent(cpu: &impl CpuInterface) -> Option<(usize, Interrupt)> {
    in_use(cpu)
        .map(|n| (n, cpu.read(n)))
        .filter(|&(_, value)| value & (lr::ACTIVE | lr::PENDING) == lr::PENDING)
        .map(|(n, value)| (n, Interrupt::decode(value)))
        .max_by_key(|(_, interrupt)| interrupt.priority)
}

/// Where the GIC keeps the state of an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In the SGI frame of the CPU's redistributor rather than in the distributor.
    pub redistributor: bool,
    /// Offset of the word that makes it pending (GICR_ISPENDR or GICD_ISPENDR), and the bit in it.
    pub pending: (u64, u32),
    /// Offset of the byte that holds its priority.
    pub priority: u64,
}

impl Place {
    /// Of an SGI, a PPI or an SPI, those of the extended ranges included (Arm IHI 0069, "INTIDs": 1056 to 1119 and
    /// 4096 to 5119).
    pub const fn of(intid: u32) -> Self {
        // Extended PPIs follow the 32 others; extended SPIs have registers of their own.
        let (redistributor, pending, priority, n) = match intid {
            0..32 => (true, ISPENDR0, IPRIORITYR0, intid),
            1056..1120 => (true, ISPENDR0, IPRIORITYR0, intid - 1024),
            4096.. => (false, ISPENDR0E, IPRIORITYR0E, intid - 4096),
            _ => (false, ISPENDR0, IPRIORITYR0, intid),
        };
        Self {
            redistributor,
            pending: (pending + (n / 32 * 4) as u64, n % 32),
            priority: priority + n as u64,
        }
    }
}

#[cfg(test)]
mod tests;
