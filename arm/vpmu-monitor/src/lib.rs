//! An EL2 monitor for AArch64: boots one stock Linux at EL1 with the PMU design you choose.
//!
//! This library is the monitor's logic, free of the machine so that it can be tested on any host:
//! what to read from the device tree, what an exit means, which interrupt goes into which list register,
//! what the guest's PMU does. The program beside it (`main.rs`) is the machine: vectors,
//! system registers, page tables. Nothing here allocates after boot, prints or panics on an exit's path.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod boot;
pub mod lock;
pub mod regs;
pub mod world;
