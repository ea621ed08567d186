//! The program; everything is in the library.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
use vpmu_payload86 as _;

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("vpmu-payload86: built for a guest, does nothing on the host");
}
