//! PMIs and PEBS records that wait for the guest's branches.
//!
//! An embedder that [follows](crate::counter::CounterHost::follows_branches) its guest hands branches over only while
//! something waits for them. So the PMI, and a record that has branches, are delayed until then.

use super::Counters;
use crate::counter::{Counter, CounterHost, Events, Model};
use crate::x86::{CounterConfig, lbr};

impl<V: Events> Counters<V> {
    /// Finds out anew whether PMIs and records have to wait for branches, and returns that. `follows`: the embedder follows
    /// its guest for them alone.
    pub(in crate::x86) fn find_delays(&mut self, follows: bool) -> bool {
        let frozen = self.global.are_branches_frozen();
        (self.lbr.as_mut()).is_some_and(|lbr| lbr.find_delays(frozen, follows))
    }

    /// Whether something waits until the guest has been followed.
    pub(in crate::x86) fn is_anything_delayed(&self) -> bool {
        (self.lbr.as_ref()).is_some_and(lbr::Unit::is_anything_delayed)
    }

    /// The guest has been followed: the records that have waited for it are written, and the PMI is requested.
    pub(in crate::x86) fn end_delay<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        let Some(lbr) = &mut self.lbr else {
            return;
        };
        // What comes of the records has its branches.
        lbr.delays = false;
        let recorded = core::mem::take(&mut lbr.records_delayed);
        self.pebs.unrecorded |= recorded;
        self.follow_up(host);
        for n in recorded {
            // Reading the host event again returns more than its last report.
            if self.due(n) != self.bank.hosted.armed(n) {
                self.settle(n.alone(), host);
            }
        }
        if self.lbr.as_mut().is_some_and(lbr::Unit::end_run) {
            self.global.request_pmi(self.freezing);
        }
    }

    /// Requests a PMI, or has it wait until the guest has been followed.
    pub(in crate::x86) fn request_pmi(&mut self) {
        let due = self.global.pmi_due;
        if !(self.lbr.as_mut()).is_some_and(|lbr| lbr.delay_pmi(due)) {
            self.global.request_pmi(self.freezing);
        }
    }

    /// The record of `n` is to be written once the guest has been followed. `false`: it has to be written now.
    pub(super) fn delay_record(&mut self, n: Counter) -> bool {
        let due = self.global.pmi_due;
        (self.lbr.as_mut()).is_some_and(|lbr| lbr.delay_record(n, due))
    }
}
