//! What process 1 of the KVM host makes of what its kernel says.

pub mod trace;
pub mod watch;
