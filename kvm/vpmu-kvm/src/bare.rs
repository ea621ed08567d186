//! The PMU of a vCPU that the VMM reaches by an abstraction of its own.

use std::sync::{Arc, Mutex};

use vpmu::counter::{Counter, CounterState};
use vpmu::x86::{Capability, Outcome, Ring};
use vpmu_perf::{Backing, Kick, PerfHost};

use crate::Statistics;
use crate::error::Error;
use crate::lapic::Pmi;
use crate::offer::{self, Offer, Pmu};
use crate::options::Options;
use crate::pmu::Core;
use crate::state::State;
use crate::thread::Thread;
use crate::vcpu::restore;

/// One vCPU's architectural PMU without the vCPU's descriptor. The VMM hands over each access
/// ([`rdmsr`](Self::rdmsr), [`wrmsr`](Self::wrmsr), [`rdpmc`](Self::rdpmc)) and delivers each interrupt
/// ([`take_pmi`](Self::take_pmi)). All else is as with [`Vcpu`](crate::Vcpu).
#[derive(Debug)]
pub struct BarePmu {
    core: Core<PerfHost>,
    thread: Thread,
    options: Options,
}

impl BarePmu {
    /// Makes the PMU, out of reset, of a guest whose TSC runs at `tsc_hz`. `kick` is the way in which an overflow keeps
    /// the vCPU from entering the guest.
    ///
    /// # Errors
    ///
    /// When this process may not count guests, when the host cannot count what is offered, or when PEBS is offered,
    /// whose records need more than the VMM hands over.
    pub fn new(
        capability: Capability,
        options: &Options,
        tsc_hz: u64,
        kick: Kick,
    ) -> Result<Self, Error> {
        // The ring of a sample and the guest's memory are not among what such a VMM hands over.
        if offer::has_pebs(&capability) {
            return Err(Error::BarePebs);
        }
        if Offer::from(capability).has_lbr() {
            return Err(Error::Lbr(
                "they need the guest's registers and memory (Vcpu::attach)",
            ));
        }
        let core = Core::architectural(capability, options.policy)?;
        let pmu = Pmu::Architectural(capability);
        Ok(Self {
            thread: Thread::new(&pmu, options, kick, tsc_hz)?,
            core,
            options: options.clone(),
        })
    }

    /// Returns the PMU that the guest is offered. A restored state may have brought another than that of
    /// [`new`](Self::new).
    pub fn offer(&self) -> Pmu {
        self.core.offer()
    }

    /// Returns the backing that counts.
    pub fn backing(&self) -> Backing {
        self.thread.backing
    }

    /// Returns the state of `counter`, or `None` if there is no such counter. Counters are numbered as in the engine.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        self.core.counter_state(counter)
    }

    /// Returns the PMU's cost, which any thread may read. Calls of the host are at most 64 runs old, and up to this
    /// moment where the vCPU's thread asks.
    pub fn statistics(&self) -> Arc<Mutex<Statistics>> {
        self.core.publish_all();
        self.core.shared_statistics()
    }

    /// Takes the overflows. Call this on the vCPU's thread right before each run. Nothing may clear the kick's flag in
    /// between.
    ///
    /// # Errors
    ///
    /// When perf refuses.
    pub fn before_run(&mut self) -> Result<(), Error> {
        // No vCPU can be asked for its ring here, so that a clock's counter of one ring goes by perf's last sample.
        let host = |_, perf| Ok(PerfHost::new(perf)?);
        let rate = self.thread.perf.tsc_hz;
        self.thread.before_run(&mut self.core, || Ok(rate), host)
    }

    /// Performs RDMSR of `index`.
    pub fn rdmsr(&mut self, index: u32) -> Outcome {
        self.core.take_overflows();
        self.core.rdmsr(index)
    }

    /// Performs WRMSR of `index`.
    pub fn wrmsr(&mut self, index: u32, value: u64) -> Outcome {
        self.core.take_overflows();
        self.core.wrmsr(index, value)
    }

    /// Performs RDPMC by the guest's kernel with `index` in ECX.
    pub fn rdpmc(&mut self, index: u32) -> Outcome {
        self.core.take_overflows();
        self.core.rdpmc(index, Ring::Kernel)
    }

    /// Returns whether a PMI is due, so that the VMM has to read LVTPC.
    pub fn pmi_is_due(&self) -> bool {
        self.core.pmi_is_due()
    }

    /// Takes the PMI that is due, for the VMM to deliver as `lvtpc` says. `None`: no PMI is due, or LVTPC masks it.
    pub fn take_pmi(&mut self, lvtpc: u32) -> Option<Pmi> {
        self.core.take_pmi(lvtpc)
    }

    /// Returns the PMU's state up to this moment, in which the guest does not run. Nothing stops: the guest can go on.
    pub fn save(&mut self) -> State {
        self.core.take_overflows();
        State::new(Some(self.core.save()), None)
    }

    /// Continues from `state`, in place of the present state, with the PMU that its guest was offered. The statistics
    /// stay.
    ///
    /// # Errors
    ///
    /// When this host cannot count the events that the guest was offered, or the state is none of such a PMU. The PMU
    /// then stays as it was.
    pub fn restore(&mut self, state: &State) -> Result<(), Error> {
        state.check()?;
        match &state.pmu {
            Some(saved) if !state.offer().has_pebs() => {
                restore(&mut self.core, saved, &self.options)
            }
            // A page, a deadline and records need the guest's memory.
            _ => Err(Error::OtherOffer),
        }
    }

    /// Resets the PMU, as its vCPU is reset, and drops an interrupt that is due. The statistics stay.
    pub fn reset(&mut self) {
        self.core.reset();
    }
}
