//! Last branch records of either vendor.

mod behaviour;
mod model;
mod pair;
mod reference;
