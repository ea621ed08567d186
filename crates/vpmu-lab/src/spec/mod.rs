//! What to run, and on what.

pub mod arch;
pub mod command;
pub mod design;
