//! A small hypervisor: boots stock Linux at EL1 on QEMU's virt machine, on one CPU, with a PMU of its own.
//!
//! What a hypervisor needs for its guest's PMU is in `pmu.rs`, and everything else here is what any hypervisor has. See
//! docs/embed/embedding-el2.md for the order of calls.
//!
//! UNSAFETY: a hypervisor writes system registers and page tables, and enters its guest.
#![cfg_attr(target_os = "none", no_std, no_main)]
#![cfg_attr(
    target_os = "none",
    expect(unsafe_code, reason = "the machine has no safe form")
)]

#[cfg(target_os = "none")]
mod gic;
#[cfg(target_os = "none")]
mod machine;
#[cfg(target_os = "none")]
mod pmu;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("build this for aarch64-unknown-none-softfloat: see examples/el2/README.md");
    std::process::exit(2);
}
