//! A PMU as a value, for migration, snapshots and tests.

use core::fmt;

use super::registers::COUNTER;
use super::{Interface, MAX_COUNTERS, Pmu, perf_ctl};
use crate::counter::{CounterHost, CounterSet, Events, Model};
use crate::x86::{CounterConfig, RawPerfEvtSel};

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs with equal states
/// are the same to their guests.
///
/// Registers are held as the guest reads them. Those that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// How the guest was told to reach its counters.
    pub interface: Interface,
    /// PERF_CTL.
    pub perf_ctl: [u64; MAX_COUNTERS as usize],
    /// PERF_CTR.
    pub perf_ctr: [u64; MAX_COUNTERS as usize],
    /// PerfCntrGlobalCtl.
    pub global_ctl: u64,
    /// PerfCntrGlobalStatus.
    pub global_status: u64,
    /// A PMI has been requested and not taken.
    pub pmi_due: bool,
}

impl PmuState {
    /// The layout this engine writes and reads.
    pub const LAYOUT: u16 = 1;
}

impl<V: Events> Pmu<V> {
    /// All that the guest could find out, up to this moment. Nothing stops: the PMU can go on.
    ///
    /// Not saved: what belongs to the machine rather than the guest (events, filter, policy).
    pub fn save<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) -> PmuState {
        self.settle(self.unsettled(), host);
        self.apply(host);
        let interface = self.registers.capability.interface;
        let global = |counters: CounterSet| match interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => counters.bits().into(),
        };
        let mut state = PmuState {
            layout: PmuState::LAYOUT,
            interface,
            perf_ctl: [0; MAX_COUNTERS as usize],
            perf_ctr: [0; MAX_COUNTERS as usize],
            global_ctl: global(self.registers.global),
            global_status: global(self.overflowed),
            pmi_due: self.pmi_due,
        };
        for ((n, value), raw) in (0..).zip(&mut state.perf_ctr).zip(&mut state.perf_ctl) {
            *value = self.bank.counters[n].value;
            *raw = self.registers.selects[n].0;
        }
        state
    }

    /// Goes on from `state`, in place of what was here: on a vCPU that runs, what is enabled counts at once.
    ///
    /// # Errors
    ///
    /// Refuses a state of another layout or interface, or with bits set that do not exist. This PMU is then as it
    /// was.
    pub fn restore<H: CounterHost<CounterConfig>>(
        &mut self,
        state: &PmuState,
        host: &mut H,
    ) -> Result<(), RestoreError> {
        self.check_state(state)?;
        self.reset(host);
        for ((n, &value), &raw) in (0..).zip(&state.perf_ctr).zip(&state.perf_ctl) {
            self.bank.counters[n].value = value;
            self.registers.selects[n] = RawPerfEvtSel(raw);
        }
        if state.interface >= Interface::V2 {
            self.registers.global = CounterSet::from_bits(state.global_ctl as u32);
            self.overflowed = CounterSet::from_bits(state.global_status as u32);
        }
        self.pmi_due = state.pmi_due;
        self.classify(self.implemented());
        self.apply(host);
        Ok(())
    }

    fn check_state(&self, state: &PmuState) -> Result<(), RestoreError> {
        let capability = &self.registers.capability;
        if state.layout != PmuState::LAYOUT {
            return Err(RestoreError::Layout {
                saved: state.layout,
            });
        }
        if state.interface != capability.interface {
            return Err(RestoreError::Interface {
                saved: state.interface,
                offered: capability.interface,
            });
        }
        let fits = |register, value: u64, existing: u64| {
            if value & !existing == 0 {
                Ok(())
            } else {
                Err(RestoreError::Reserved { register, value })
            }
        };
        for ((n, &value), &raw) in (0..).zip(&state.perf_ctr).zip(&state.perf_ctl) {
            let when = |existing| if n < capability.count() { existing } else { 0 };
            fits("PERF_CTL", raw, when(perf_ctl::EXISTING))?;
            fits("PERF_CTR", value, when(COUNTER))?;
        }
        let global = match state.interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => capability.counters().bits().into(),
        };
        fits("PerfCntrGlobalCtl", state.global_ctl, global)?;
        fits("PerfCntrGlobalStatus", state.global_status, global)
    }
}

/// Why a saved PMU cannot go on here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RestoreError {
    /// Written by an engine with another layout.
    Layout {
        /// What the state says.
        saved: u16,
    },
    /// The guest was told to reach its counters otherwise.
    Interface {
        /// What the state says.
        saved: Interface,
        /// What this PMU offers.
        offered: Interface,
    },
    /// A register holds bits that do not exist here: the state is damaged or from elsewhere.
    Reserved {
        /// The register's name.
        register: &'static str,
        /// What the state says.
        value: u64,
    },
}

impl fmt::Display for RestoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Layout { saved } => write!(
                f,
                "restore a PMU state of layout {saved}: this engine reads {}",
                PmuState::LAYOUT
            ),
            Self::Interface { saved, offered } => write!(
                f,
                "restore a guest of the interface {saved:?} to a PMU with {offered:?}"
            ),
            Self::Reserved { register, value } => write!(
                f,
                "restore {register} = {value:#x}: reserved bits are set in the saved state"
            ),
        }
    }
}

impl core::error::Error for RestoreError {}
