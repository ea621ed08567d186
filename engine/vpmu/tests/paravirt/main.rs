//! Tests of the paravirtual device: against its rules, against a reference of its own, and under a hostile guest.

mod cost;
mod hostile;
mod properties;
mod records;
mod rules;
mod support;
