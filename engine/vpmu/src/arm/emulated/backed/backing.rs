//! The physical counters as a host of the emulated PMU.
//!
//! Guest counter *n* has physical counter *n*. It is programmed with the guest's filters for EL0 and
//! EL1 and never counts at EL2, so it needs no stopping at an exit, and nothing is lost while the
//! hypervisor runs.

use core::num::NonZeroU64;

use crate::arm::{
    CYCLE_COUNTER, CounterConfig, EventKind, RawPmevtyper, Register, partition::PmuRegisters,
};
use crate::counter::{Counter, CounterHost, CounterSet, Lost, Slots};

/// What is known of one physical counter while its registers are closed to the guest.
#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    /// Events counted since `create` when the counter stood at `mark`.
    total: u64,
    mark: u64,
}

/// The state of a CPU's physical counters.
#[derive(Clone, Debug)]
pub(super) struct Backing {
    slots: Slots<Slot>,
    /// Counters whose overflow raises the physical interrupt.
    reporting: CounterSet,
    /// Bits of an event counter: all 64 from PMUv3p5 on, else 32.
    width: u64,
    /// How many event counters there are for the guest.
    pub(super) available: u8,
}

impl Backing {
    /// No counter in use. `width` is the mask of an event counter's bits, `available` how many there are.
    pub(super) const fn new(width: u64, available: u8) -> Self {
        Self {
            slots: Slots::filled(Slot { total: 0, mark: 0 }),
            reporting: CounterSet::EMPTY,
            width,
            available,
        }
    }

    /// Changes what [`new`](Self::new) was given, while no counter is in use.
    pub(super) const fn resize(&mut self, width: u64, available: u8) {
        self.width = width;
        self.available = available;
    }

    /// The backing together with the registers of this CPU. `open`: the guest reaches the counters
    /// itself, and they hold its own values.
    pub(super) fn host<'a, R: PmuRegisters>(
        &'a mut self,
        open: bool,
        registers: &'a mut R,
    ) -> Physical<'a, R> {
        Physical {
            backing: self,
            open,
            registers,
        }
    }

    /// The counters whose overflow has raised the physical interrupt; lowers it.
    pub(super) fn take_overflows(&self, registers: &mut impl PmuRegisters) -> CounterSet {
        let raised = CounterSet::from_bits(registers.read(Register::PmovsSet) as u32);
        let ours = raised & self.reporting;
        if !ours.is_empty() {
            registers.write(Register::PmovsClr, ours.bits().into());
        }
        ours
    }

    /// Has the overflows of just these counters raise the physical interrupt.
    pub(super) fn report_only(&mut self, wanted: CounterSet, registers: &mut impl PmuRegisters) {
        let changes = [
            (Register::PmintenClr, self.reporting - wanted),
            (Register::PmintenSet, wanted - self.reporting),
        ];
        // Most writes of a guest change nothing here, and each register costs an access.
        for (register, counters) in changes {
            if !counters.is_empty() {
                registers.write(register, counters.bits().into());
            }
        }
        self.reporting = wanted;
    }

    fn mask(&self, counter: Counter) -> u64 {
        // PMCR_EL0.LC makes the cycle counter 64 bits wide on every version.
        if counter == CYCLE_COUNTER {
            u64::MAX
        } else {
            self.width
        }
    }
}

/// A [`CounterHost`] over the physical registers.
///
/// Open counters hold the guest's values and overflow where the guest's do. So their host only starts
/// and stops them: it has nothing to add to what the guest sees ([`read`](Self::read) is always 0),
/// never moves them and is asked for no report.
#[derive(Debug)]
pub(super) struct Physical<'a, R> {
    backing: &'a mut Backing,
    open: bool,
    registers: &'a mut R,
}

/// The register that holds the value of `counter`.
pub(super) const fn value_register(counter: Counter) -> Register {
    match counter {
        CYCLE_COUNTER => Register::Pmccntr,
        n => Register::Pmevcntr(n.number()),
    }
}

impl<R: PmuRegisters> Physical<'_, R> {
    /// Moves the physical counter to `value` without losing what it has counted.
    fn rebase(&mut self, counter: Counter, value: u64) {
        let total = self.read(counter);
        self.registers.write(value_register(counter), value);
        self.backing.slots[counter] = Slot { total, mark: value };
    }

    /// Whether an overflow is needed to keep the total: a 32-bit counter wraps in seconds.
    fn is_narrow(&self, counter: Counter) -> bool {
        self.backing.mask(counter) != u64::MAX
    }

    fn report(&mut self, counter: Counter, wanted: bool) {
        let mut reporting = self.backing.reporting;
        reporting.put(counter, wanted);
        self.backing.report_only(reporting, self.registers);
    }
}

impl<R: PmuRegisters> CounterHost<CounterConfig> for Physical<'_, R> {
    fn create(&mut self, counter: Counter, config: &CounterConfig) -> Result<(), Lost> {
        if counter != CYCLE_COUNTER && counter.number() >= self.backing.available {
            // Not `Unsupported`: the host has taken a counter from the top, and may give it back.
            return Err(Lost::Busy);
        }
        let mut filter = 0;
        if !config.el0 {
            filter |= RawPmevtyper::U;
        }
        if !config.el1 {
            filter |= RawPmevtyper::P;
        }
        match config.event {
            // PMCCFILTR_EL0 has no event: the cycle counter's is fixed.
            EventKind::Cycles => self.registers.write(Register::Pmccfiltr, filter),
            EventKind::Event(event) => self.registers.write(
                Register::Pmevtyper(counter.number()),
                filter | u64::from(event),
            ),
        }
        if !self.open {
            self.registers.write(value_register(counter), 0);
            self.backing.slots[counter] = Slot::default();
            self.report(counter, self.is_narrow(counter));
        }
        Ok(())
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        if self.open {
            return;
        }
        let narrow = self.is_narrow(counter);
        if let Some(events) = events {
            let mask = self.backing.mask(counter);
            // An early report is allowed; half the range is far enough away for the total.
            let distance = if narrow {
                events.get().min(mask / 2)
            } else {
                events.get()
            };
            self.rebase(counter, distance.wrapping_neg() & mask);
        }
        self.report(counter, narrow || events.is_some());
    }

    fn resume(&mut self, counters: CounterSet) {
        self.registers
            .write(Register::PmcntenSet, counters.bits().into());
    }

    fn pause(&mut self, counters: CounterSet) {
        self.registers
            .write(Register::PmcntenClr, counters.bits().into());
    }

    fn read(&mut self, counter: Counter) -> u64 {
        if self.open {
            return 0;
        }
        let mask = self.backing.mask(counter);
        let value = self.registers.read(value_register(counter));
        let slot = &mut self.backing.slots[counter];
        slot.total = slot
            .total
            .wrapping_add(value.wrapping_sub(slot.mark) & mask);
        slot.mark = value;
        slot.total
    }

    // The counter stays as it stands: `create` writes both its registers before it counts again.
    fn release(&mut self, counter: Counter) {
        if !self.open {
            self.report(counter, false);
        }
    }

    /// [`BackedPmu`](super::BackedPmu) hands them over before the guest reads its overflow bits.
    fn reports_promptly(&self) -> bool {
        true
    }
}
