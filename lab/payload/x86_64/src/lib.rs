//! A bare-metal x86-64 program that checks its PMU: Intel's architectural
//! performance monitoring as a guest's kernel meets it, with nothing between
//! the test and the registers.
//!
//! It is an ELF file for the 64-bit boot protocol: entered in long mode with
//! the first 4 GiB mapped onto themselves and RSI at the boot parameters.
//! QEMU's machines boot it, too, by its PVH entry (`pvh`). `vpmu-vmm` boots it:
//!
//! ```text
//! cargo build --release --manifest-path lab/Cargo.toml --target x86_64-unknown-none -p vpmu-payload-x86_64
//! vpmu-vmm --kernel .../release/vpmu-payload-x86_64 --append "" --vcpus 2
//! vpmu run --arch x86_64 --pmu emulated --kernel .../release/vpmu-payload-x86_64
//! ```
//!
//! # Output
//!
//! The program prints a line for each test and their tally on the first serial
//! port ([`vpmu_payload_harness`]). Then it powers off.
//!
//! The reference is the SDM (Intel 64 and IA-32 Architectures Software Developer's Manual, vol. 3B, chapter 20, and
//! vol. 4, table 2-2), given CPUID's values. For AMD's PMU, on AMD's processors, the reference is the APM and the PPRs.
//! Each test lists the known deviations of virtual PMUs, as a [`Deviation`](vpmu_payload_harness::Deviation).
//!
//! # Time
//!
//! No test sets a time limit for an event. A test waits for what must happen,
//! and watches for a while that nothing else happens.
//!
//! # Command line
//!
//! `test=NAME` runs the tests whose name begins with NAME. See
//! [`BootArgs`](vpmu_payload_harness::BootArgs).

#![cfg_attr(target_os = "none", no_std)]
#![cfg_attr(
    target_os = "none",
    expect(
        clippy::result_large_err,
        reason = "a failure carries its text, and there is no allocator to box it with"
    )
)]

pub mod amd;
pub mod boot;
pub mod msr;
pub mod random;

#[cfg(target_os = "none")]
mod apic;
#[cfg(target_os = "none")]
mod descriptors;
#[cfg(target_os = "none")]
pub mod entry;
#[cfg(target_os = "none")]
mod fault;
#[cfg(target_os = "none")]
mod instructions;
#[cfg(target_os = "none")]
mod percpu;
#[cfg(target_os = "none")]
mod pmu;
#[cfg(target_os = "none")]
mod ports;
#[cfg(target_os = "none")]
mod pvh;
#[cfg(target_os = "none")]
mod smp;
#[cfg(target_os = "none")]
mod tests;
#[cfg(target_os = "none")]
mod user;
#[cfg(target_os = "none")]
mod vectors;
