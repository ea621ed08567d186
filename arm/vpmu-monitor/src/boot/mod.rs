//! The boot files and tables that a bootloader hands over: device tree, command line, the guest's image.

pub mod acpi;
pub mod blob;
pub mod console;
pub mod device_tree;
pub mod guest_image;
pub mod home;
mod nodes;
mod pmu;
pub mod second;
pub mod uefi;
pub mod words;
