//! The doorbell, by which a program tells the hypervisor below to begin and to
//! end measuring: a page of memory on AArch64, an I/O port on x86-64.

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod machine;

pub use machine::{Doorbell, NoDoorbell};
