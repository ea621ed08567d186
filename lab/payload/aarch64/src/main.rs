//! The image; everything is in the library.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
use vpmu_payload_aarch64 as _;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("vpmu-payload-aarch64: built for a guest, does nothing on the host");
}
