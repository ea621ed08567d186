//! A PMU as a value, for migration, snapshots and tests.

use super::registers::COUNTER;
use super::{Capability, Interface, MAX_COUNTERS, Registers, perf_ctl};
use crate::counter::{Counter, CounterSet};
use crate::x86::registers::Counted;
use crate::x86::restore::{fits, layout_fits, lbr_fits};
use crate::x86::{RawPerfEvtSel, RestoreError, lbr};

/// Everything a guest could find out about its PMU, and nothing of the host below it: two PMUs with equal states
/// are the same to their guests.
///
/// Registers are held as the guest reads them. Those that do not exist are zero.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PmuState {
    /// The layout of this value: [`PmuState::LAYOUT`].
    pub layout: u16,
    /// How the guest reaches its counters.
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
    // In no register: without it, an overflow shortly before the save would never interrupt.
    pub pmi_due: bool,
    /// The registers of the last branch records, where the guest has them.
    pub lbr: Option<lbr::amd::State>,
}

impl PmuState {
    /// The layout this engine writes and reads.
    // Another number for each change of the fields: an older engine then refuses a state that it would misread.
    pub const LAYOUT: u16 = 2;
}

impl PmuState {
    /// Returns what a guest can see of its registers and counters.
    pub(super) fn save(registers: &Registers, counted: &Counted, lbr: Option<&lbr::Unit>) -> Self {
        let interface = registers.capability.interface;
        // What a guest cannot read is zero, so that equal guests have equal states. The engine's own note of who has
        // overflowed goes with it, which costs the next owner of the state a call and no count.
        let global = |counters: CounterSet| match interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => counters.bits().into(),
        };
        let mut state = Self {
            layout: Self::LAYOUT,
            interface,
            perf_ctl: [0; MAX_COUNTERS as usize],
            perf_ctr: [0; MAX_COUNTERS as usize],
            global_ctl: global(counted.gate),
            global_status: global(counted.overflowed) | counted.status,
            pmi_due: counted.pmi_due,
            lbr: lbr.and_then(lbr::Unit::save_amd),
        };
        for ((n, value), raw) in Counter::all()
            .zip(&mut state.perf_ctr)
            .zip(&mut state.perf_ctl)
        {
            *value = counted.values[n];
            *raw = registers.selects[n].0;
        }
        state
    }

    /// Puts a state that was [checked](Self::check) into `registers`, and returns what is not theirs.
    pub(super) fn restore(
        &self,
        registers: &mut Registers,
        lbr: Option<&mut lbr::Unit>,
    ) -> Counted {
        let mut counted = Counted {
            pmi_due: self.pmi_due,
            // Interfaces without the register let every counter count.
            gate: registers.capability.counters(),
            ..Counted::default()
        };
        for ((n, &value), &raw) in Counter::all().zip(&self.perf_ctr).zip(&self.perf_ctl) {
            counted.values[n] = value;
            registers.selects[n] = RawPerfEvtSel(raw);
        }
        if self.interface >= Interface::V2 {
            counted.gate = CounterSet::from_bits(self.global_ctl as u32);
            counted.overflowed = CounterSet::from_bits(self.global_status as u32);
            counted.status = self.global_status & registers.capability.status_bits();
        }
        if let (Some(unit), Some(state)) = (lbr, &self.lbr) {
            unit.restore_amd(state);
        }
        counted
    }

    /// Refuses a state of another layout or interface, or with bits set that do not exist.
    pub(super) fn check(&self, capability: &Capability) -> Result<(), RestoreError> {
        layout_fits(self.layout, Self::LAYOUT)?;
        if self.interface != capability.interface {
            return Err(RestoreError::Interface {
                saved: self.interface,
                offered: capability.interface,
            });
        }
        for ((n, &value), &raw) in Counter::all().zip(&self.perf_ctr).zip(&self.perf_ctl) {
            // No bit of a counter that does not exist.
            let (control, counter) = match capability.counters().contains(n) {
                true => (perf_ctl::EXISTING, COUNTER),
                false => (0, 0),
            };
            fits("PERF_CTL", raw, !control)?;
            // A value beyond the width would make the distance to an overflow negative.
            fits("PERF_CTR", value, !counter)?;
        }
        let global = match self.interface {
            Interface::Legacy | Interface::Core => 0,
            Interface::V2 => capability.counters().bits().into(),
        };
        fits("PerfCntrGlobalCtl", self.global_ctl, !global)?;
        let status = global | capability.status_bits();
        fits("PerfCntrGlobalStatus", self.global_status, !status)?;
        let lbr = capability.offered_lbr();
        lbr_fits(self.lbr.as_ref(), lbr.as_ref(), lbr::amd::State::check)
    }
}
