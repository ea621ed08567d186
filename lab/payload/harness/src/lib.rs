//! The common parts of the bare-metal test programs: the end of a test, its report, and the words of the command line.
//! This crate knows no architecture.
//!
//! # Output
//!
//! Each test prints one line: `ok NAME`, `ok NAME (deviates: ...)`, `skip NAME: reason` or `FAIL NAME: reason (got ..
//! want ..)`. At the end comes `payload: N passed, N failed, N skipped`. Names of tests on other CPUs than the first
//! begin with `cpuN.`.
//!
//! Where a machine is known to differ from its manual, the test lists the difference as data
//! ([`Deviation`]). Such a test passes and reports the deviation, or fails when `strict` is on the
//! command line.

#![cfg_attr(target_os = "none", no_std)]
#![expect(
    clippy::result_large_err,
    reason = "a failure carries its text, and there is no allocator to box it with"
)]

mod bootargs;
mod report;

pub use bootargs::BootArgs;
pub use report::{Deviation, Failure, Pass, Tally, Text, Verdict, check, check_or, check_range};
