//! This machine: its programs, its files, its processors, and the user who waits.

pub mod cancel;
pub(crate) mod digest;
pub mod files;
pub(crate) mod parallel;
pub mod progress;
pub mod qemu;
pub mod tool;
