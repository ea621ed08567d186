//! What a vCPU is going to execute, and where it is seen to be.

use kvm_bindings::{kvm_regs, kvm_sregs};
use vpmu::x86::Ring;
use vpmu::x86::lbr::Branch;
use vpmu_x86::word::Masked;

use crate::guest::{registers, ring};

/// Breakpoints that a processor has.
pub(super) const BREAKPOINTS: usize = 4;

/// The general registers, as far as they are known.
pub(super) type General = [Masked; 16];

/// A place to stop at: whichever the vCPU reaches first tells where it went.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) ip: u64,
    /// How many of the trace's branches the vCPU has then taken.
    pub(super) branches: usize,
    /// The branch that leads off the trace, if one does.
    // Not among the trace's branches: another leaf may stand where this branch is not taken.
    pub(super) off: Option<Branch>,
    /// The vCPU's registers there, as far as they are known.
    pub(super) general: General,
    pub(super) ring: Ring,
    /// The place is the handler of a fault.
    pub(super) is_fault: bool,
}

/// Places for breakpoints.
pub(super) type Places = [Option<u64>; BREAKPOINTS];

/// Branches that a vCPU has taken, the oldest first.
pub(super) type Taken<'a> = (&'a [Branch], Option<Branch>);

/// Instructions that are executed one after the other, and the leaves of the trace.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// The address of each instruction, and how many of the branches were taken before it.
    pub(super) steps: Vec<(u64, usize)>,
    pub(super) branches: Vec<Branch>,
    pub(super) leaves: Vec<Leaf>,
    /// The places of the instructions behind the first, in order. A hash table would ask the kernel for random numbers, which
    /// a jail may forbid.
    pub(super) visited: Vec<u64>,
    /// The first instruction is one that is not predicted: it may change anything.
    pub(super) is_opaque: bool,
    /// There was no room for all that it stores: the trace ends before.
    pub(super) is_cut: bool,
}

impl Trace {
    /// Returns the places of the leaves.
    pub(super) fn places(&self) -> Places {
        std::array::from_fn(|n| Some(self.leaves.get(n)?.ip))
    }

    /// Makes room for another trace. The memory is kept.
    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.branches.clear();
        self.leaves.clear();
        self.visited.clear();
        (self.is_opaque, self.is_cut) = (false, false);
    }

    /// Notes that the trace comes by at `ip`. Returns whether that is for the first time.
    pub(super) fn visit(&mut self, ip: u64) -> bool {
        match self.visited.binary_search(&ip) {
            Ok(_) => false,
            Err(at) => {
                self.visited.insert(at, ip);
                true
            }
        }
    }

    pub(super) fn has_visited(&self, ip: u64) -> bool {
        self.visited.binary_search(&ip).is_ok()
    }

    /// Returns the branches that a vCPU which has stopped with these registers, at a breakpoint or elsewhere, has taken on its
    /// trace. `None`: it is not seen where it was to be. `before`: CR2 and CR3 with which it set out.
    pub(super) fn taken(
        &self,
        regs: &kvm_regs,
        sregs: &kvm_sregs,
        before: (u64, u64),
        is_break: bool,
    ) -> Option<Taken<'_>> {
        let (cr2, cr3) = before;
        let leaf = self.leaves.iter().find(|leaf| leaf.ip == regs.rip);
        let is_same_space = self.is_opaque || sregs.cr3 == cr3;
        match leaf.filter(|_| is_break) {
            Some(leaf) => {
                let is_ring = ring(sregs, regs) == leaf.ring;
                let is_faultless = leaf.is_fault || sregs.cr2 == cr2;
                let is_expected = are(&leaf.general, &registers(regs).general) && is_ring;
                // Those of the trace, and the one that leads off.
                let taken = (&self.branches[..leaf.branches], leaf.off);
                (is_expected && is_faultless && is_same_space).then_some(taken)
            }
            None => {
                let is_here = is_same_space && sregs.cr2 == cr2;
                self.taken_at(regs.rip).filter(|_| is_here)
            }
        }
    }

    /// Returns the branches that a vCPU that was stopped at no leaf has taken. `None`: the trace comes by there more than
    /// once, or not at all.
    fn taken_at(&self, ip: u64) -> Option<Taken<'_>> {
        let mut here = self.steps.iter().filter(|(at, _)| *at == ip);
        let &(_, branches) = here.next()?;
        let is_alone = here.next().is_none();
        // In a loop nobody knows how many were taken.
        is_alone.then(|| (&self.branches[..branches], None))
    }
}

/// Returns whether the registers are those that are expected, as far as these are known.
pub(super) fn are(expected: &General, here: &[u64; 16]) -> bool {
    let mut both = expected.iter().zip(here);
    both.all(|(expected, &here)| expected.may_be(here))
}
