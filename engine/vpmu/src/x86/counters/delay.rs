//! PMIs and PEBS records that wait for the guest's branches.
//!
//! An embedder that [follows](crate::counter::CounterHost::follows_branches) its guest hands branches over only while
//! something waits for them. So the PMI, and a record that has branches, are delayed until then.

use super::Counters;
use crate::counter::{CounterHost, Events, Model};
use crate::x86::CounterConfig;

impl<V: Events> Counters<V> {
    /// Finds out anew whether PMIs and records have to wait for branches, and returns that. `follows`: the embedder follows
    /// its guest for them alone.
    pub(in crate::x86) fn find_delays(&mut self, follows: bool) -> bool {
        let frozen = self.global.are_branches_frozen();
        self.lbr.find_delays(frozen, follows)
    }

    /// The guest has been followed: the records that have waited for it are written, and the PMI is requested.
    pub(in crate::x86) fn end_delay<H: CounterHost<CounterConfig>>(&mut self, host: &mut H) {
        // What comes of the records has its branches.
        self.lbr.delays = false;
        let recorded = core::mem::take(&mut self.lbr.records_delayed);
        self.pebs.unrecorded |= recorded;
        self.follow_up(host);
        for n in recorded {
            // Reading the host event again returns more than its last report.
            if self.due(n) != self.bank.hosted.armed(n) {
                self.settle(n.alone(), host);
            }
        }
        if self.lbr.end_run() {
            self.global.request_pmi(self.freezing);
        }
    }

    /// Requests a PMI, or has it wait until the guest has been followed.
    pub(in crate::x86) fn request_pmi(&mut self) {
        if !self.lbr.delay_pmi(self.global.pmi_due) {
            self.global.request_pmi(self.freezing);
        }
    }
}
