//! The EL2 monitor's program: see the library beside it for what it does.
#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
extern crate alloc;

#[cfg(target_os = "none")]
mod machine;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!(
        "vpmu-monitor runs on a bare AArch64 machine: build it for aarch64-unknown-none-softfloat"
    );
    std::process::exit(2);
}
