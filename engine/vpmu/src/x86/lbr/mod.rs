//! Last branch records (LBR): the most recent branches that a guest has taken, in registers that it reads at a PMI.
//!
//! [`intel`] is architectural LBR (SDM vol. 3B, revision 083, chapter 19, "Last Branch Records"), [`amd`]
//! the LBR stack of the extension LbrExtV2 (APM vol. 2, 13.1.1). The stack, the filter and what a PMI does are the same.
//! A guest is offered neither unless its [`Capability`](super::Capability) says so.
//!
//! # Where branches come from
//!
//! The engine does not know. An embedder that sees its guest's branches hands them over with
//! [`Pmu::branch`](super::Pmu::branch), the oldest first, and the engine keeps those that the guest's filter lets pass.
//! There are two kinds of embedders:
//!
//! - One that sees every branch, such as a simulator, hands over each of them.
//! - One that can only *follow* its guest, at a price for each branch, sees none until a PMI needs them. It says so by
//!   [`CounterHost::follows_branches`](crate::counter::CounterHost::follows_branches). An overflow that requests a PMI
//!   while branches are recorded then begins a run: the stack is cleared, the PMI is held back, and
//!   [`branches_awaited`](super::Pmu::branches_awaited) says how many branches the stack still has room for. When it is
//!   full, the PMI is requested. The guest finds the branches that it took last.
//!
//! A run ends early by [`end_following`](super::Pmu::end_following), and by any access of the guest to its PMU. Its records
//! are then fewer, and never wrong: a record that is zero is none.
//!
//! A PEBS record with branches waits in the same way ([`pebs`](super::pebs)): it is written at the end of the run.
//!
//! # Call stacks
//!
//! In call-stack mode a call pushes a record and a return takes it away, over the whole life of a task. An embedder that
//! hands over every call and return does nothing else for it. One that follows has seen none of the calls that are still
//! open when a PMI needs them. It finds them where they are, on the guest's stack: while
//! [`branches_awaited`](super::Pmu::branches_awaited) is not 0 and the [`Filter`] says `call_stack`, it hands over each open
//! call, the outermost first and at most as many as are awaited, and then [ends](super::Pmu::end_following) the run. The
//! guest need not execute an instruction for that, so the PMI is where the overflow was.
//!
//! [`intel::Capability::call_stack`] says whether the mode is there. Without it the bit of IA32_LBR_CTL is reserved, and a
//! guest's perf says that the mode is not supported. AMD's processors have none.
//!
//! # What is not offered
//!
//! XSAVES of the records (CPUID.(0DH,1):ECX\[15\]): the instruction would save the registers of the processor, not these.
//! Event logging and TSX bits.

pub mod amd;
mod branch;
pub mod intel;
mod stack;
mod unit;

pub use branch::{Branch, Filter, Kind, Kinds};
use stack::{Entry, Field};
pub use stack::{MAX_DEPTH, Stack};
pub(super) use unit::Unit;

/// Returns whether the register is a part of a record: FROM, TO or INFO, of either vendor's. Reading one changes nothing.
pub const fn is_record(msr: u32) -> bool {
    matches!(intel::Msr::decode(msr), Some(intel::Msr::Record(..)))
        || matches!(amd::Msr::decode(msr), Some(amd::Msr::Record(..)))
}

/// What became of the branches that were handed over. Survives a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Branches that were recorded. A return in call-stack mode is not one.
    pub recorded: u64,
    /// Branches that the guest's filter, a freeze or a disabled unit kept out.
    pub filtered: u64,
    /// Runs that ended with a full stack.
    pub full: u64,
    /// Runs that ended before the stack was full.
    pub short: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_not_what_controls_them() {
        let of = |msrs: &mut dyn Iterator<Item = u32>| msrs.filter(|&msr| is_record(msr)).count();
        assert_eq!(of(&mut intel::msrs()), 96);
        assert_eq!(of(&mut amd::msrs()), 32);
        assert!(
            ![0x14ce, 0x14cf, 0x1d9, 0x1520, 0xc001_0320, 0x38e]
                .iter()
                .any(|&msr| is_record(msr))
        );
    }
}
