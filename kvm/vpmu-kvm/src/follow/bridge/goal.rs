//! What the guest's instructions are executed for: each says what a step to it is, and when it is reached.

use vpmu::x86::Ring;
use vpmu::x86::lbr::{Branch, Filter};

use super::Stop;
use super::op::Op;

/// What is to be executed for.
pub(super) trait Goal {
    /// Returns what the first instruction, an RDMSR, gives, if it is one that has exited.
    fn first(&mut self) -> Option<u64> {
        None
    }

    fn is_reached(&self) -> bool {
        false
    }

    /// Returns whether the bridge may end behind the last step. Where it may, the registers are kept.
    fn may_end(&self) -> bool {
        true
    }

    /// Answers RDMSR.
    fn read(&mut self, _msr: u32) -> Option<u64> {
        None
    }

    /// A branch at `from` was executed. Returns whether that is a step to the goal. `Stop`: it must not be executed here.
    fn branch(&mut self, _op: &Op, _from: u64, _to: u64) -> Result<bool, Stop> {
        Ok(false)
    }
}

/// All reads of records that are near.
pub(super) struct Reads<F> {
    pub(super) first: Option<u64>,
    pub(super) read: F,
    /// How many there may be: behind the last one, nothing is worth executing.
    pub(super) left: u32,
    /// Whether there were as many the last time. All or none are bridged then, which keeps the registers once.
    pub(super) is_known: bool,
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
pub(super) struct Branches {
    pub(super) branches: Vec<Branch>,
    pub(super) ring: Ring,
    pub(super) filter: Filter,
    pub(super) wanted: usize,
}

impl Goal for Branches {
    fn is_reached(&self) -> bool {
        self.wanted == 0
    }

    fn branch(&mut self, op: &Op, from: u64, to: u64) -> Result<bool, Stop> {
        let Some(kind) = op.kind(to)? else {
            return Ok(false);
        };
        let branch = Branch {
            from,
            to,
            kind,
            from_ring: self.ring,
            to_ring: self.ring,
            mispredicted: None,
            cycles: None,
        };
        let passes = self.filter.passes(&branch);
        if self.branches.len() == self.branches.capacity() || passes && self.wanted == 0 {
            return Err(Stop);
        }
        self.wanted -= usize::from(passes);
        self.branches.push(branch);
        Ok(true)
    }
}
