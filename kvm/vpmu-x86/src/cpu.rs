//! A vCPU that does not run, and what was executed for it.

/// The general registers in the order of their numbers (RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15), RIP and RFLAGS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// The general registers.
    pub general: [u64; 16],
    /// RIP.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
}

/// The system registers that decide what code does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct System {
    /// CR0.
    pub cr0: u64,
    /// CR3.
    pub cr3: u64,
    /// CR4.
    pub cr4: u64,
    /// IA32_EFER.
    pub efer: u64,
    /// The current privilege level, which is that of SS (SDM vol. 3A, 5.5).
    pub cpl: u8,
    /// CS.L: the code is 64-bit where IA32_EFER.LMA is set, too.
    pub is_long: bool,
    /// The base of FS.
    pub fs_base: u64,
    /// The base of GS.
    pub gs_base: u64,
}

/// What was executed without the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Executed {
    /// RDMSRs that the goal has answered.
    pub reads: u32,
    /// Branches that were steps to the goal.
    pub taken: u32,
    /// All instructions.
    pub instructions: u32,
    /// The branches among them, taken or not.
    pub branches: u32,
}

/// The next instruction is not executed here.
#[cfg(feature = "interpreter")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop;
