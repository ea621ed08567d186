//! Branches that the guest has taken, for its last branch records.

use vpmu::counter::CounterHost;
use vpmu::x86::lbr::intel::FROM;
use vpmu::x86::lbr::{Branch, Filter, MAX_DEPTH, is_record};
use vpmu::x86::{ArchEvent, CounterConfig, Ring};

use super::{Engine, VcpuPmu};
use vpmu_x86::Executed;

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
        // A hardware event counts the guest alone, and stands still by itself while the host works.
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

    /// Returns how many registers of records Linux reads behind this FROM (`intel_pmu_store_lbr`): with it three of each
    /// record, and the first FROM that is 0, as there is one where fewer calls are open. `None`: nobody knows, or this FROM is 0
    /// and Linux reads no more.
    pub(crate) fn expected_reads(&mut self, msr: u32) -> Option<u32> {
        let all = FROM..FROM + u32::from(MAX_DEPTH);
        let froms = all.contains(&msr).then_some(msr..all.end)?;
        let mut expected = 0_u32;
        for from in froms {
            match self.read_record(from) {
                Some(0) => return Some(expected).filter(|&reads| reads > 0),
                Some(_) => expected += 3,
                None => break,
            }
        }
        expected.checked_sub(1)
    }

    /// Counts a replay, and what was executed for this ring of the guest. `None`: it was dropped.
    pub(crate) fn count_replay(&mut self, executed: Option<Executed>, ring: Ring) {
        let mut statistics = self.statistics.lock();
        let replays = &mut statistics.replays;
        let Some(executed) = executed else {
            replays.dropped += 1;
            return;
        };
        replays.committed += 1;
        replays.reads += u64::from(executed.reads);
        replays.branches += u64::from(executed.taken);
        replays.instructions += u64::from(executed.instructions);
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
}
