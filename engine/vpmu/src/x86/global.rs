//! What the global registers hold: which counters may count, which have overflowed, and the PMI that an overflow requests.

use core::mem;

use super::registers::Freeze;
use super::status;
use crate::counter::CounterSet;

/// The state behind the global control and status registers of one PMU.
#[derive(Clone, Debug)]
pub(super) struct Global {
    /// The global control register: the counters that it lets count. A frozen PMU keeps it, where freezing is a status
    /// bit.
    pub(super) gate: CounterSet,
    /// Counters' bits in the global status register.
    overflowed: CounterSet,
    /// The other bits of the global status register.
    status: u64,
    /// An overflow has requested a PMI that nobody has taken.
    pmi_due: bool,
    /// What the request of a PMI stops the counters by.
    freezing: Option<Freeze>,
    /// Whether the request of a PMI stops the last branch records.
    freezes_branches: bool,
}

impl Global {
    /// Returns the registers out of reset, which let `gate` count.
    pub(super) const fn new(gate: CounterSet) -> Self {
        Self {
            gate,
            overflowed: CounterSet::EMPTY,
            status: 0,
            pmi_due: false,
            freezing: None,
            freezes_branches: false,
        }
    }

    /// Continues from what a guest could see. What freezes is the registers' to say.
    pub(super) const fn restore(
        &mut self,
        gate: CounterSet,
        overflowed: CounterSet,
        status: u64,
        pmi_due: bool,
    ) {
        self.gate = gate;
        self.overflowed = overflowed;
        self.status = status;
        self.pmi_due = pmi_due;
    }

    /// Counters that the global registers let count.
    pub(super) const fn open(&self) -> CounterSet {
        // The register itself keeps its value, which the guest finds again when it thaws the counters.
        if self.status & status::COUNTERS_FROZEN != 0 {
            return CounterSet::EMPTY;
        }
        self.gate
    }

    pub(super) const fn overflowed(&self) -> CounterSet {
        self.overflowed
    }

    /// Bits of the global status register that are no counter's.
    pub(super) const fn status(&self) -> u64 {
        self.status
    }

    pub(super) fn clear_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed -= counters;
        self.status &= !others;
    }

    pub(super) fn set_status(&mut self, counters: CounterSet, others: u64) {
        self.overflowed |= counters;
        self.status |= others;
    }

    pub(super) const fn set_freezing(&mut self, freezing: Option<Freeze>, branches: bool) {
        self.freezing = freezing;
        self.freezes_branches = branches;
    }

    /// Whether the request of a PMI stops the counters.
    pub(super) const fn freezes_counters(&self) -> bool {
        self.freezing.is_some()
    }

    /// Whether the last branch records are frozen.
    pub(super) const fn are_branches_frozen(&self) -> bool {
        self.status & status::BRANCHES_FROZEN != 0
    }

    pub(super) const fn pmi_due(&self) -> bool {
        self.pmi_due
    }

    pub(super) const fn take_pmi(&mut self) -> bool {
        mem::replace(&mut self.pmi_due, false)
    }

    /// Requests a PMI, and stops what the guest wants stopped by it.
    pub(super) const fn request_pmi(&mut self) {
        self.pmi_due = true;
        // The request, not its delivery, stops the counters (SDM 18.4.7): LVTPC may be masked.
        match self.freezing {
            Some(Freeze::Gate) => self.gate = CounterSet::EMPTY,
            // Version 4 and later: the handler thaws by one write, which acknowledges the overflow, too.
            Some(Freeze::Status) => self.status |= status::COUNTERS_FROZEN,
            None => {}
        }
        if self.freezes_branches {
            self.status |= status::BRANCHES_FROZEN;
        }
    }
}
