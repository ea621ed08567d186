//! The lazy TSC deadline against a naive timer: the same interrupts, fewer exits.

mod hazards;
mod hostile;
mod machine;
mod plain;
mod properties;
mod workload;
