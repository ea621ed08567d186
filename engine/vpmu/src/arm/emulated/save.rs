//! An emulated PMU as a value.

use super::EmulatedPmu;
use crate::arm::{
    CYCLE_COUNTER, CounterConfig, PmuState, RawPmevtyper, RestoreError, fits, pmcr, pmuserenr,
};
use crate::counter::{Counter, CounterHost, CounterSet, Events, Model};

impl<V: Events> EmulatedPmu<V> {
    /// Returns all that the guest could find out, up to this moment. Nothing stops: the PMU can go on.
    ///
    /// Not saved: where the divider of PMCR_EL0.D stands, at most 63 cycles, and what belongs to
    /// the machine rather than the guest (identity, events, filter).
    pub fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> PmuState {
        let mut state = PmuState::reset(self.config.version, self.config.counters);
        self.save_into(&mut state, host);
        state
    }

    /// As [`save`](Self::save), into a state that is there already, whatever it holds.
    pub fn save_into<H: CounterHost<CounterConfig>>(&mut self, state: &mut PmuState, host: &mut H) {
        // First: a count that is taken can set a bit of PMOVS.
        self.settle(self.unsettled(), host);
        *state = PmuState::reset(self.config.version, self.config.counters);
        state.pmcr |= self.pmcr;
        state.pmcnten = self.enabled.bits().into();
        state.pminten = self.interrupting.bits().into();
        state.pmovs = self.overflowed.bits().into();
        state.pmselr = self.pmselr.into();
        state.pmuserenr = self.pmuserenr;
        state.pmccntr = self.bank.counters[CYCLE_COUNTER].value;
        state.pmccfiltr = self.types[CYCLE_COUNTER].0;
        for ((n, value), raw) in Counter::all()
            .zip(&mut state.pmevcntr)
            .zip(&mut state.pmevtyper)
        {
            *value = self.bank.counters[n].value;
            *raw = self.types[n].0;
        }
    }

    /// Goes on from `state`, in place of what was here: on a vCPU that runs, what is enabled
    /// counts at once. PMCR_EL0.{IMP, IDCODE} in `state` are ignored.
    ///
    /// # Errors
    ///
    /// Refuses a state of another layout, PMU version or number of counters, or with bits set that
    /// do not exist. This PMU is then as it was.
    pub fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        self.check(state)?;
        // A host event that went on would add what it has counted to the restored value.
        self.reset(host);
        self.set_registers(state);
        // Only now: a host event must not start with half of the registers in place.
        self.apply(host);
        Ok(())
    }

    /// Does what [`restore`](Self::restore) does, with less stack. Call it between a [`put`](Self::put) and a
    /// [`load`](Self::load), which starts what is enabled.
    ///
    /// # Errors
    ///
    /// As [`restore`](Self::restore), and [`RestoreError::Loaded`].
    pub fn restore_put<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        if self.bank.loaded {
            return Err(RestoreError::Loaded);
        }
        self.check(state)?;
        self.reset(host);
        self.set_registers(state);
        Ok(())
    }

    /// Returns whether the vCPU runs: a [`put`](Self::put) ends that, and a [`load`](Self::load) begins it.
    pub const fn is_loaded(&self) -> bool {
        self.bank.loaded
    }

    fn set_registers(&mut self, state: &PmuState) {
        self.pmcr = self.kept_pmcr(state.pmcr);
        self.enabled = CounterSet::from_bits(state.pmcnten as u32);
        self.interrupting = CounterSet::from_bits(state.pminten as u32);
        self.overflowed = CounterSet::from_bits(state.pmovs as u32);
        self.pmselr = state.pmselr as u8;
        self.pmuserenr = state.pmuserenr;
        self.bank.counters[CYCLE_COUNTER].value = state.pmccntr;
        self.types[CYCLE_COUNTER] = RawPmevtyper(state.pmccfiltr);
        for ((n, &value), &raw) in Counter::all().zip(&state.pmevcntr).zip(&state.pmevtyper) {
            self.bank.counters[n].value = value;
            self.types[n] = RawPmevtyper(raw);
        }
        self.reclassify(self.implemented());
    }

    fn check(&self, state: &PmuState) -> Result<(), RestoreError> {
        state.check(self.config.version, self.config.counters)?;
        // A guest may go on on a CPU of another implementer: these two fields say who made the PMU, not what it has.
        let identity = 0xffff << pmcr::IDENTITY_SHIFT;
        let sets = self.implemented().bits().into();
        let RawPmevtyper(cycle_filter) = RawPmevtyper(u64::MAX).for_guest_cycles(self.config.el3);
        let RawPmevtyper(event_type) =
            RawPmevtyper(u64::MAX).for_guest(self.config.version, self.config.el3);
        fits(
            "PMCR_EL0",
            state.pmcr,
            pmcr::kept(self.config.version) | pmcr::N_MASK | identity,
        )?;
        fits("PMCNTENSET_EL0", state.pmcnten, sets)?;
        fits("PMINTENSET_EL1", state.pminten, sets)?;
        fits("PMOVSSET_EL0", state.pmovs, sets)?;
        fits("PMSELR_EL0", state.pmselr, 0x1f)?;
        fits("PMUSERENR_EL0", state.pmuserenr, pmuserenr::MASK)?;
        fits("PMCCFILTR_EL0", state.pmccfiltr, cycle_filter)?;
        for ((n, &value), &raw) in (0..).zip(&state.pmevcntr).zip(&state.pmevtyper) {
            // A counter that does not exist reads as zero, so a value there is damage.
            let exists = if n < self.config.counters {
                u64::MAX
            } else {
                0
            };
            fits(
                "PMEVCNTRn_EL0",
                value,
                exists & self.config.version.counter_mask(),
            )?;
            fits("PMEVTYPERn_EL0", raw, exists & event_type)?;
        }
        Ok(())
    }
}
