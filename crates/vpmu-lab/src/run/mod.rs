//! Runs of guests: under supervision, with retries, several side by side.

pub mod compare;
pub mod console;
pub mod experiment;
pub mod supervise;
