//! The branches that a PMI waits for, executed for the guest ([`vpmu_x86::replay`]).

#[cfg(test)]
mod tests;

use std::mem;

use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter, Kind, MAX_DEPTH};
use vpmu_perf::PerfHost;
use vpmu_x86::Stop;
use vpmu_x86::replay::{Branched, Budget, Code, Dropped, Goal, Replayer, Start};

use super::Follower;
use super::replay::{MOST_BETWEEN, most};
use crate::error::Error;
use crate::guest::{kvm_registers, registers, ring, system};
use crate::kvm::OnKvm;
use crate::memory::GuestMemory;
use crate::pmu::VcpuPmu;
use crate::sys::{self, debug};

/// So many branches that pass the filter.
struct Branches {
    branches: Vec<Branch>,
    ring: Ring,
    filter: Filter,
    wanted: usize,
}

impl Goal for Branches {
    fn is_reached(&self) -> bool {
        self.wanted == 0
    }

    fn branch(&mut self, branched: &Branched<'_>) -> Result<bool, Stop> {
        let Some(kind) = branched.kind()? else {
            return Ok(false);
        };
        let branch = Branch {
            from: branched.from,
            to: branched.to,
            kind: kind_of(kind),
            from_ring: self.ring,
            to_ring: self.ring,
            mispredicted: None,
            cycles: None,
        };
        let passes = self.filter.passes(&branch);
        // There is no room for more, or one too many.
        if self.branches.len() == self.branches.capacity() || passes && self.wanted == 0 {
            return Err(Stop);
        }
        self.wanted -= usize::from(passes);
        self.branches.push(branch);
        Ok(true)
    }
}

/// Returns the engine's name of a kind.
pub(super) const fn kind_of(kind: vpmu_x86::Kind) -> Kind {
    match kind {
        vpmu_x86::Kind::Conditional => Kind::Conditional,
        vpmu_x86::Kind::RelativeJump => Kind::RelativeJump,
        vpmu_x86::Kind::IndirectJump => Kind::IndirectJump,
        vpmu_x86::Kind::NextCall => Kind::NextCall,
        vpmu_x86::Kind::RelativeCall => Kind::RelativeCall,
        vpmu_x86::Kind::IndirectCall => Kind::IndirectCall,
        vpmu_x86::Kind::Return => Kind::Return,
    }
}

/// Takes branches for one vCPU.
pub(super) struct Taker {
    code: Code,
    replayer: Replayer,
    branches: Vec<Branch>,
}

impl Taker {
    pub(super) fn new() -> Self {
        Self {
            code: Code::new(),
            replayer: Replayer::new(),
            branches: Vec::with_capacity(2 * usize::from(MAX_DEPTH)),
        }
    }

    /// Executes until `wanted` branches that pass the filter were taken. Returns whether there is a replay.
    fn plan(
        &mut self,
        start: &Start<'_>,
        memory: &dyn GuestMemory,
        ring: Ring,
        filter: Filter,
        wanted: usize,
    ) -> bool {
        let mut branches = mem::take(&mut self.branches);
        branches.clear();
        let mut goal = Branches {
            branches,
            ring,
            filter,
            wanted,
        };
        let budget = Budget {
            instructions: most(start.registers.rflags),
            between: MOST_BETWEEN,
        };
        let executed = (self.replayer).plan(start, memory, &mut self.code, budget, &mut goal);
        self.branches = goal.branches;
        executed.is_some()
    }

    /// Returns the first branches that were taken, the oldest first.
    fn taken(&self, count: u32) -> &[Branch] {
        let count = self.branches.len().min(count as usize);
        &self.branches[..count]
    }
}

// Registers are given to KVM with the next run, which comes right behind `before_run`: a VMM that saves the vCPU does so with
// neither them nor the memory that goes with them.
impl Follower {
    /// Takes branches for the guest, as many as are `wanted` and as can be. Nothing is left for KVM to complete.
    pub(super) fn take(
        &mut self,
        kvm: &OnKvm,
        pmu: &mut VcpuPmu<PerfHost>,
        wanted: usize,
    ) -> Result<(), Error> {
        let filter = pmu.branch_filter().filter(|filter| !filter.call_stack);
        let (Some(taker), Some(filter)) = (&mut self.taker, filter) else {
            return Ok(());
        };
        let regs = match kvm.run.regs() {
            Some(regs) => regs,
            None => sys::regs(&kvm.vcpu)?,
        };
        let sregs = match &self.run {
            Some(run) if run.exits > 0 => kvm.run.sregs(),
            _ => sys::sregs(&kvm.vcpu)?,
        };
        let ring = ring(&sregs, &regs);
        let start = Start {
            registers: &registers(&regs),
            system: &system(&sregs),
            pkru: &|| self.keys.pkru(&kvm.vcpu),
        };
        if !taker.plan(&start, &*self.memory, ring, filter, wanted) {
            return Ok(());
        }
        let is_free = !kvm.run.is_elsewhere() && {
            let events = sys::events(&kvm.vcpu)?;
            super::are_over(&events)
                && events.interrupt.shadow == 0
                && debug::breakpoints(&kvm.vcpu)? == 0
        };
        if !is_free {
            taker.replayer.forget();
        }
        let memory = &*self.memory;
        let Some(committed) = taker.replayer.commit(&registers(&regs), memory) else {
            return Ok(());
        };
        match committed {
            Err(Dropped) => pmu.count_replay(None, ring),
            Ok((after, executed)) => {
                kvm.run.set_regs(&kvm_registers(&after));
                pmu.count_replay(Some(executed), ring);
                pmu.take_branches(taker.taken(executed.taken).iter());
            }
        }
        Ok(())
    }
}
