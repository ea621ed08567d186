//! The program; everything is in the library.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
use vpmu_payload_x86_64 as _;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("vpmu-payload-x86_64: built for a guest, does nothing on the host");
}
