//! One vCPU's partitioned PMU: trapped accesses and the interrupt.

use super::{Plan, PmuRegisters, TrapRegisters, swinc};
use crate::arm::access::refusal;
use crate::arm::{
    CYCLE_COUNTER, ExceptionLevel, Outcome, PmuState, PmuVersion, Register, pmcr, pmuserenr,
};
use crate::counter::{Counter, CounterSet, CounterState, Lost};

/// What of PMCR_EL0 is the guest's to keep: all but the two commands and the read-only fields.
pub(super) const PMCR_CONTROL: u64 =
    !(pmcr::P | pmcr::C | pmcr::N_MASK | 0xffff << pmcr::IDENTITY_SHIFT);

pub(super) const PMSELR_MASK: u64 = 0x1f;

/// The PMU of one vCPU whose counters are hardware counters.
///
/// Its registers are either in the hardware or in this value; [`trap_registers`] is what makes the
/// guest's accesses go to the right place. See the [module](super) for what the caller does.
///
/// [`trap_registers`]: Self::trap_registers
#[derive(Clone, Debug)]
pub struct PartitionedPmu {
    pub(super) plan: Plan,
    /// True unless [`Residence::Loaded`]. Then only the event types are, where the plan
    /// [hides events](Plan::hides_events), and PMUSERENR_EL0, where it traps.
    pub(super) state: PmuState,
    pub(super) residence: Residence,
    /// The last put saved `state` as the hardware has it, and nothing has changed `state` or `plan` since.
    pub(super) is_left_behind: bool,
    /// The registers change hands at every switch, needed or not.
    // For the bench `switch` alone: nobody else wants it.
    pub(super) eager: bool,
}

/// Where a guest's registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residence {
    /// In memory, as they come out of reset: the guest never asked for any.
    Free,
    /// In memory, and nothing is lost if they stay there until the guest's next access.
    Lazy,
    /// In memory, to be loaded before the guest runs.
    Saved,
    /// In the hardware.
    Loaded,
}

/// Whose counters caused a physical PMU interrupt: the guest's, the host's, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "an interrupt that is not passed on is lost"]
pub struct OverflowSplit {
    /// The guest's interrupt line is high: inject the PMU interrupt. It stays high, and so does the
    /// physical line, until the guest clears its overflow bits.
    pub guest: bool,
    /// Host counters that overflowed with their interrupt enabled. Their overflow bits are cleared.
    pub host: CounterSet,
}

impl PartitionedPmu {
    /// Makes a PMU out of reset that is not loaded, for a CPU with this plan.
    pub const fn new(plan: Plan) -> Self {
        Self {
            plan,
            state: PmuState::reset(plan.version(), plan.hpmn()),
            residence: Residence::Free,
            is_left_behind: false,
            eager: false,
        }
    }

    /// Returns a PMU with a cycle counter alone, for a place that needs a value before the plan is known, such as a static.
    /// [`init`](Self::init) makes it the PMU that is wanted, where it stands.
    pub const fn vacant() -> Self {
        Self::new(Plan::VACANT)
    }

    /// Makes this PMU, whatever it was, the one that [`new`](Self::new) makes. A PMU that is loaded must be so on this
    /// CPU. Nothing larger than some words passes through the stack.
    pub fn init<R: PmuRegisters>(&mut self, plan: &Plan, regs: &mut R) {
        self.put(regs);
        self.plan = *plan;
        self.eager = false;
        self.begin(plan.hpmn());
    }

    /// Resets the PMU, for a vCPU that is reset or goes away. A PMU that is loaded must be so on this CPU, and is put
    /// first.
    pub fn reset<R: PmuRegisters>(&mut self, regs: &mut R) {
        self.put(regs);
        self.begin(self.state.counters());
    }

    /// Begins anew with `counters` event counters, none of whose registers is in the hardware.
    pub(super) fn begin(&mut self, counters: u8) {
        self.state = PmuState::reset(self.plan.version(), counters);
        self.residence = if self.eager {
            Residence::Saved
        } else {
            Residence::Free
        };
        self.is_left_behind = false;
    }

    /// Makes a PMU whose registers change hands at every switch. No access traps for that. Lazy switches are measured
    /// against this.
    #[must_use]
    pub const fn eager(plan: Plan) -> Self {
        let mut pmu = Self::new(plan);
        pmu.residence = Residence::Saved;
        pmu.eager = true;
        pmu
    }

    /// Returns where the guest's registers are.
    pub const fn residence(&self) -> Residence {
        self.residence
    }

    /// Returns whether the guest's registers are in the hardware.
    pub fn is_loaded(&self) -> bool {
        self.residence == Residence::Loaded
    }

    /// Returns the plan in force.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns what the trap registers must hold when the guest is entered: everything traps until its first access has
    /// loaded its PMU, and while the host has one of its counters.
    pub fn trap_registers(&self) -> TrapRegisters {
        if self.residence == Residence::Loaded && self.taken() == 0 {
            self.plan.traps()
        } else {
            self.plan.trap_all()
        }
    }

    /// Performs a trapped read (MRS). The first access loads the PMU.
    ///
    /// Registers of event counters that the guest does not have are [`Outcome::Undefined`], and
    /// so are directions and exception levels that an access does not exist for.
    pub fn read<R: PmuRegisters>(
        &mut self,
        register: Register,
        el: ExceptionLevel,
        regs: &mut R,
    ) -> Outcome {
        if let Some(outcome) = self.refusal(register, false, el, regs) {
            return outcome;
        }
        self.touch(regs);
        let Some(register) = self.resolve(register, regs) else {
            return Outcome::Undefined;
        };
        Outcome::Value(match register {
            // At EL2, N reads as the CPU's number of counters, whatever HPMN is.
            Register::Pmcr => regs.read(register) & !pmcr::N_MASK | self.state.pmcr & pmcr::N_MASK,
            Register::Pmevcntr(n) if n >= self.plan.hpmn() => nth(&self.state.pmevcntr, n),
            Register::Pmevtyper(n) if self.plan.hides_events() || n >= self.plan.hpmn() => {
                nth(&self.state.pmevtyper, n)
            }
            Register::Pmccfiltr if self.plan.hides_events() => self.state.pmccfiltr,
            Register::Pmuserenr if self.traps_everything() => self.state.pmuserenr,
            Register::Pmceid0 => self.plan.events()[0],
            Register::Pmceid1 => self.plan.events()[1],
            _ => match self.state.bits(register) {
                // At EL2 the hardware shows the host's bits, too.
                Some((&mut bits, _)) => regs.read(register) & self.guest() | bits & self.taken(),
                None => regs.read(register),
            },
        })
    }

    /// Performs a trapped write (MSR). The first access loads the PMU.
    ///
    /// Undefined accesses as for [`read`](Self::read). Any value may be written.
    pub fn write<R: PmuRegisters>(
        &mut self,
        register: Register,
        el: ExceptionLevel,
        value: u64,
        regs: &mut R,
    ) -> Outcome {
        if let Some(outcome) = self.refusal(register, true, el, regs) {
            return outcome;
        }
        self.touch(regs);
        let Some(register) = self.resolve(register, regs) else {
            return Outcome::Undefined;
        };
        match register {
            Register::Pmcr => self.write_pmcr(value, regs),
            Register::Pmevcntr(n) if n >= self.plan.hpmn() => {
                let value = value & self.plan.version().counter_mask();
                if let Some(kept) = self.state.pmevcntr.get_mut(usize::from(n)) {
                    *kept = value;
                }
            }
            Register::Pmevtyper(n) => {
                // Where events are hidden, the hardware holds another type, and the guest reads this one back.
                if let Some(written) = self.state.pmevtyper.get_mut(usize::from(n)) {
                    *written = self.plan.kept_pmevtyper(value).0;
                }
                if n < self.plan.hpmn() {
                    regs.write(register, self.plan.pmevtyper(value));
                }
            }
            Register::Pmccfiltr => {
                self.state.pmccfiltr = Plan::kept_pmccfiltr(value).0;
                regs.write(register, self.plan.pmccfiltr(value));
            }
            Register::Pmselr => regs.write(register, value & PMSELR_MASK),
            Register::Pmuserenr => {
                self.state.pmuserenr = value & pmuserenr::MASK;
                let physical = self.pmuserenr(value);
                regs.write(register, physical);
            }
            Register::Pmswinc => swinc::increment(&self.plan, value, el, regs),
            _ => {
                let (guest, taken) = (self.guest(), self.taken());
                let written = match self.state.bits(register) {
                    // The counters that are not in the hardware have theirs here.
                    Some((bits, sets)) => {
                        *bits = match sets {
                            true => *bits | value & taken,
                            false => *bits & !(value & taken),
                        };
                        value & guest
                    }
                    None => value,
                };
                regs.write(register, written);
            }
        }
        Outcome::Done
    }

    /// Returns whether [`exited`](Self::exited) has something to do at the next exit. Only a call that takes registers, or
    /// a plan, changes the answer.
    pub fn acts_at_exit(&self) -> bool {
        self.residence == Residence::Loaded && !self.plan.filtered_at_exit().is_empty()
    }

    /// Keeps the guest's counters from counting the hypervisor. Call this first at each exit, before anything whose
    /// duration or memory accesses are a secret.
    ///
    /// Where MDCR_EL2 does not keep a counter from counting at EL2 ([`Plan::filtered_at_exit`]), this clears the bits of
    /// its type that a guest without EL2 does not have. The cost is one register read for each such counter, and a write
    /// where the guest has set such a bit.
    pub fn exited<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.residence != Residence::Loaded {
            return;
        }
        for n in self.plan.filtered_at_exit() {
            let register = match n {
                CYCLE_COUNTER => Register::Pmccfiltr,
                _ => Register::Pmevtyper(n.number()),
            };
            let written = regs.read(register);
            let kept = match n {
                CYCLE_COUNTER => Plan::kept_pmccfiltr(written),
                _ => self.plan.kept_pmevtyper(written),
            };
            // A guest that asks for nothing outside itself costs no write.
            if kept.0 != written {
                regs.write(register, kept.0);
            }
        }
    }

    /// Tells whose a physical PMU interrupt is, and clears the host's part of the interrupt.
    ///
    /// With `guest` false and `host` empty the interrupt was spurious: the guest has cleared its overflow since.
    pub fn overflow<R: PmuRegisters>(&mut self, regs: &mut R) -> OverflowSplit {
        let mut host = self.plan.host_counters();
        if !host.is_empty() {
            let overflowed = regs.read(Register::PmovsSet) & regs.read(Register::PmintenSet);
            host &= CounterSet::from_bits(overflowed as u32);
        }
        if !host.is_empty() {
            // Else the host's bit would keep the physical line high, and the next interrupt would be this one again.
            regs.write(Register::PmovsClr, u64::from(host.bits()));
        }
        OverflowSplit {
            guest: self.line(regs),
            host,
        }
    }

    /// Returns the level of the guest's PMU interrupt, wherever its registers are. A vCPU that waits for an interrupt
    /// must wake when this is true after a [`put`](Self::put): the hardware no longer asserts it. The interrupt of a
    /// counter that the host has taken waits until a plan gives the counter back.
    pub fn line<R: PmuRegisters>(&self, regs: &mut R) -> bool {
        if self.residence != Residence::Loaded {
            // As the wire will be after the next load.
            return overflowed(&self.state) & !self.taken() != 0;
        }
        let overflowed = regs.read(Register::PmovsSet) & regs.read(Register::PmintenSet);
        // E is read last: mostly nothing has overflowed, and the read is saved.
        overflowed & self.guest() != 0 && regs.read(Register::Pmcr) & pmcr::E != 0
    }

    /// Returns what the guest's counter is doing; `None` if the guest has no such counter. A counter that
    /// should count and that the host has taken is `Lost`: its value stands still.
    pub fn counter_state<R: PmuRegisters>(
        &self,
        counter: Counter,
        regs: &mut R,
    ) -> Option<CounterState> {
        if counter != CYCLE_COUNTER && counter.number() >= self.state.counters() {
            return None;
        }
        let bit = u64::from(counter.alone().bits());
        let (enabled, control) = if self.residence == Residence::Loaded && self.taken() & bit == 0 {
            (regs.read(Register::PmcntenSet), regs.read(Register::Pmcr))
        } else if self.residence == Residence::Loaded {
            (self.state.pmcnten, regs.read(Register::Pmcr))
        } else {
            (self.state.pmcnten, self.state.pmcr)
        };
        let counts = enabled & bit != 0 && control & pmcr::E != 0;
        Some(match self.lost(counter) {
            Some(reason) if counts => CounterState::Lost(reason),
            None if counts && self.residence == Residence::Loaded => CounterState::Counting,
            _ => CounterState::Paused,
        })
    }

    /// Why a counter that the guest has is not in the hardware.
    fn lost(&self, counter: Counter) -> Option<Lost> {
        if self.taken() & u64::from(counter.alone().bits()) == 0 {
            None
        } else if counter.number() >= self.plan.implemented() {
            Some(Lost::Unsupported)
        } else {
            Some(Lost::Busy)
        }
    }

    /// The guest's counters that are in the hardware, as the bits of a register.
    pub(super) fn guest(&self) -> u64 {
        u64::from(self.plan.guest_counters().bits())
    }

    /// The guest's counters that are the host's by now, or that this CPU lacks; likewise.
    pub(super) fn taken(&self) -> u64 {
        let told = CounterSet::first(self.state.counters());
        u64::from((told - CounterSet::first(self.plan.hpmn())).bits())
    }

    pub(super) fn traps_everything(&self) -> bool {
        self.plan.traps_everything() || self.taken() != 0
    }

    /// What goes into the hardware's PMUSERENR_EL0 for what the guest wrote. Where all traps, the engine itself
    /// checks the guest's permissions: QEMU up to at least 10.0 asks MDCR_EL2.TPM about an access
    /// of EL0 only where EN, not where ER, CR or SW permits it.
    pub(super) fn pmuserenr(&self, written: u64) -> u64 {
        match written & pmuserenr::MASK {
            0 => 0,
            _ if self.traps_everything() => pmuserenr::EN,
            permissions => permissions,
        }
    }

    fn refusal<R: PmuRegisters>(
        &self,
        register: Register,
        write: bool,
        el: ExceptionLevel,
        regs: &mut R,
    ) -> Option<Outcome> {
        if register == Register::Pmmir && self.plan.version() < PmuVersion::V3p4 {
            return Some(Outcome::Undefined);
        }
        let pmuserenr = match (el, self.residence) {
            (ExceptionLevel::El1, _) => 0,
            // The guest has written it without a trap, so the copy may be old.
            (ExceptionLevel::El0, Residence::Loaded) if !self.traps_everything() => {
                regs.read(Register::Pmuserenr)
            }
            (ExceptionLevel::El0, _) => self.state.pmuserenr,
        };
        refusal(register, write, el, pmuserenr)
    }

    /// The register that PMXEVTYPER_EL0 or PMXEVCNTR_EL0 means; others as they are. `None`: a
    /// counter that the guest does not have.
    ///
    /// The selection is read from the hardware: the guest's PMSELR_EL0 need not trap, so no copy of
    /// it would stay true.
    fn resolve<R: PmuRegisters>(&self, register: Register, regs: &mut R) -> Option<Register> {
        let selected = |regs: &mut R| (regs.read(Register::Pmselr) & PMSELR_MASK) as u8;
        let register = match register {
            Register::Pmxevtyper => match selected(regs) {
                n if n == CYCLE_COUNTER.number() => Register::Pmccfiltr,
                n => Register::Pmevtyper(n),
            },
            Register::Pmxevcntr => Register::Pmevcntr(selected(regs)),
            other => other,
        };
        match register {
            Register::Pmevtyper(n) | Register::Pmevcntr(n) if n >= self.state.counters() => None,
            other => Some(other),
        }
    }

    fn write_pmcr<R: PmuRegisters>(&mut self, value: u64, regs: &mut R) {
        // Written at EL2, P would reset the host's counters too.
        if value & pmcr::P != 0 {
            for n in 0..self.plan.hpmn() {
                regs.write(Register::Pmevcntr(n), 0);
            }
            let taken = self.state.pmevcntr.iter_mut();
            taken
                .skip(self.plan.hpmn().into())
                .for_each(|count| *count = 0);
        }
        if value & pmcr::C != 0 {
            regs.write(Register::Pmccntr, 0);
        }
        regs.write(Register::Pmcr, value & PMCR_CONTROL);
    }
}

/// The counters whose overflow raises the line.
pub(super) const fn overflowed(state: &PmuState) -> u64 {
    match state.pmcr & pmcr::E {
        0 => 0,
        _ => state.pmovs & state.pminten,
    }
}

/// A counter's saved register; 0: there is no such counter.
fn nth(registers: &[u64], counter: u8) -> u64 {
    let register = registers.get(usize::from(counter));
    register.copied().unwrap_or_default()
}
