//! Evaluates the KVM host's kernel messages for its process 1.

pub mod trace;
pub mod watch;
