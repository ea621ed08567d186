//! Bits of the registers that the monitor uses, by name.
//!
//! Layouts that the `arm-sysregs` crate has are taken from there (Arm ARM DDI 0487, chapter D24, "AArch64
//! System Register Descriptions"); this room adds those that it lacks.

pub mod list_register;

pub use arm_sysregs::{el1::registers::IccCtlrEl1, el2::registers::IchHcrEl2};
