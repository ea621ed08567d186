//! A bare-metal arm64 program that checks its PMU and the machine around it. A
//! guest's view must be the same natively, under an emulated and under a
//! partitioned PMU.
//!
//! It is an `Image` as arm64 boot loaders take it: loaded at any 2 MiB-aligned
//! address, x0 = device tree, entered at EL1 (or EL2, which it leaves at once).
//! It runs with the MMU off on one stack per CPU.
//!
//! ```text
//! cargo build --release --manifest-path lab/Cargo.toml --target aarch64-unknown-none-softfloat -p vpmu-payload-aarch64
//! qemu-system-aarch64 -M virt,gic-version=3 -cpu max,pauth-impdef=on -smp 2 -m 512M \
//!     -icount shift=0,sleep=off -nographic -nic none -kernel .../release/vpmu-payload-aarch64
//! ```
//!
//! The expected counts and times hold where the clock is the number of
//! instructions (`-icount`). In real time, an interruption by the host makes
//! some of the bounds too narrow.
//!
//! # Output
//!
//! The program prints a line for each test and their tally on the PL011 of the
//! device tree ([`vpmu_payload_harness`]). Then it powers off through PSCI.
//!
//! The reference is the Arm ARM (DDI 0487, chapter D13 and the register pages).
//! Each test lists the known deviations of machines, as a
//! [`Deviation`](vpmu_payload_harness::Deviation).
//!
//! # Command line (`/chosen/bootargs`)
//!
//! See [`BootArgs`](vpmu_payload_harness::BootArgs). The usual run excludes these: `test=fuzzregs`
//! reads and writes every system register encoding, `test=stray addr=A` writes to A, which a
//! monitor below must stop, `test=attack.its` and `test=attack.lpi` (with `addr=A`) make the
//! interrupt controller write to A, `test=storm` and `test=switch.` run beside another guest, `test=el2.` needs EL2 for
//! the program's own, and `test=hang` prints a line and then never does anything again.

#![cfg_attr(target_os = "none", no_std)]
#![cfg_attr(
    target_os = "none",
    expect(
        clippy::result_large_err,
        reason = "a failure carries its text, and there is no allocator to box it with"
    )
)]

pub mod encoding;
pub mod machine;

#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod cell;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod el0;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
pub mod entry;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod fault;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod gic;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod loops;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod mmio;
#[cfg(all(target_os = "none", target_arch = "aarch64"))]
mod normal;
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
