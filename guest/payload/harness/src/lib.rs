//! What the bare-metal test programs share: how a test ends, how it is reported, and the words of the
//! command line. Knows no architecture.
//!
//! # What a program says
//!
//! One line per test: `ok NAME`, `ok NAME (deviates: ...)`, `skip NAME: reason` or
//! `FAIL NAME: reason (got .. want ..)`; then `payload: N passed, N failed, N skipped`. Names of tests
//! on other CPUs than the first begin with `cpuN.`.
//!
//! Where a machine is known to do something else than its manual says, the test lists that as data
//! ([`Deviation`]): it passes and says so, or fails when `strict` is on the command line.

#![cfg_attr(target_os = "none", no_std)]
#![expect(
    clippy::result_large_err,
    reason = "a failure carries its text, and there is no allocator to box it with"
)]

mod bootargs;
mod report;

pub use bootargs::BootArgs;
pub use report::{Deviation, Failure, Pass, Tally, Text, Verdict, check, check_or, check_range};
