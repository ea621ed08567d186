//! What the programs `meter` and `workload` are made of.
//!
//! Both run inside a guest that is nothing but a kernel and an initramfs, so
//! they are static, freestanding ELF programs: no libc, no allocation, raw
//! Linux system calls. They are built for a bare-metal target
//! (`aarch64-unknown-none-softfloat`), which needs no cross linker:
//!
//! ```text
//! cargo build --release --target aarch64-unknown-none-softfloat -p vpmu-guest-tools
//! ```
//!
//! [`interrupts`], [`mix`], [`options`], [`report`] and [`search`] are plain
//! code, unit-tested on the host. `arch`, `doorbell`, `start` and `sys` exist
//! on the bare target only; one more architecture is one more file in `arch/`
//! and, for the workload, in `bin/workload/`.

#![cfg_attr(target_os = "none", no_std)]

pub mod interrupts;
pub mod mix;
pub mod options;
pub mod report;
pub mod search;

#[cfg(target_os = "none")]
#[cfg_attr(target_arch = "aarch64", path = "arch/aarch64.rs")]
mod arch;
#[cfg(target_os = "none")]
pub mod doorbell;
#[cfg(target_os = "none")]
pub mod start;
#[cfg(target_os = "none")]
pub mod sys;
