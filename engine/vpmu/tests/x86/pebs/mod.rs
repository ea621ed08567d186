//! Tests of PEBS: records of counters that overflow.

mod behaviour;
mod branches;
mod model;
mod sampling;
mod ways;
