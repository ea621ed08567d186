//! What is executed for the guest ([`vpmu_x86::replay`]): the branches that a PMI waits for, and what its handler executes from
//! one read of a branch record to the next.
//!
//! Linux reads FROM, TO and INFO of each record by an RDMSR of its own, which is an exit. The instructions between two of
//! them are some thirty. They are executed here, and the reads among them are answered, from the first read, which exits, to
//! the last. KVM completes the first read when it is called again, and is asked to do no more. What was executed is committed
//! then, and the guest goes on behind the last read, as if it had executed all of it.

#[cfg(test)]
mod tests;

use std::mem;

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu::x86::lbr::{self, Branch, Filter, Kind, MAX_DEPTH};
use vpmu_x86::replay::{Branched, Budget, Code, Dropped, Goal, Replayer, Start};
use vpmu_x86::{Executed, Stop};

use crate::error::Error;
use crate::guest::{kvm_registers, registers, ring, system};
use crate::memory::GuestMemory;
use crate::pmu::VcpuPmu;
use crate::run::Kvm;
use crate::sys::keys::Keys;
use crate::sys::{self, debug};

/// Most instructions of a replay: twice as many as Linux 6.12 executes to read 32 records; and where interrupts are not
/// blocked.
const MOST: u32 = 8192;
const MOST_INTERRUPTIBLE: u32 = 2048;
/// Most instructions from one read, or branch, to the next.
const BETWEEN: u32 = 256;
/// Most reads without a replay before the next try, as a power of two.
const RAREST: u32 = 6;

fn budget(rflags: u64) -> Budget {
    const IF: u64 = 1 << 9;
    Budget {
        instructions: match rflags & IF {
            0 => MOST,
            _ => MOST_INTERRUPTIBLE,
        },
        between: BETWEEN,
    }
}

/// All reads of records that are near.
struct Reads<F> {
    first: Option<u64>,
    read: F,
    /// How many there may be: behind the last one, nothing is worth executing.
    left: u32,
    /// Whether that is known. All or none are replayed then, which keeps the registers once.
    is_known: bool,
}

impl<F: FnMut(u32) -> Option<u64>> Goal for Reads<F> {
    fn first(&mut self) -> Option<u64> {
        self.first.take()
    }

    fn is_reached(&self) -> bool {
        self.left == 0
    }

    fn may_end(&self) -> bool {
        !self.is_known || self.is_reached()
    }

    fn read(&mut self, msr: u32) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        (self.read)(msr)
    }
}

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

/// Replays for one vCPU.
pub(super) struct Replays {
    /// The handler's code, and any that branches are taken in, which would take the former's place.
    handler: Code,
    code: Code,
    replayer: Replayer,
    branches: Vec<Branch>,
    /// The register that the last replay of reads began with, and how many it had. The next one that begins there has as many.
    last: (u32, u32),
    /// Reads one after the other that no replay followed, as far as they were tried, and reads until the next try.
    failures: u32,
    rest: u32,
}

// Registers are given to KVM with the next run, which comes right behind `before_run`: a VMM that saves the vCPU does so with
// neither them nor the memory that goes with them.
impl Replays {
    pub(super) fn new() -> Self {
        Self {
            handler: Code::new(),
            code: Code::new(),
            replayer: Replayer::new(),
            branches: Vec::with_capacity(2 * usize::from(MAX_DEPTH)),
            last: (0, 0),
            failures: 0,
            rest: 0,
        }
    }

    /// Returns whether there is a replay to commit.
    pub(super) const fn is_planned(&self) -> bool {
        self.replayer.is_planned()
    }

    /// The guest goes its own way.
    pub(super) fn forget(&mut self) {
        self.replayer.forget();
    }

    /// Returns whether this read is one to try.
    fn is_due(&mut self) -> bool {
        let is_due = self.rest == 0;
        self.rest = self.rest.saturating_sub(1);
        is_due
    }

    /// Executes what follows a read of a record that has exited, and gives `value`. `read` answers others. `expected`: how many
    /// Linux reads behind this one. Returns whether there is a replay.
    fn plan_reads(
        &mut self,
        start: &Start<'_>,
        memory: &dyn GuestMemory,
        value: u64,
        read: impl FnMut(u32) -> Option<u64>,
        expected: Option<u32>,
    ) -> bool {
        const RCX: usize = 1;
        let msr = start.registers.general[RCX] as u32;
        let last = (msr == self.last.0).then_some(self.last.1);
        // Not behind a failure: another system may read another number.
        let known = expected.filter(|_| self.failures == 0).or(last);
        let mut goal = Reads {
            first: Some(value),
            read,
            left: known.unwrap_or(MOST),
            is_known: known.is_some(),
        };
        let budget = budget(start.registers.rflags);
        let executed = match start.system.cpl {
            0 => (self.replayer).plan(start, memory, &mut self.handler, budget, &mut goal),
            _ => None,
        };
        match executed {
            Some(executed) => {
                self.failures = 0;
                self.last = (msr, executed.reads);
            }
            None => {
                // The next replay from there may be shorter.
                self.last = (0, 0);
                // A guest that reads its records in another way is not to pay for each read.
                self.rest = (1 << self.failures) - 1;
                self.failures = RAREST.min(self.failures + 1);
            }
        }
        executed.is_some()
    }

    /// Executes until `wanted` branches that pass the filter were taken. Returns whether there is a replay.
    fn plan_branches(
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
        let budget = budget(start.registers.rflags);
        let executed = (self.replayer).plan(start, memory, &mut self.code, budget, &mut goal);
        self.branches = goal.branches;
        executed.is_some()
    }

    /// Returns the first branches that were taken, the oldest first.
    fn taken(&self, count: u32) -> &[Branch] {
        let count = self.branches.len().min(count as usize);
        &self.branches[..count]
    }

    /// Plans a replay behind a read of a branch record, when an exit has been completed.
    pub(super) fn replay(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) -> Result<(), Error> {
        let Some((msr, value)) = (kvm.run.answered()).filter(|&(msr, _)| lbr::is_record(msr))
        else {
            return Ok(());
        };
        // An interrupt that is due comes first.
        let is_next = !pmu.pmi_is_due() && pmu.branches_awaited() == 0;
        let Some(regs) = kvm.run.regs().filter(|_| is_next && self.is_due()) else {
            return Ok(());
        };
        let system = system(&sys::GET_SREGS.get(&kvm.vcpu)?);
        let start = Start {
            registers: &registers(&regs),
            system: &system,
            // A handler that reads records reaches no user space.
            pkru: &|| None,
        };
        let expected = pmu.expected_reads(msr);
        let read = |msr| pmu.read_record(msr);
        let is_planned = self.plan_reads(&start, &*kvm.memory, value, read, expected);
        // What costs a call is asked last.
        if is_planned && (kvm.run.is_elsewhere() || debug::breakpoints(&kvm.vcpu)? != 0) {
            self.forget();
        }
        Ok(())
    }

    /// Takes branches for the guest that pass the filter, as many as are wanted and as can be.
    pub(super) fn take(
        &mut self,
        kvm: &Kvm,
        pmu: &mut VcpuPmu,
        keys: &Keys,
        sregs: &kvm_sregs,
        filter: Filter,
        wanted: usize,
    ) -> Result<(), Error> {
        let regs = kvm.regs()?;
        let ring = ring(sregs, &regs);
        let start = Start {
            registers: &registers(&regs),
            system: &system(sregs),
            pkru: &|| keys.pkru(&kvm.vcpu),
        };
        if !self.plan_branches(&start, &*kvm.memory, ring, filter, wanted) {
            return Ok(());
        }
        if kvm.run.is_elsewhere() || !debug::is_untouched(&kvm.vcpu, false)? {
            self.forget();
        }
        match self.store(&regs, &*kvm.memory) {
            None => {}
            Some(Err(Dropped)) => pmu.count_replay(None, ring),
            Some(Ok((regs, executed))) => {
                kvm.run.set_regs(&regs);
                pmu.count_replay(Some(executed), ring);
                pmu.take_branches(self.taken(executed.taken).iter());
            }
        }
        Ok(())
    }

    /// Commits the replay, if there is one. KVM has completed the read before it.
    pub(super) fn commit(&mut self, kvm: &Kvm, pmu: &mut VcpuPmu) {
        let regs = kvm.run.regs();
        let Some(committed) = regs.and_then(|regs| self.store(&regs, &*kvm.memory)) else {
            return;
        };
        let executed = committed.ok().map(|(regs, executed)| {
            kvm.run.set_regs(&regs);
            executed
        });
        pmu.count_replay(executed, Ring::Kernel);
    }

    /// Makes the stores of the replay, for a guest that is where it begins. Returns the registers where it ends, and what the
    /// guest need not execute.
    fn store(
        &mut self,
        regs: &kvm_regs,
        memory: &dyn GuestMemory,
    ) -> Option<Result<(kvm_regs, Executed), Dropped>> {
        let committed = self.replayer.commit(&registers(regs), memory)?;
        Some(committed.map(|(registers, executed)| (kvm_registers(&registers), executed)))
    }
}
