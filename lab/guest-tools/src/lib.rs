//! The common parts of the programs `meter`, `workload`, `self-monitor`, `kexec` and `kvm-host`.
//!
//! They run where there is only a kernel and an initramfs. So they are static,
//! freestanding ELF programs: no libc, raw Linux system calls. They are built
//! for bare-metal targets, which need no cross linker:
//!
//! ```text
//! cargo build --release --manifest-path lab/Cargo.toml --target aarch64-unknown-none-softfloat -p vpmu-guest-tools
//! cargo build --release --manifest-path lab/Cargo.toml --target x86_64-unknown-none -p vpmu-guest-tools
//! ```
//!
//! [`end`], [`interrupts`], [`kvm`], [`mix`], [`options`] and [`search`] are
//! plain code, unit-tested on the host. The other modules exist on the bare
//! targets only; one more architecture is one more entry in `start`, and one more file in
//! `doorbell/` and, for the workload, in `bin/workload/`.

#![cfg_attr(target_os = "none", no_std)]

extern crate alloc;

pub mod end;
pub mod interrupts;
pub mod kvm;
pub mod mix;
pub mod options;
pub mod search;

#[cfg(target_os = "none")]
pub mod doorbell;
#[cfg(target_os = "none")]
pub mod files;
#[cfg(target_os = "none")]
mod heap;
#[cfg(all(target_os = "none", target_arch = "x86_64"))]
pub mod kexec;
#[cfg(target_os = "none")]
pub mod program;
#[cfg(target_os = "none")]
pub mod start;
#[cfg(target_os = "none")]
pub mod sys;
