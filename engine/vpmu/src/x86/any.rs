//! A PMU of either vendor: for embedders that choose at run time, by what the host is.

use super::{
    ArchEvent, CounterConfig, EventFilter, Outcome, PmuConfig, RestoreError, Ring, amd, intel, lbr,
    pebs,
};
use crate::counter::{Counter, CounterHost, CounterState, Events, Report, Statistics};

/// What a guest finds of its PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Capability {
    /// Intel's.
    Intel(intel::Capability),
    /// AMD's.
    Amd(amd::Capability),
}

impl Capability {
    /// Returns whether `event` is backed by a counter that counts what the guest chooses.
    pub const fn has_event(&self, event: ArchEvent) -> bool {
        match self {
            Self::Intel(capability) => capability.has_event(event),
            Self::Amd(capability) => capability.has_event(event),
        }
    }

    /// Returns every MSR of a PMU of this vendor's, for an integration to intercept; those of PEBS and of last branch
    /// records where they are offered.
    // From the capability alone: a VMM sets its filter before there is a vCPU.
    pub fn msrs(&self) -> impl Iterator<Item = u32> + use<> {
        let (intel, amd) = match self {
            Self::Intel(capability) => (Some(capability.pebs.is_some()), None),
            Self::Amd(_) => (None, Some(amd::Msr::all())),
        };
        let (intel_lbr, amd_lbr) = match self {
            Self::Intel(capability) => (capability.lbr.map(|_| lbr::intel::msrs()), None),
            Self::Amd(capability) => (None, capability.offered_lbr().map(|_| lbr::amd::msrs())),
        };
        let lbr = (intel_lbr.into_iter().flatten()).chain(amd_lbr.into_iter().flatten());
        let intel = intel.into_iter().flat_map(|has_pebs| {
            let offered = move |msr: &intel::Msr| has_pebs || !msr.is_of_pebs();
            intel::Msr::all().filter(offered)
        });
        let amd = amd.into_iter().flatten();
        intel
            .map(intel::Msr::address)
            .chain(amd.map(amd::Msr::address))
            .chain(lbr)
    }
}

impl From<intel::Capability> for Capability {
    fn from(capability: intel::Capability) -> Self {
        Self::Intel(capability)
    }
}

impl From<amd::Capability> for Capability {
    fn from(capability: amd::Capability) -> Self {
        Self::Amd(capability)
    }
}

/// A PMU's registers as one plain value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum PmuState {
    /// Intel's.
    Intel(intel::PmuState),
    /// AMD's.
    Amd(amd::PmuState),
}

/// One vCPU's PMU of either vendor: [`intel::Pmu`] or [`amd::Pmu`], whose documentation has what each call does.
#[derive(Clone, Debug)]
pub enum AnyPmu<V = ()> {
    /// Intel's.
    Intel(intel::Pmu<V>),
    /// AMD's.
    Amd(amd::Pmu<V>),
}

/// The same call, whichever it is.
// No trait object: the calls are generic over their host.
macro_rules! each {
    ($any:expr, $pmu:ident => $call:expr) => {
        match $any {
            AnyPmu::Intel($pmu) => $call,
            AnyPmu::Amd($pmu) => $call,
        }
    };
}

impl AnyPmu {
    /// Makes a PMU out of reset, for a vCPU that runs, without an observer.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn new(config: PmuConfig<Capability>) -> Result<Self, intel::ConfigError> {
        Self::with_events(config, ())
    }
}

impl<V: Events> AnyPmu<V> {
    /// Makes a PMU as [`new`](AnyPmu::new) does, and tells `events` what happens.
    ///
    /// # Errors
    ///
    /// Refuses a capability that cannot be.
    pub fn with_events(
        config: PmuConfig<Capability>,
        events: V,
    ) -> Result<Self, intel::ConfigError> {
        let PmuConfig {
            capability,
            filter,
            policy,
        } = config;
        Ok(match capability {
            Capability::Intel(capability) => Self::Intel(intel::Pmu::with_events(
                PmuConfig {
                    capability,
                    filter,
                    policy,
                },
                events,
            )?),
            // Nothing can be wrong here: no field of AMD's capability contradicts another.
            Capability::Amd(capability) => Self::Amd(amd::Pmu::with_events(
                PmuConfig {
                    capability,
                    filter,
                    policy,
                },
                events,
            )),
        })
    }

    /// Performs RDMSR of `address`.
    pub fn rdmsr<H: CounterHost<CounterConfig>>(&mut self, address: u32, host: &mut H) -> Outcome {
        each!(self, pmu => pmu.rdmsr(address, host))
    }

    /// Performs WRMSR of `address`.
    pub fn wrmsr<H: CounterHost<CounterConfig>>(
        &mut self,
        address: u32,
        value: u64,
        host: &mut H,
    ) -> Outcome {
        each!(self, pmu => pmu.wrmsr(address, value, host))
    }

    /// Performs RDPMC with this ECX by `ring`, with CR4.PCE.
    pub fn rdpmc<H: CounterHost<CounterConfig>>(
        &mut self,
        ecx: u32,
        ring: Ring,
        pce: bool,
        host: &mut H,
    ) -> Outcome {
        each!(self, pmu => pmu.rdpmc(ecx, ring, pce, host))
    }

    /// Takes a report of the host's. Returns whether a PMI is due.
    pub fn overflow<H: CounterHost<CounterConfig>>(
        &mut self,
        counter: Counter,
        report: Report,
        host: &mut H,
    ) -> bool {
        each!(self, pmu => pmu.overflow(counter, report, host))
    }

    /// Counts what no host event has seen. Returns whether a PMI is due.
    pub fn emulated<H: CounterHost<CounterConfig>>(
        &mut self,
        event: ArchEvent,
        times: u64,
        ring: Ring,
        host: &mut H,
    ) -> bool {
        each!(self, pmu => pmu.emulated(event, times, ring, host))
    }

    /// Returns whether a PMI has been requested and not taken.
    pub const fn pmi_due(&self) -> bool {
        each!(self, pmu => pmu.pmi_due())
    }

    /// Takes the PMI that is due, if one is.
    #[must_use = "the PMI is gone unless the caller delivers it"]
    pub const fn take_pmi(&mut self) -> bool {
        each!(self, pmu => pmu.take_pmi())
    }

    /// Starts counting: the vCPU runs.
    pub fn load<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        each!(self, pmu => pmu.load(host));
    }

    /// Stops counting: the vCPU does not run.
    pub fn put<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        each!(self, pmu => pmu.put(host));
    }

    /// Stops counting for a moment.
    pub fn hold<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        each!(self, pmu => pmu.hold(host));
    }

    /// Releases what the guest has not used: a scheduling slice has ended.
    pub fn end_slice<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        each!(self, pmu => pmu.end_slice(host));
    }

    /// Goes back to power-on reset, with every host event released.
    pub fn reset<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        each!(self, pmu => pmu.reset(host));
    }

    /// Changes which events the guest may count.
    pub fn set_filter<H: CounterHost<CounterConfig>>(&mut self, filter: EventFilter, host: &mut H) {
        each!(self, pmu => pmu.set_filter(filter, host));
    }

    /// Returns what the guest finds.
    pub fn capability(&self) -> Capability {
        match self {
            Self::Intel(pmu) => Capability::Intel(*pmu.capability()),
            Self::Amd(pmu) => Capability::Amd(*pmu.capability()),
        }
    }

    /// Returns how often the host was called, and what it could not do.
    pub const fn statistics(&self) -> Statistics {
        each!(self, pmu => pmu.statistics())
    }

    /// Returns what became of the overflows of counters that ask for PEBS records. AMD's PMU has none.
    pub fn pebs_statistics(&self) -> pebs::Statistics {
        each!(self, pmu => pmu.pebs_statistics())
    }

    /// Returns which branches the guest wants recorded now.
    pub fn branch_filter(&self) -> Option<lbr::Filter> {
        each!(self, pmu => pmu.branch_filter())
    }

    /// Returns how many branches more a PMI waits for.
    pub fn branches_awaited(&self) -> u8 {
        each!(self, pmu => pmu.branches_awaited())
    }

    /// Hands over a branch that the guest has taken. Returns whether a PMI is due.
    pub fn branch<H: CounterHost<CounterConfig>>(
        &mut self,
        branch: &lbr::Branch,
        host: &mut H,
    ) -> bool {
        each!(self, pmu => pmu.branch(branch, host))
    }

    /// Ends the following of the guest. Returns whether a PMI is due.
    pub fn end_following<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> bool {
        each!(self, pmu => pmu.end_following(host))
    }

    /// Drops the branches that were handed over for this PMI, because the embedder has missed later ones.
    pub fn lose_branches(&mut self) {
        each!(self, pmu => pmu.lose_branches());
    }

    /// Clears the bit that enables the last branch records, as INIT does. Returns whether it was set.
    pub fn disable_lbr<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> bool {
        each!(self, pmu => pmu.disable_lbr(host))
    }

    /// Returns what became of the branches that were handed over.
    pub fn lbr_statistics(&self) -> lbr::Statistics {
        each!(self, pmu => pmu.lbr_statistics())
    }

    /// Returns what `counter` is doing; `None` if there is no such counter.
    pub fn counter_state(&self, counter: Counter) -> Option<CounterState> {
        each!(self, pmu => pmu.counter_state(counter))
    }

    /// Returns all that the guest could find out, up to this moment.
    pub fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> PmuState {
        match self {
            Self::Intel(pmu) => PmuState::Intel(pmu.save(host)),
            Self::Amd(pmu) => PmuState::Amd(pmu.save(host)),
        }
    }

    /// Goes on from `state`, in place of what was here.
    ///
    /// # Errors
    ///
    /// Refuses a state of another vendor or kind, or with bits set that do not exist. This PMU is then as it was.
    pub fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        match (self, state) {
            (Self::Intel(pmu), PmuState::Intel(state)) => pmu.restore(state, host),
            (Self::Amd(pmu), PmuState::Amd(state)) => pmu.restore(state, host),
            (Self::Intel(_), PmuState::Amd(_)) | (Self::Amd(_), PmuState::Intel(_)) => {
                Err(RestoreError::Vendor)
            }
        }
    }
}
