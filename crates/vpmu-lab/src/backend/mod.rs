//! The ways to run a guest.

pub mod boot_file;
pub mod qemu;
