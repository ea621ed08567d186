//! What every hypervisor at EL2 needs around the `vpmu` engine.
//!
//! - [`access`]: a trapped access of a PMU register, from its syndrome to the state in which the guest goes on;
//! - [`exception`]: an exception into EL1, as a function of register values;
//! - [`aarch32`]: PMU accesses of an EL0 in AArch32;
//! - `inject` (for bare-metal AArch64 only, as all below): gives an exception to EL1;
//! - `PhysicalPmu`: the PMU's registers of this CPU;
//! - `partition_config`, `emulated_config`, `features`: what this CPU has; `set_traps`: what of it traps;
//! - `probe`: attacks the partition of this CPU from EL1, EL0 and AArch32 before it is trusted.
//!
//! The first three need no machine and are tested on any. Nothing here allocates or prints.
#![no_std]

pub mod aarch32;
pub mod access;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[expect(unsafe_code, reason = "writes system registers")]
mod cpu;
pub mod exception;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[expect(unsafe_code, reason = "writes system registers")]
mod inject;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[expect(unsafe_code, reason = "enters EL1 and EL0")]
mod probe;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[expect(unsafe_code, reason = "accesses system registers")]
mod registers;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[expect(unsafe_code, reason = "accesses system registers")]
mod sysreg;

#[cfg(all(target_arch = "aarch64", target_os = "none"))]
pub use cpu::{emulated_config, features, id_registers, partition_config, set_traps};
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
pub use inject::inject;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
pub use probe::probe;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
pub use registers::PhysicalPmu;
#[cfg(all(target_arch = "aarch64", target_os = "none"))]
#[doc(hidden)]
pub use sysreg::isb;
