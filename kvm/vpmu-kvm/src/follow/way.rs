//! A way that a vCPU is going to take, and where it is seen to be.

use vpmu::x86::Ring;
use vpmu::x86::lbr::Branch;

use super::shadow::General;

/// Breakpoints that a processor has.
pub(super) const BREAKPOINTS: usize = 4;

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

/// Places for breakpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    ips: [u64; BREAKPOINTS],
    count: usize,
}

impl Places {
    pub(super) fn used(&self) -> &[u64] {
        &self.ips[..self.count]
    }
}

/// Branches that a vCPU has taken, the oldest first.
pub(super) type Taken<'a> = (&'a [Branch], Option<Branch>);

/// A way and its leaves.
#[derive(Debug, Default)]
pub(super) struct Way {
    pub(super) steps: Vec<Step>,
    pub(super) branches: Vec<Branch>,
    pub(super) leaves: Vec<Leaf>,
    /// The places of the steps behind the first, in order. A hash table would ask the kernel for random numbers, which
    /// a jail may forbid.
    pub(super) visited: Vec<u64>,
    /// The first instruction is one that is not predicted: it may change anything.
    pub(super) is_opaque: bool,
}

impl Way {
    /// Returns the places of the leaves.
    pub(super) fn places(&self) -> Places {
        let mut places = Places::default();
        for leaf in self.leaves.iter().take(BREAKPOINTS) {
            places.ips[places.count] = leaf.ip;
            places.count += 1;
        }
        places
    }

    /// Makes room for another way. The memory is kept.
    pub(super) fn clear(&mut self) {
        self.steps.clear();
        self.branches.clear();
        self.leaves.clear();
        self.visited.clear();
        self.is_opaque = false;
    }

    /// Notes that the way comes by at `ip`. Returns whether that is for the first time.
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

    /// Returns the branches that a vCPU at `leaf` has taken: those of the way, and the one that leads off.
    pub(super) fn taken(&self, leaf: &Leaf) -> Taken<'_> {
        (&self.branches[..leaf.branches], leaf.off)
    }

    /// Returns the branches that a vCPU with these registers, which was stopped at no leaf, has taken. `None`: the way
    /// comes by there more than once, or not at all.
    pub(super) fn taken_at(&self, ip: u64, general: &General) -> Option<Taken<'_>> {
        let is_here = |step: &&Step| step.ip == ip && are(&step.general, general);
        let mut here = self.steps.iter().filter(is_here);
        let branches = here.next()?.branches;
        let is_alone = here.next().is_none();
        // In a loop the same registers can stand before and after a branch: then nobody knows how many were taken.
        is_alone.then(|| (&self.branches[..branches], None))
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
