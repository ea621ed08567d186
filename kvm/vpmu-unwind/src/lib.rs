//! The calls that are open on the stack of a guest's program, found by the program's own call frame information (CFI).
//!
//! An [`Unwinder`] gets the registers of a program that does not run, and a [`Memory`] that reads its address space.
//! It finds the ELF object at RIP, the object's `.eh_frame_hdr`, the entry (FDE) of the function, and by its rules
//! the caller's registers: LSB 5.0, "Exception Frames"; System V ABI, AMD64, 1.0, 3.6 to 4.2; DWARF 5, 6.4. Only what the
//! guest's page tables have present can be read: nothing is brought in.
//!
//! # What is never done
//!
//! A stack without an answer is [cut](Cut). It is never searched for what looks like a return address: where that was tried, 8
//! to 42 % of the frames were of calls that had returned. Frame pointers are not followed in code that has CFI, which
//! uses RBP as it likes.
//!
//! Code that no CFI covers (a JIT's, Go's, assembly) is followed to its return, instruction by instruction. A frame
//! that has called must also have its frame pointer in RBP, and both must lead to the same return address, which follows a
//! call: else the stack is cut.
//!
//! # A hostile guest
//!
//! All of it is what a guest's user wrote. Each stack has a budget of reads and of bytes of CFI; entries are
//! interpreted in memory that was allocated before; the caches have fixed sizes. A guest that forges its CFI gets a forged
//! stack of its own, and [`Memory`] reads nothing that the program itself could not read.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bytes;
mod call;
mod cfi;
mod object;
mod rules;
mod table;
mod unwinder;
mod way;

pub use bytes::{Memory, PAGE};
pub use unwinder::Unwinder;

/// Most calls that a stack is followed for: as many as there are last branch records.
pub const MOST_CALLS: usize = 32;

/// The registers of a program, by the numbers of the psABI (System V ABI, AMD64, figure 3.36).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// RAX, RDX, RCX, RBX, RSI, RDI, RBP, RSP, R8 to R15.
    pub general: [u64; 16],
    /// RIP.
    pub rip: u64,
}

/// A call that has not returned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// The address of the call instruction, or of the instruction that a signal interrupted.
    pub from: u64,
    /// The address that was called. After an indirect call it is the start of the function that runs, or in code without CFI
    /// the place where that stands.
    pub to: u64,
    /// Whether the instruction names its target. A signal handler is called by none.
    pub is_direct: bool,
}

/// Why a stack was cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// Code without CFI, whose way to its return does not say who called.
    NoCfi,
    /// A page of CFI or of an object's header is not present.
    PageAbsent,
    /// A page of the stack is not present.
    StackAbsent,
    /// CFI that cannot be, or that this crate does not understand.
    BadCfi,
    /// Too many reads, or too much CFI.
    Budget,
}

/// How a stack ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With the outermost function.
    Complete,
    /// With as many calls as were asked for.
    Full,
    /// Before the outermost function.
    Cut(Cut),
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// How many calls there are, the innermost first.
    pub calls: usize,
    /// How the stack ended.
    pub end: End,
}

/// A function on the stack.
#[derive(Clone, Copy, Debug)]
struct Frame {
    /// The start of its FDE.
    start: u64,
    /// Whether its FDE is a signal handler's return.
    is_signal: bool,
}
