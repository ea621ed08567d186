//! Exceptions that the accesses under test raise.

use vpmu_payload_harness::{Failure, Text};

/// An exception that an access raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Fault {
    pub(crate) vector: u8,
    pub(crate) error: u32,
}

impl Fault {
    /// #GP(0).
    pub(crate) const GP: Self = Self {
        vector: 13,
        error: 0,
    };
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self(Text::new(format_args!(
            "unexpected exception (got vector {} error {:#x} want none)",
            fault.vector, fault.error
        )))
    }
}
