//! The x86 engine from outside, as a guest and its host see it. One program, so that its parts can
//! share a host.

mod amd;
mod behaviour;
mod guest;
mod host_calls;
mod lbr;
mod model;
mod orders;
mod pair;
mod pebs;
mod pebs_reference;
mod policy;
mod reference;
mod registers;
mod samples;
mod state;
mod support;
