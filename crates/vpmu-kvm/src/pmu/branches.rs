//! Branches that the guest has taken, for its last branch records.

use vpmu::counter::CounterHost;
use vpmu::x86::CounterConfig;
use vpmu::x86::lbr::{Branch, Filter};

use super::Core;
use crate::Exit;

impl<H: CounterHost<CounterConfig>> Core<H> {
    /// Returns how many branches more a PMI waits for; 0: none waits.
    pub(crate) fn branches_awaited(&mut self) -> u8 {
        let pmu = self.engine.architectural_mut();
        pmu.map_or(0, |pmu| pmu.branches_awaited())
    }

    /// Returns which branches the guest wants recorded.
    pub(crate) fn branch_filter(&mut self) -> Option<Filter> {
        self.engine.architectural_mut()?.branch_filter()
    }

    /// The guest has taken `branches`, the oldest first.
    pub(crate) fn take_branches<'a>(&mut self, branches: impl Iterator<Item = &'a Branch>) {
        if let Some(pmu) = self.engine.architectural_mut() {
            for branch in branches {
                pmu.branch(branch, &mut self.host);
            }
        }
    }

    /// What was handed over are not the last branches that the guest has taken.
    pub(crate) fn lose_branches(&mut self) {
        if let Some(pmu) = self.engine.architectural_mut() {
            pmu.lose_branches();
        }
    }

    /// The guest is followed no longer.
    pub(crate) fn end_following(&mut self) {
        if let Some(pmu) = self.engine.architectural_mut() {
            pmu.end_following(&mut self.host);
        }
    }

    /// Nothing counts until [`load`](Self::load), where following the guest would be counted: by a clock, whose time goes
    /// on in the host.
    pub(crate) fn hold(&mut self) {
        if !self.misses_completed
            && let Some(pmu) = self.engine.architectural_mut()
        {
            pmu.hold(&mut self.host);
        }
    }

    /// Counts an exit by which the guest was followed.
    pub(crate) fn count(&self, exit: Exit) {
        self.statistics().count(exit);
    }
}
