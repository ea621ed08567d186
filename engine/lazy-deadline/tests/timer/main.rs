//! The lazy TSC deadline against a naive timer: the same interrupts, fewer exits.

mod break_even;
mod guest_only;
mod hazards;
mod hostile;
mod machine;
mod migration;
mod module;
mod plain;
mod properties;
mod rate;
mod workload;
