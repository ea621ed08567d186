//! A branch, and which branches a guest wants recorded.

use crate::x86::Ring;

/// What kind of branch was taken. A branch that is not taken is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A conditional jump: Jcc, LOOPcc, JCXZ.
    Conditional,
    /// A near jump to a target in the instruction.
    RelativeJump,
    /// A near jump to a target in a register or in memory.
    IndirectJump,
    /// A near call of a target in the instruction.
    RelativeCall,
    // A kind for itself: no return belongs to it, so a stack of calls must not keep it.
    /// A [relative call](Self::RelativeCall) of the next instruction, by which 32-bit code reads its address.
    NextCall,
    /// A near call of a target in a register or in memory.
    IndirectCall,
    /// A near return.
    Return,
    /// Any other transfer of control: far jumps, calls and returns, system calls, interrupts, exceptions.
    Other,
}

/// A branch that the guest has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    /// The linear address of the branch instruction, or of the instruction that was interrupted.
    pub from: u64,
    /// The linear address of the instruction that follows.
    pub to: u64,
    /// What kind of branch it is.
    pub kind: Kind,
    /// Who has executed the branch.
    pub from_ring: Ring,
    /// Who executes what follows.
    pub to_ring: Ring,
    /// Whether the processor had predicted something else; `None`: that is not known.
    // `None` is not `false`: CPUID has a bit for whether predictions are known at all.
    pub mispredicted: Option<bool>,
    /// The processor cycles since the branch before; `None`: that is not known.
    pub cycles: Option<u16>,
}

/// A set of [`Kind`]s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// No kind.
    pub const NONE: Self = Self(0);

    /// Returns this set with `kind`, where `member` says so.
    #[must_use]
    pub const fn with(self, kind: Kind, member: bool) -> Self {
        match member {
            true => Self(self.0 | Self::bit(kind)),
            false => self,
        }
    }

    /// Returns whether `kind` is a member. Calls of the next instruction are where relative calls are.
    pub const fn contains(self, kind: Kind) -> bool {
        self.0 & Self::bit(kind) != 0
    }

    const fn bit(kind: Kind) -> u8 {
        // Numbers of the engine's own: the two vendors' registers have other bits.
        match kind {
            Kind::NextCall => Self::bit(Kind::RelativeCall),
            _ => 1 << kind as u8,
        }
    }
}

/// Which branches a guest wants recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Those that end in the guest's kernel.
    pub kernel: bool,
    /// Those that end in the guest's user space.
    pub user: bool,
    /// Those of these kinds.
    pub kinds: Kinds,
    /// The records are a stack of calls: a return takes the record of its call away.
    pub call_stack: bool,
}

impl Filter {
    /// Returns whether `branch` is recorded. The ring in which the branch ends decides, for both vendors.
    pub const fn passes(&self, branch: &Branch) -> bool {
        self.ring(branch.to_ring) && self.kinds.contains(branch.kind)
    }

    /// Returns whether branches that end in `ring` are recorded.
    pub const fn ring(&self, ring: Ring) -> bool {
        match ring {
            Ring::Kernel => self.kernel,
            Ring::User => self.user,
        }
    }
}
