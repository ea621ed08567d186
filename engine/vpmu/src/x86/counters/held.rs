//! The PMI, and what waits for the guest's branches before it: the PMI itself, and PEBS records that have branches.

use core::mem;

use super::Counters;
use crate::counter::{Counter, CounterHost, CounterSet, Events, Model};
use crate::x86::registers::Freeze;
use crate::x86::{CounterConfig, status};

impl<V: Events> Counters<V> {
    /// Nothing waits from now on until the guest has been followed.
    pub(in crate::x86) const fn hold_no_pmis(&mut self) {
        self.holds_pmis = false;
    }

    /// Finds out anew whether PMIs and records have to wait for branches, and returns that. `follows`: the embedder follows
    /// its guest for them alone.
    pub(in crate::x86) fn hold_pmis(&mut self, follows: bool) -> bool {
        let frozen = self.are_branches_frozen();
        self.holds_pmis = (self.lbr.as_mut()).is_some_and(|lbr| lbr.arm(frozen, follows));
        self.holds_pmis
    }

    /// Whether something waits until the guest has been followed.
    pub(in crate::x86) const fn is_anything_held(&self) -> bool {
        self.pmi_held || !self.records_held.is_empty()
    }

    /// The guest has been followed: the records that have waited for it are written, and the PMI is requested.
    pub(in crate::x86) fn release_held<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // What comes of the records has its branches.
        self.hold_no_pmis();
        let recorded = mem::take(&mut self.records_held);
        self.unrecorded |= recorded;
        self.follow_up(host);
        for n in recorded {
            // A host event that is asked anew is further than what it has reported.
            if self.due(n) != self.bank.hosted.armed(n) {
                self.settle(n.alone(), host);
            }
        }
        if let Some(lbr) = &mut self.lbr {
            lbr.end_run();
        }
        if mem::take(&mut self.pmi_held) {
            self.request_now();
        }
    }

    /// An interrupt is requested, or will be once the guest has been followed.
    pub(in crate::x86) fn request_pmi(&mut self) {
        match self.begin_run() {
            true => self.pmi_held = true,
            false => self.request_now(),
        }
    }

    /// The record of `n` is to be written once the guest has been followed. `false`: it has to be written now.
    pub(in crate::x86) fn hold_record(&mut self, n: Counter) -> bool {
        let holds = self.begin_run();
        self.records_held.put(n, holds);
        holds
    }

    /// Begins to wait for branches, or goes on. `false`: nothing is to wait for any.
    fn begin_run(&mut self) -> bool {
        // Only once: a PMI that is due already finds the records that there are.
        let begins = self.holds_pmis && !self.pmi_due;
        if begins && let Some(lbr) = &mut self.lbr {
            lbr.begin_run();
        }
        begins
    }

    /// The request, not its delivery, stops the counters if the guest wants that (SDM 18.4.7): LVTPC may be masked.
    fn request_now(&mut self) {
        self.pmi_due = true;
        match self.freezing {
            Some(Freeze::Gate) => self.gate = CounterSet::EMPTY,
            Some(Freeze::Status) => self.status |= status::COUNTERS_FROZEN,
            None => {}
        }
        if self.freezes_branches {
            self.status |= status::BRANCHES_FROZEN;
        }
    }
}
