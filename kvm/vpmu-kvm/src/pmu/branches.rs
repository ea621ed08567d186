//! Branches that the guest has taken, for its last branch records.

use vpmu::counter::CounterHost;
use vpmu::x86::lbr::{Branch, Filter, is_record};
use vpmu::x86::{ArchEvent, CounterConfig, Ring};

use super::{Engine, VcpuPmu};
use crate::stats::{Executed, Exit};

impl<H: CounterHost<CounterConfig>> VcpuPmu<H> {
    /// Returns how many branches more a PMI waits for; 0: none waits.
    pub(crate) fn branches_awaited(&self) -> u8 {
        match &self.engine {
            Engine::Architectural(pmu, _) => pmu.branches_awaited(),
            Engine::Paravirtual(_) => 0,
        }
    }

    /// Returns which branches the guest wants recorded.
    pub(crate) fn branch_filter(&self) -> Option<Filter> {
        match &self.engine {
            Engine::Architectural(pmu, _) => pmu.branch_filter(),
            Engine::Paravirtual(_) => None,
        }
    }

    /// The guest has taken `branches`, the oldest first.
    pub(crate) fn take_branches<'a>(&mut self, branches: impl Iterator<Item = &'a Branch>) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            for branch in branches {
                pmu.branch(branch, &mut self.host);
            }
        }
    }

    /// What was handed over are not the last branches that the guest has taken.
    pub(crate) fn lose_branches(&mut self) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            pmu.lose_branches();
        }
    }

    /// The guest is followed no longer.
    pub(crate) fn end_following(&mut self) {
        if let Engine::Architectural(pmu, _) = &mut self.engine {
            pmu.end_following(&mut self.host);
        }
    }

    /// Nothing counts until [`load`](Self::load), where following the guest would be counted: by a clock, whose time goes
    /// on in the host.
    pub(crate) fn hold(&mut self) {
        if !self.misses_completed
            && let Engine::Architectural(pmu, _) = &mut self.engine
        {
            pmu.hold(&mut self.host);
        }
    }

    /// Returns the value of a register of a record, whose RDMSR is no exit.
    pub(crate) fn read_record(&mut self, msr: u32) -> Option<u64> {
        if !is_record(msr) {
            return None;
        }
        self.msr(msr)
    }

    /// Counts a bridge, and what was executed on it for this ring of the guest. `None`: it was dropped.
    pub(crate) fn count_bridge(&mut self, executed: Option<Executed>, ring: Ring) {
        let mut statistics = self.statistics.lock();
        let bridges = &mut statistics.bridges;
        let Some(executed) = executed else {
            bridges.dropped += 1;
            return;
        };
        bridges.crossed += 1;
        bridges.reads += u64::from(executed.reads);
        bridges.branches += u64::from(executed.taken);
        bridges.instructions += u64::from(executed.instructions);
        drop(statistics);
        // No counter of the processor's has seen them.
        if self.misses_completed
            && let Engine::Architectural(pmu, _) = &mut self.engine
        {
            for (event, times) in [
                (ArchEvent::Instructions, executed.instructions),
                (ArchEvent::Branches, executed.branches),
            ] {
                pmu.emulated(event, times.into(), ring, &mut self.host);
            }
        }
    }

    /// Counts an exit by which the guest was followed.
    pub(crate) fn count(&self, exit: Exit) {
        self.statistics.lock().count(exit);
    }
}
