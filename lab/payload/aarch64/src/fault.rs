//! Exceptions that the accesses under test raise.

use vpmu_payload_harness::{Failure, Text};

/// An exception that an access raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// ESR_EL1.
    pub syndrome: u64,
}

impl Fault {
    /// ESR_EL1 of an instruction that is UNDEFINED: EC 0, IL.
    pub const UNDEFINED: Self = Self { syndrome: 1 << 25 };

    /// Exception class of an instruction abort from EL1.
    pub const INSTRUCTION_ABORT: u64 = 0x21;
    /// Exception class of a data abort from EL1.
    pub const DATA_ABORT: u64 = 0x25;

    /// Returns the exception class.
    pub const fn class(self) -> u64 {
        self.syndrome >> 26 & 0x3f
    }

    /// Returns whether this abort is a synchronous external one, which a bus gives.
    pub const fn is_external(self) -> bool {
        self.syndrome & 0x3f == 0x10
    }

    /// Returns whether a store raised this data abort.
    pub const fn is_store(self) -> bool {
        self.syndrome >> 6 & 1 != 0
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self(Text::new(format_args!(
            "unexpected exception (got ESR {:#x} want none)",
            fault.syndrome
        )))
    }
}
