//! The switch: a guest's registers go into the hardware and come back.

use super::pmu::{PMCR_CONTROL, PMSELR_MASK, Residence, overflowed};
use super::{MigrateError, PartitionedPmu, Plan, PmuRegisters};
use crate::arm::{PmuState, Register, RestoreError, fits, pmcr, pmuserenr};

impl PartitionedPmu {
    /// Loads the registers of a guest that is about to run here, if they are needed before its next trapped access. If
    /// not, this costs no register access.
    pub fn load<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.residence == Residence::Saved {
            self.load_registers(None, regs);
        }
    }

    /// As [`load`](Self::load), right after `left` was [`put`](Self::put) on this CPU: the hardware still has what
    /// `left` had there. Writes only registers whose values differ from those of `left`. Nothing may have accessed PMU
    /// registers of guests since.
    pub fn load_after<R: PmuRegisters>(&mut self, left: &Self, regs: &mut R) {
        if self.residence == Residence::Saved {
            self.load_registers(Some(left).filter(|left| left.is_left_behind), regs);
        }
    }

    /// Saves the registers of a guest that no longer runs here, if they are in the hardware. Stops its counters, and
    /// leaves no interrupt of the guest's asserted, no access for EL0, and a valid selection. If the registers are not
    /// in the hardware, this costs no register access. PMCR_EL0 stays as the guest left it.
    pub fn put<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.residence != Residence::Loaded {
            self.is_left_behind = false;
            return;
        }
        let (guest, taken) = (self.guest(), self.taken());
        let (hides_events, traps_everything) = (self.plan.hides_events(), self.traps_everything());
        let state = &mut self.state;
        // The bits of counters that are not in the hardware stay as they are.
        state.pmcnten = state.pmcnten & taken | regs.read(Register::PmcntenSet) & guest;
        regs.write(Register::PmcntenClr, guest);
        // Nothing of the guest's counts any more, so no overflow can come after this read and be
        // lost to the clear.
        state.pmovs = state.pmovs & taken | regs.read(Register::PmovsSet) & guest;
        regs.write(Register::PmovsClr, guest);
        state.pminten = state.pminten & taken | regs.read(Register::PmintenSet) & guest;
        regs.write(Register::PmintenClr, guest);
        state.pmcr = regs.read(Register::Pmcr) & PMCR_CONTROL | state.pmcr & pmcr::N_MASK;
        state.pmselr = regs.read(Register::Pmselr) & PMSELR_MASK;
        // PMXEVTYPER_EL0 with a selection that does not exist is undefined before it traps, and an
        // idle guest's next access is not to suffer from another's selection.
        let harmless = self.plan.harmless_selection();
        if state.pmselr != harmless {
            regs.write(Register::Pmselr, harmless);
        }
        if !traps_everything {
            state.pmuserenr = regs.read(Register::Pmuserenr);
        }
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
        self.residence = self.residence_in_memory();
        // What hides events puts other types into the hardware than its guest's.
        self.is_left_behind = !self.plan.hides_events();
    }

    /// Goes on with the plan of another CPU, before the first `load` there, or with another plan of this CPU: for
    /// instance with another event filter, or with more or fewer host counters.
    ///
    /// A guest keeps the number of counters that it has seen. Those that the plan does not give it keep their registers, do
    /// not count, and are [`Lost`](crate::counter::CounterState::Lost) where the guest has them count; every access traps
    /// until a plan gives them back. So the host may take a counter from the top while guests run: `put`, this, `load`.
    ///
    /// A guest that has not seen its PMU may get more counters. It loses those that this CPU lacks, but not those that
    /// the host keeps.
    ///
    /// The registers of a counter that the CPU lacks are UNDEFINED below EL2 before they could trap: a guest that has seen
    /// such a counter, and may access it, must not run there.
    ///
    /// # Errors
    ///
    /// [`MigrateError`], when the guest would notice; the PMU is unchanged. A guest that has not
    /// used its PMU notices nothing.
    pub fn migrate(&mut self, plan: Plan) -> Result<(), MigrateError> {
        match self.residence {
            Residence::Loaded => return Err(MigrateError::Loaded),
            Residence::Free => {
                // The next plan may give back what the host takes here, and a guest that meanwhile saw fewer could not have
                // it. What the CPU lacks no plan can give.
                let counters = self.state.counters().min(plan.implemented());
                let counters = counters.max(plan.hpmn());
                self.plan = plan;
                self.begin(counters);
                return Ok(());
            }
            Residence::Lazy | Residence::Saved => {}
        }
        let (guest, offered) = (self.state.counters(), plan.hpmn());
        if guest < offered {
            return Err(MigrateError::Counters { guest, offered });
        }
        let (guest, offered) = (self.plan.version(), plan.version());
        if guest != offered {
            return Err(MigrateError::Version { guest, offered });
        }
        self.plan = plan;
        self.is_left_behind = false;
        Ok(())
    }

    /// Returns the guest's registers, without the bits that hardware keeps but that are RES0 for a guest of this version
    /// without EL2 and EL3. A loaded PMU is put first.
    pub fn save<R: PmuRegisters>(&mut self, regs: &mut R) -> PmuState {
        let mut state = PmuState::reset(self.plan.version(), 0);
        self.save_into(&mut state, regs);
        state
    }

    /// As [`save`](Self::save), into a state that is there already, whatever it holds.
    pub fn save_into<R: PmuRegisters>(&mut self, state: &mut PmuState, regs: &mut R) {
        self.put(regs);
        state.clone_from(&self.state);
        state.pmcr &= pmcr::N_MASK | pmcr::kept(self.plan.version());
        state.pmuserenr &= pmuserenr::MASK;
        state.pmccfiltr = Plan::kept_pmccfiltr(state.pmccfiltr).0;
        for event_type in &mut state.pmevtyper {
            *event_type = self.plan.kept_pmevtyper(*event_type).0;
        }
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
        self.state.clone_from(state);
        self.is_left_behind = false;
        self.residence = self.residence_in_memory();
        Ok(())
    }

    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        state.check(self.plan.version(), self.state.counters())?;
        let sets = [
            (Register::PmcntenSet, state.pmcnten),
            (Register::PmintenSet, state.pminten),
            (Register::PmovsSet, state.pmovs),
        ];
        for (register, value) in sets {
            fits(register.name(), value, self.guest() | self.taken())?;
        }
        Ok(())
    }

    /// The guest accesses its PMU, which must be in the hardware for that.
    pub(super) fn touch<R: PmuRegisters>(&mut self, regs: &mut R) {
        if self.residence != Residence::Loaded {
            self.load_registers(None, regs);
        }
    }

    /// Writes the guest's registers, but for those that the hardware has already: it has what `left` had, or with `None`
    /// anything.
    fn load_registers<R: PmuRegisters>(&mut self, left: Option<&Self>, regs: &mut R) {
        let (guest, state) = (self.guest(), &self.state);
        let mut change = |register, value, has: Option<u64>| {
            if has != Some(value) {
                regs.write(register, value);
            }
        };
        let cleared = left.map_or(0, Self::guest);
        for clear in [
            Register::PmcntenClr,
            Register::PmintenClr,
            Register::PmovsClr,
        ] {
            // A clear of nothing changes nothing, and the put has cleared those of the other guest.
            change(clear, guest & !cleared, Some(0));
        }
        let has = |of: fn(&PmuState) -> u64| left.map(|left| of(&left.state));
        let control = |state: &PmuState| state.pmcr & PMCR_CONTROL;
        change(Register::Pmcr, control(state), has(control));
        let counters = state.pmevcntr.iter().zip(&state.pmevtyper);
        for (n, (count, event_type)) in (0..self.plan.hpmn()).zip(counters) {
            let i = usize::from(n);
            // The counters above are not the guest's that left.
            let left = left
                .filter(|left| n < left.plan.hpmn())
                .map(|left| &left.state);
            let event_type = self.plan.loaded_pmevtyper(n, *event_type);
            let had = left.and_then(|left| left.pmevtyper.get(i).copied());
            change(Register::Pmevtyper(n), event_type, had);
            let had = left.and_then(|left| left.pmevcntr.get(i).copied());
            change(Register::Pmevcntr(n), *count, had);
        }
        let filter = self.plan.loaded_pmccfiltr(state.pmccfiltr);
        change(Register::Pmccfiltr, filter, has(|state| state.pmccfiltr));
        change(Register::Pmccntr, state.pmccntr, has(|state| state.pmccntr));
        let selected = left.map(|left| left.plan.harmless_selection());
        change(Register::Pmselr, state.pmselr & PMSELR_MASK, selected);
        // The put has taken EL0's access away.
        let user = self.pmuserenr(state.pmuserenr);
        change(Register::Pmuserenr, user, left.map(|_| 0));
        // To set nothing changes nothing.
        change(Register::PmovsSet, state.pmovs & guest, Some(0));
        change(Register::PmintenSet, state.pminten & guest, Some(0));
        // Last: nothing counts before all of it is in place.
        change(Register::PmcntenSet, state.pmcnten & guest, Some(0));
        self.residence = Residence::Loaded;
        self.is_left_behind = false;
    }

    /// A PMU is idle when nothing counts, nothing is pending, and EL0 may not touch it. (EL0
    /// accesses that PMUSERENR_EL0 allows must find it in the hardware: it is the hardware that
    /// refuses them, before EL2 sees them.)
    fn residence_in_memory(&self) -> Residence {
        let counts = self.state.pmcr & pmcr::E != 0 && self.state.pmcnten != 0;
        let pends = overflowed(&self.state) != 0;
        if self.eager || counts || pends || self.state.pmuserenr != 0 {
            Residence::Saved
        } else {
            Residence::Lazy
        }
    }
}
