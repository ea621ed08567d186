//! The monitor.
#![cfg_attr(target_os = "none", no_std)]
