//! A way that a vCPU is going to take, and where it is seen to be.

use vpmu::x86::Ring;
use vpmu::x86::lbr::Branch;

use super::shadow::General;

/// A place to stop at: whichever the vCPU reaches first tells where it went.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    pub(super) ip: u64,
    /// How many of the way's branches the vCPU has then taken.
    pub(super) branches: usize,
    /// The branch that leads off the way, if one does.
    // Not among the way's branches: another leaf may stand where this branch is not taken.
    pub(super) off: Option<Branch>,
    /// The vCPU's registers there, as far as they are known.
    pub(super) general: General,
    pub(super) ring: Ring,
    /// The place is the handler of a fault.
    pub(super) is_fault: bool,
}

/// An instruction of a way.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) ip: u64,
    /// How many of the way's branches were taken before it.
    pub(super) branches: usize,
    /// The vCPU's registers before it, as far as they are known.
    pub(super) general: General,
}

/// A way and its leaves.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) steps: Vec<Step>,
    pub(super) branches: Vec<Branch>,
    pub(super) leaves: Vec<Leaf>,
    /// The first instruction is one that is not predicted: it may change anything.
    pub(super) is_opaque: bool,
}

impl Way {
    /// Returns the branches that a vCPU at `leaf` has taken.
    pub(super) fn taken<'a>(&'a self, leaf: &'a Leaf) -> impl Iterator<Item = &'a Branch> {
        self.branches[..leaf.branches].iter().chain(&leaf.off)
    }

    /// Returns the branches that a vCPU with these registers, which was stopped at no leaf, has taken. `None`: the way
    /// comes by there more than once, or not at all.
    pub(super) fn taken_at(&self, ip: u64, general: &General) -> Option<&[Branch]> {
        let is_here = |step: &&Step| step.ip == ip && are(&step.general, general);
        let mut here = self.steps.iter().filter(is_here);
        let branches = here.next()?.branches;
        let is_alone = here.next().is_none();
        // In a loop the same registers can stand before and after a branch: then nobody knows how many were taken.
        is_alone.then(|| &self.branches[..branches])
    }
}

/// Returns whether the registers are those that are expected, as far as these are known.
pub(super) fn are(expected: &General, here: &General) -> bool {
    let mut both = expected.iter().zip(here);
    both.all(|(expected, here)| match (expected, here) {
        (Some(expected), Some(here)) => expected.bits == here.bits,
        // What is not known may be anything.
        _ => true,
    })
}
