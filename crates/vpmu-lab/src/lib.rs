//! The lab: boots a stock Linux guest under one PMU design or another, runs a
//! command in it, and says what it cost.
//!
//! A guest is made of Debian packages ([`debian`], [`guest::images`]), run in
//! QEMU ([`machine`], [`supervise`]), and reports on its console ([`console`],
//! [`record`]). An [`experiment::Experiment`] puts these together for one
//! design; [`compare`] runs several side by side. The figures are a
//! [`result::Run`] each. [`mod@bench`] repeats published experiments.
//!
//! The lab drives built programs and links no hypervisor: of the engine it takes the MSRs' names.

pub mod arch;
pub mod archive;
pub mod bench;
pub mod boot_file;
pub mod cache;
pub mod cancel;
pub mod compare;
pub mod console;
pub mod debian;
pub mod design;
pub mod digest;
pub mod elf;
mod error;
pub mod experiment;
pub mod guest;
pub mod machine;
mod parallel;
pub mod progress;
pub mod record;
pub mod result;
pub mod supervise;
pub mod table;
pub mod tool;

pub use error::{Error, Result};
