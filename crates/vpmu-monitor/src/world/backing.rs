//! Physical counters behind the emulated PMU's.
//!
//! Guest counter *n* is backed by physical counter *n* of the same CPU. The physical counter is
//! programmed with the guest's filters for EL0 and EL1 and never counts at EL2, so it needs no
//! stopping and starting at each exit, and nothing is lost while the monitor looks at it.

use core::num::NonZeroU64;

use vpmu::{
    arm::{
        CYCLE_COUNTER, CounterConfig, EventKind, RawPmevtyper, Register, partition::PmuRegisters,
    },
    counter::{CounterHost, CounterSet, Lost},
};

/// What is known of one physical counter.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Events counted since `create` when the counter stood at `mark`.
    total: u64,
    mark: u64,
}

/// The state of a CPU's physical counters as a backing.
#[derive(Debug)]
pub struct Backing {
    slots: [Slot; 32],
    /// Counters whose overflow raises the physical interrupt.
    reporting: CounterSet,
    /// Bits of an event counter: all 64 from PMUv3p5 on, else 32.
    width: u64,
}

impl Backing {
    /// No counter in use. `width` is the mask of an event counter's bits.
    pub const fn new(width: u64) -> Self {
        Self {
            slots: [Slot { total: 0, mark: 0 }; 32],
            reporting: CounterSet::EMPTY,
            width,
        }
    }

    /// The backing together with the registers of this CPU: a host for the engine.
    pub fn host<'a, R: PmuRegisters>(&'a mut self, registers: &'a mut R) -> Physical<'a, R> {
        Physical {
            backing: self,
            registers,
        }
    }

    /// The counters whose overflow has raised the physical interrupt; lowers it.
    pub fn take_overflows(&self, registers: &mut impl PmuRegisters) -> CounterSet {
        let raised = CounterSet::from_bits(registers.read(Register::PmovsSet) as u32);
        let ours = raised & self.reporting;
        if !ours.is_empty() {
            registers.write(Register::PmovsClr, ours.bits().into());
        }
        ours
    }

    fn mask(&self, counter: u8) -> u64 {
        // PMCR_EL0.LC makes the cycle counter 64 bits wide on every version.
        if counter == CYCLE_COUNTER {
            u64::MAX
        } else {
            self.width
        }
    }
}

/// A [`CounterHost`] over the physical registers.
#[derive(Debug)]
pub struct Physical<'a, R> {
    backing: &'a mut Backing,
    registers: &'a mut R,
}

const fn value_register(counter: u8) -> Register {
    match counter {
        CYCLE_COUNTER => Register::Pmccntr,
        n => Register::Pmevcntr(n),
    }
}

impl<R: PmuRegisters> Physical<'_, R> {
    /// Moves the physical counter to `value` without losing what it has counted.
    fn rebase(&mut self, counter: u8, value: u64) {
        let total = self.read(counter);
        self.registers.write(value_register(counter), value);
        self.backing.slots[usize::from(counter & 31)] = Slot { total, mark: value };
    }

    fn report(&mut self, counter: u8, wanted: bool) {
        if self.backing.reporting.contains(counter) == wanted {
            return;
        }
        let bit = CounterSet::of(counter);
        let register = if wanted {
            self.backing.reporting |= bit;
            Register::PmintenSet
        } else {
            self.backing.reporting -= bit;
            Register::PmintenClr
        };
        self.registers.write(register, bit.bits().into());
    }
}

impl<R: PmuRegisters> CounterHost<CounterConfig> for Physical<'_, R> {
    fn create(&mut self, counter: u8, config: &CounterConfig) -> Result<(), Lost> {
        let mut filter = 0;
        if !config.el0 {
            filter |= RawPmevtyper::U;
        }
        if !config.el1 {
            filter |= RawPmevtyper::P;
        }
        match config.event {
            EventKind::Cycles => self.registers.write(Register::Pmccfiltr, filter),
            EventKind::Event(event) => self
                .registers
                .write(Register::Pmevtyper(counter), filter | u64::from(event)),
        }
        self.registers.write(value_register(counter), 0);
        self.backing.slots[usize::from(counter & 31)] = Slot::default();
        // A 32-bit counter wraps in seconds: its overflow is needed to keep the total.
        let narrow = self.backing.mask(counter) != u64::MAX;
        self.report(counter, narrow);
        Ok(())
    }

    fn set_period(&mut self, counter: u8, events: Option<NonZeroU64>) {
        let mask = self.backing.mask(counter);
        let narrow = mask != u64::MAX;
        match events {
            // An early report is allowed; half the range is far enough away for the total.
            Some(events) => {
                let distance = if narrow {
                    events.get().min(mask / 2)
                } else {
                    events.get()
                };
                self.rebase(counter, distance.wrapping_neg() & mask);
                self.report(counter, true);
            }
            None => self.report(counter, narrow),
        }
    }

    fn resume(&mut self, counters: CounterSet) {
        self.registers
            .write(Register::PmcntenSet, counters.bits().into());
    }

    fn pause(&mut self, counters: CounterSet) {
        self.registers
            .write(Register::PmcntenClr, counters.bits().into());
    }

    fn read(&mut self, counter: u8) -> u64 {
        let mask = self.backing.mask(counter);
        let value = self.registers.read(value_register(counter));
        let slot = &mut self.backing.slots[usize::from(counter & 31)];
        slot.total = slot
            .total
            .wrapping_add(value.wrapping_sub(slot.mark) & mask);
        slot.mark = value;
        slot.total
    }

    fn release(&mut self, counter: u8) {
        self.report(counter, false);
    }

    /// [`GuestPmu`](super::guest_pmu::GuestPmu) hands them over before the guest reads its overflow bits.
    fn reports_promptly(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::fake::FakeRegisters;

    fn instructions(el0: bool, el1: bool) -> CounterConfig {
        CounterConfig {
            event: EventKind::Event(8),
            el0,
            el1,
        }
    }

    #[test]
    fn filters_are_the_guests_and_el2_is_never_counted() {
        let (mut backing, mut registers) = (Backing::new(u64::MAX), FakeRegisters::default());
        let mut host = backing.host(&mut registers);
        host.create(2, &instructions(true, false)).unwrap();
        assert_eq!(registers.get(Register::Pmevtyper(2)), 1 << 31 | 8);
        assert_eq!(registers.get(Register::Pmevtyper(2)) & RawPmevtyper::NSH, 0);
    }

    #[test]
    fn the_total_survives_every_change_of_the_period() {
        for width in [u64::MAX, 0xffff_ffff] {
            let (mut backing, mut registers) = (Backing::new(width), FakeRegisters::default());
            backing
                .host(&mut registers)
                .create(0, &instructions(true, true))
                .unwrap();
            let mut expected = 0_u64;
            for period in [1, 1_000, 0x8000_0000, u64::MAX] {
                backing
                    .host(&mut registers)
                    .set_period(0, NonZeroU64::new(period));
                registers.count(Register::Pmevcntr(0), 700, width);
                expected += 700;
                assert_eq!(backing.host(&mut registers).read(0), expected);
            }
        }
    }

    #[test]
    fn only_wanted_overflows_are_reported_and_taken_once() {
        let (mut backing, mut registers) = (Backing::new(u64::MAX), FakeRegisters::default());
        let mut host = backing.host(&mut registers);
        host.create(0, &instructions(true, true)).unwrap();
        host.create(1, &instructions(true, true)).unwrap();
        host.set_period(1, NonZeroU64::new(10));
        registers.set(Register::PmovsSet, 0b1011);
        assert_eq!(backing.take_overflows(&mut registers).bits(), 0b10);
        assert_eq!(registers.last_write(Register::PmovsClr), Some(0b10));
        backing.host(&mut registers).set_period(1, None);
        assert!(backing.take_overflows(&mut registers).is_empty());
    }
}
