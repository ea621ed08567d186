//! Tests of PEBS: records of counters that overflow.

mod behaviour;
mod model;
mod sampling;
mod ways;
