//! The lab: boots a stock Linux guest under one PMU design or another, runs a command in it, and
//! reports the command's cost.
//!
//! | room | what it holds |
//! |---|---|
//! | [`host`] | this machine: programs, files, progress, cancellation |
//! | [`spec`] | what to run: a request, and the checked description made of it |
//! | [`report`] | records of guests, figures, tables, JSON |
//! | [`image`] | guests from Debian packages: cache, archives, jobs |
//! | `backend` | the ways to run a guest: native, monitor, nested, direct |
//! | [`run`] | supervision, retries, comparisons |
//! | [`mod@bench`] | published experiments, done again |
//!
//! A room uses those above it and none below it. The lab drives built programs and links no
//! hypervisor. From the engine it takes only the MSRs' names.

mod backend;
pub mod bench;
mod error;
pub mod host;
pub mod image;
pub mod report;
pub mod run;
pub mod spec;

pub use error::{Error, Failure, Result, usage};
