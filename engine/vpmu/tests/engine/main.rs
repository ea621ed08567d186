//! The engine from outside, as a guest and its host see it. One program, so that its parts can
//! share a host.

mod counting;
mod host_calls;
mod model;
mod pair;
mod reference;
mod registers;
mod regressions;
mod state;
mod support;
