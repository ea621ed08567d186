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

    /// Returns the exception class.
    pub const fn class(self) -> u64 {
        self.syndrome >> 26 & 0x3f
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
