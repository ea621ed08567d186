//! `workload [--scale N] [NAME]`
//!
//! Executes a known number of instructions in functions of known weight, see
//! [`vpmu_guest_tools::mix`], prints nothing and returns 0 (2 for a command
//! line that makes no sense). With NAME (`main`, `foo`, `bar` or `qux`) it
//! calls only that function.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod functions;

#[cfg(target_os = "none")]
vpmu_guest_tools::start!(run);

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("workload: built for a guest, does nothing on the host");
}

#[cfg(target_os = "none")]
fn run(process: vpmu_guest_tools::start::Process) -> i32 {
    use vpmu_guest_tools::{options::Workload, sys::Fd};

    match Workload::parse(process.arguments()) {
        Ok(options) => {
            functions::main(options.scale, options.functions.bits());
            0
        }
        Err(error) => {
            Fd::STDERR.say(format_args!(
                "workload: {error}\nusage: workload [--scale N] [main|foo|bar|qux]"
            ));
            2
        }
    }
}
