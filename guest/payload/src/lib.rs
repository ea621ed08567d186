//! A bare-metal arm64 program that checks the PMU it is given, and the
//! machine around it: what a guest sees natively, under an emulated and under
//! a partitioned PMU must be the same.
//!
//! It is an `Image` as arm64 boot loaders take it: loaded at any 2 MiB-aligned
//! address, x0 = device tree, entered at EL1 (or EL2, which it leaves at once).
//! It runs with the MMU off on one stack per CPU.
//!
//! ```text
//! cargo build --release --target aarch64-unknown-none-softfloat -p vpmu-payload
//! qemu-system-aarch64 -M virt,gic-version=3 -cpu max,pauth-impdef=on -smp 2 -m 512M \
//!     -icount shift=0,sleep=off -nographic -nic none -kernel .../release/vpmu-payload
//! ```
//!
//! What it expects of counts and times holds where the clock is the number of
//! instructions (`-icount`); in real time an interruption by the host makes
//! some of its bounds too narrow.
//!
//! # What it says
//!
//! One line per test on the PL011 of the device tree:
//! `ok NAME`, `ok NAME (deviates: ...)`, `skip NAME: reason` or
//! `FAIL NAME: reason (got .. want ..)`; then
//! `payload: N passed, N failed, N skipped`; then it powers off through PSCI.
//!
//! What is wanted is what the Arm ARM (DDI 0487, chapter D13 and the register
//! pages) says. Where a machine is known to do something else, the test lists
//! that as data ([`harness::Deviation`]): it passes and says so, or fails when
//! `strict` is on the command line.
//!
//! # Command line (`/chosen/bootargs`)
//!
//! See [`bootargs`]: which tests to run, and `test=stray`, `test=hang`,
//! `test=fuzzregs`, which are no part of the normal run.

#![cfg_attr(target_os = "none", no_std)]
#![expect(
    clippy::result_large_err,
    reason = "a failure carries its text, and there is no allocator to box it with"
)]

pub mod bootargs;
pub mod encoding;
pub mod harness;
pub mod machine;

#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod cell;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod el0;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
pub mod entry;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod gic;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod loops;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod mmio;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod percpu;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod pmu;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod psci;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod tests;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod uart;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod vectors;
