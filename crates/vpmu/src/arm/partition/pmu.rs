//! One vCPU's partitioned PMU: trapped accesses, the switch, the interrupt.

use core::fmt;

use super::{Plan, PmuRegisters, TrapRegisters, swinc};
use crate::arm::access::refusal;
use crate::arm::{
    CYCLE_COUNTER, ExceptionLevel, Outcome, PmuState, PmuVersion, Register, RestoreError, pmcr,
    pmuserenr,
};
use crate::counter::CounterSet;

/// What of PMCR_EL0 is the guest's to keep: all but the two commands and the read-only fields.
const PMCR_CONTROL: u64 = !(pmcr::P | pmcr::C | pmcr::N_MASK | 0xffff << pmcr::IDENTITY_SHIFT);

const PMSELR_MASK: u64 = 0x1f;

/// The PMU of one vCPU whose counters are hardware counters.
///
/// Its registers are either in the hardware or in this value; [`trap_registers`] is what makes the
/// guest's accesses go to the right place. See the [module](super) for what the caller does.
///
/// [`trap_registers`]: Self::trap_registers
#[derive(Clone, Debug)]
pub struct PartitionedPmu {
    plan: Plan,
    /// True unless [`Place::Loaded`]. Then only the event types are, and only where the plan
    /// [hides events](Plan::hides_events).
    state: PmuState,
    place: Place,
}

/// Where the guest's registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In memory, as they come out of reset: the guest never asked for any.
    Untouched,
    /// In memory, and nothing is lost if they stay there until the guest's next access.
    Idle,
    /// In memory, to be loaded before the guest runs.
    Saved,
    /// In the hardware.
    Loaded,
}

/// Whose counters caused a physical PMU interrupt. Both may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverflowSplit {
    /// The guest's interrupt line is high: inject the PMU interrupt. It stays high, and so does the
    /// physical line, until the guest clears its overflow bits.
    pub guest: bool,
    /// Host counters that overflowed with their interrupt enabled. Their overflow bits are cleared.
    pub host: CounterSet,
}

/// Why a vCPU's PMU cannot go on with another CPU's plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MigrateError {
    /// Its registers are still in the hardware of the old CPU: the caller forgot to `put`.
    Loaded,
    /// The guest has seen another number of event counters. The other CPU's plan must leave it as
    /// many, by another number of host counters.
    Counters {
        /// How many the guest has.
        guest: u8,
        /// How many the plan gives.
        offered: u8,
    },
    /// The guest was told another PMU version.
    Version {
        /// What the guest has.
        guest: PmuVersion,
        /// What the plan gives.
        offered: PmuVersion,
    },
}

impl fmt::Display for MigrateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Loaded => {
                f.write_str("migrate a PMU: still loaded on its old CPU; put it there first")
            }
            Self::Counters { guest, offered } => write!(
                f,
                "migrate a PMU with {guest} event counters to a CPU whose plan gives {offered}; \
                 plan that CPU with another number of host counters"
            ),
            Self::Version { guest, offered } => {
                write!(f, "migrate a PMU of {guest:?} to a CPU of {offered:?}")
            }
        }
    }
}

impl core::error::Error for MigrateError {}

impl PartitionedPmu {
    /// A PMU out of reset, not loaded, on a CPU with this plan.
    pub const fn new(plan: Plan) -> Self {
        Self {
            plan,
            state: PmuState::reset(plan.version(), plan.hpmn()),
            place: Place::Untouched,
        }
    }

    /// The plan in force.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What the trap registers must hold when the guest is entered: everything traps until its
    /// first access has loaded its PMU.
    pub fn trap_registers(&self) -> TrapRegisters {
        if self.place == Place::Loaded {
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
            Register::Pmcr => {
                let number = u64::from(self.plan.hpmn()) << pmcr::N_SHIFT;
                regs.read(register) & !pmcr::N_MASK | number
            }
            Register::PmcntenSet
            | Register::PmcntenClr
            | Register::PmintenSet
            | Register::PmintenClr
            | Register::PmovsSet
            | Register::PmovsClr => regs.read(register) & self.guest(),
            Register::Pmevtyper(n) if self.plan.hides_events() => self
                .state
                .pmevtyper
                .get(usize::from(n))
                .copied()
                .unwrap_or(0),
            Register::Pmccfiltr if self.plan.hides_events() => self.state.pmccfiltr,
            Register::Pmceid0 => self.plan.events()[0],
            Register::Pmceid1 => self.plan.events()[1],
            _ => regs.read(register),
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
            Register::PmcntenSet
            | Register::PmcntenClr
            | Register::PmintenSet
            | Register::PmintenClr
            | Register::PmovsSet
            | Register::PmovsClr => regs.write(register, value & self.guest()),
            Register::Pmevtyper(n) => {
                if let Some(written) = self.state.pmevtyper.get_mut(usize::from(n)) {
                    *written = self.plan.kept_pmevtyper(value).0;
                }
                regs.write(register, self.plan.pmevtyper(value));
            }
            Register::Pmccfiltr => {
                self.state.pmccfiltr = Plan::kept_pmccfiltr(value).0;
                regs.write(register, self.plan.pmccfiltr(value));
            }
            Register::Pmselr => regs.write(register, value & PMSELR_MASK),
            Register::Pmuserenr => regs.write(register, value & pmuserenr::MASK),
            Register::Pmswinc => swinc::increment(&self.plan, value, el, regs),
            _ => regs.write(register, value),
        }
        Outcome::Done
    }

    /// The guest is about to run here. Loads its registers if they are needed before its next
    /// trapped access; costs no register access if not.
    pub fn load<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.place == Place::Saved {
            self.load_registers(regs);
        }
    }

    /// The guest no longer runs here. If its registers are in the hardware, stops its counters,
    /// saves them, and leaves no interrupt of the guest's asserted, no access for EL0, and a valid
    /// selection; if not, costs no register access. PMCR_EL0 stays as the guest left it.
    pub fn put<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.place != Place::Loaded {
            return;
        }
        let guest = self.guest();
        let hides_events = self.plan.hides_events();
        let state = &mut self.state;
        state.pmcnten = regs.read(Register::PmcntenSet) & guest;
        regs.write(Register::PmcntenClr, guest);
        // Nothing of the guest's counts any more, so no overflow can come after this read and be
        // lost to the clear.
        state.pmovs = regs.read(Register::PmovsSet) & guest;
        regs.write(Register::PmovsClr, guest);
        state.pminten = regs.read(Register::PmintenSet) & guest;
        regs.write(Register::PmintenClr, guest);
        state.pmcr = regs.read(Register::Pmcr) & PMCR_CONTROL | state.pmcr & pmcr::N_MASK;
        state.pmselr = regs.read(Register::Pmselr) & PMSELR_MASK;
        // PMXEVTYPER_EL0 with a selection that does not exist is undefined before it traps, and an
        // idle guest's next access is not to suffer from another's selection.
        let harmless = self.plan.harmless_selection();
        if state.pmselr != harmless {
            regs.write(Register::Pmselr, harmless);
        }
        state.pmuserenr = regs.read(Register::Pmuserenr);
        if state.pmuserenr != 0 {
            regs.write(Register::Pmuserenr, 0);
        }
        state.pmccntr = regs.read(Register::Pmccntr);
        if !hides_events {
            state.pmccfiltr = regs.read(Register::Pmccfiltr);
        }
        let counters = state.pmevcntr.iter_mut().zip(&mut state.pmevtyper);
        for (n, (count, event_type)) in (0..self.plan.hpmn()).zip(counters) {
            *count = regs.read(Register::Pmevcntr(n));
            if !hides_events {
                *event_type = regs.read(Register::Pmevtyper(n));
            }
        }
        self.place = self.place_in_memory();
    }

    /// Goes on with the plan of another CPU, before the first `load` there.
    ///
    /// # Errors
    ///
    /// [`MigrateError`], when the guest would notice; the PMU is unchanged. A guest that has not
    /// used its PMU notices nothing.
    pub fn migrate(&mut self, plan: Plan) -> Result<(), MigrateError> {
        match self.place {
            Place::Loaded => return Err(MigrateError::Loaded),
            Place::Untouched => {
                *self = Self::new(plan);
                return Ok(());
            }
            Place::Idle | Place::Saved => {}
        }
        let (guest, offered) = (self.plan.hpmn(), plan.hpmn());
        if guest != offered {
            return Err(MigrateError::Counters { guest, offered });
        }
        let (guest, offered) = (self.plan.version(), plan.version());
        if guest != offered {
            return Err(MigrateError::Version { guest, offered });
        }
        self.plan = plan;
        Ok(())
    }

    /// Tells whose a physical PMU interrupt is, and clears the host's part of it.
    ///
    /// With `guest` false and `host` empty it was spurious: the guest cleared its overflow between
    /// the interrupt and this call.
    pub fn overflow<R: PmuRegisters>(&mut self, regs: &mut R) -> OverflowSplit {
        let mut host = self.plan.host_counters();
        if !host.is_empty() {
            let overflowed = regs.read(Register::PmovsSet) & regs.read(Register::PmintenSet);
            host &= CounterSet::from_bits(overflowed as u32);
        }
        if !host.is_empty() {
            regs.write(Register::PmovsClr, u64::from(host.bits()));
        }
        OverflowSplit {
            guest: self.line(regs),
            host,
        }
    }

    /// The level of the guest's PMU interrupt, wherever its registers are. A vCPU that waits for an
    /// interrupt must wake when this is true after a [`put`](Self::put): the hardware no longer
    /// asserts it.
    pub fn line<R: PmuRegisters>(&self, regs: &mut R) -> bool {
        if self.place != Place::Loaded {
            return line(&self.state);
        }
        let overflowed = regs.read(Register::PmovsSet) & regs.read(Register::PmintenSet);
        overflowed & self.guest() != 0 && regs.read(Register::Pmcr) & pmcr::E != 0
    }

    /// The guest's registers, without the bits of event types that hardware keeps but that are RES0
    /// for a guest without EL2 and EL3. A loaded PMU is put first.
    pub fn save<R: PmuRegisters>(&mut self, regs: &mut R) -> PmuState {
        self.put(regs);
        let mut state = self.state.clone();
        state.pmccfiltr = Plan::kept_pmccfiltr(state.pmccfiltr).0;
        for event_type in &mut state.pmevtyper {
            *event_type = self.plan.kept_pmevtyper(*event_type).0;
        }
        state
    }

    /// Replaces the guest's registers. A loaded PMU is put first.
    ///
    /// # Errors
    ///
    /// [`RestoreError`], when the state is not one that this plan can go on from; the guest then
    /// keeps the registers it had.
    pub fn restore<R: PmuRegisters>(
        &mut self,
        state: &PmuState,
        regs: &mut R,
    ) -> Result<(), RestoreError> {
        self.put(regs);
        self.check(state)?;
        self.state = state.clone();
        self.place = self.place_in_memory();
        Ok(())
    }

    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        if state.layout != PmuState::LAYOUT {
            return Err(RestoreError::Layout {
                saved: state.layout,
            });
        }
        if state.version != self.plan.version() {
            return Err(RestoreError::Version {
                saved: state.version,
                offered: self.plan.version(),
            });
        }
        if state.counters() != self.plan.hpmn() {
            return Err(RestoreError::Counters {
                saved: state.counters(),
                offered: self.plan.hpmn(),
            });
        }
        let sets = [
            (Register::PmcntenSet, state.pmcnten),
            (Register::PmintenSet, state.pminten),
            (Register::PmovsSet, state.pmovs),
        ];
        for (register, value) in sets {
            if value & !self.guest() != 0 {
                return Err(RestoreError::Reserved {
                    register: register.name(),
                    value,
                });
            }
        }
        Ok(())
    }

    /// The guest's counters, as the bits of a register.
    fn guest(&self) -> u64 {
        u64::from(self.plan.guest_counters().bits())
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
        let pmuserenr = match (el, self.place) {
            (ExceptionLevel::El1, _) => 0,
            (ExceptionLevel::El0, Place::Loaded) => regs.read(Register::Pmuserenr),
            (ExceptionLevel::El0, _) => self.state.pmuserenr,
        };
        refusal(register, write, el, pmuserenr)
    }

    fn touch<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.place != Place::Loaded {
            self.load_registers(regs);
        }
    }

    /// The register that PMXEVTYPER_EL0 or PMXEVCNTR_EL0 means; others as they are. `None`: a
    /// counter that the guest does not have.
    ///
    /// The selection is read from the hardware: the guest's PMSELR_EL0 does not trap, so no copy of
    /// it would stay true.
    fn resolve<R: PmuRegisters>(&self, register: Register, regs: &mut R) -> Option<Register> {
        let selected = |regs: &mut R| (regs.read(Register::Pmselr) & PMSELR_MASK) as u8;
        let register = match register {
            Register::Pmxevtyper => match selected(regs) {
                CYCLE_COUNTER => Register::Pmccfiltr,
                n => Register::Pmevtyper(n),
            },
            Register::Pmxevcntr => Register::Pmevcntr(selected(regs)),
            other => other,
        };
        match register {
            Register::Pmevtyper(n) | Register::Pmevcntr(n) if n >= self.plan.hpmn() => None,
            other => Some(other),
        }
    }

    fn write_pmcr<R: PmuRegisters>(&self, value: u64, regs: &mut R) {
        // Written at EL2, P would reset the host's counters too.
        if value & pmcr::P != 0 {
            for n in 0..self.plan.hpmn() {
                regs.write(Register::Pmevcntr(n), 0);
            }
        }
        if value & pmcr::C != 0 {
            regs.write(Register::Pmccntr, 0);
        }
        regs.write(Register::Pmcr, value & PMCR_CONTROL);
    }

    /// Writes all of the guest's registers. Whatever another guest left there is overwritten.
    fn load_registers<R: PmuRegisters>(&mut self, regs: &mut R) {
        let guest = self.guest();
        let state = &self.state;
        regs.write(Register::PmcntenClr, guest);
        regs.write(Register::PmintenClr, guest);
        regs.write(Register::PmovsClr, guest);
        regs.write(Register::Pmcr, state.pmcr & PMCR_CONTROL);
        let counters = state.pmevcntr.iter().zip(&state.pmevtyper);
        for (n, (count, event_type)) in (0..self.plan.hpmn()).zip(counters) {
            regs.write(Register::Pmevtyper(n), self.plan.pmevtyper(*event_type));
            regs.write(Register::Pmevcntr(n), *count);
        }
        regs.write(Register::Pmccfiltr, self.plan.pmccfiltr(state.pmccfiltr));
        regs.write(Register::Pmccntr, state.pmccntr);
        regs.write(Register::Pmselr, state.pmselr & PMSELR_MASK);
        regs.write(Register::Pmuserenr, state.pmuserenr);
        regs.write(Register::PmovsSet, state.pmovs & guest);
        regs.write(Register::PmintenSet, state.pminten & guest);
        // Last: nothing counts before all of it is in place.
        regs.write(Register::PmcntenSet, state.pmcnten & guest);
        self.place = Place::Loaded;
    }

    /// A PMU is idle when nothing counts, nothing is pending, and EL0 may not touch it. (EL0
    /// accesses that PMUSERENR_EL0 allows must find it in the hardware: it is the hardware that
    /// refuses them, before EL2 sees them.)
    fn place_in_memory(&self) -> Place {
        let counts = self.state.pmcr & pmcr::E != 0 && self.state.pmcnten != 0;
        if counts || line(&self.state) || self.state.pmuserenr != 0 {
            Place::Saved
        } else {
            Place::Idle
        }
    }
}

const fn line(state: &PmuState) -> bool {
    state.pmcr & pmcr::E != 0 && state.pmovs & state.pminten != 0
}
