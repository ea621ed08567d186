//! `kvm-host`: process 1 of the KVM host, which runs a guest on stock KVM.
//!
//! The job is a file ([`vpmu_measure::HostJob`]), and the guest's kernel and initrd are in `/guest`.
//! Reports ([`vpmu_measure::Record`]) go to the console, as does the output of the guest's first
//! serial port. The host powers off when its guest has ended. busybox does everything that is not
//! the host's own work.

#![cfg_attr(target_os = "none", no_std, no_main)]

#[cfg(target_os = "none")]
extern crate alloc;

#[cfg(target_os = "none")]
mod disturb;
#[cfg(target_os = "none")]
mod exec;
#[cfg(target_os = "none")]
mod host;
#[cfg(target_os = "none")]
mod monitor;
#[cfg(target_os = "none")]
mod ours;
#[cfg(target_os = "none")]
mod qemu;
#[cfg(target_os = "none")]
mod serve;
#[cfg(target_os = "none")]
mod stats;
#[cfg(target_os = "none")]
mod theirs;
#[cfg(target_os = "none")]
mod tracing;

#[cfg(target_os = "none")]
vpmu_guest_tools::start!(serve::run);

#[cfg(not(target_os = "none"))]
fn main() {
    eprintln!("kvm-host: built for a KVM host's image, does nothing here");
}
