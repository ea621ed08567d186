//! The reports of guests, the figures made from them, and their display.

pub mod figures;
pub mod host_profile;
pub mod markdown;
mod number;
pub mod page;
pub mod profile;
pub mod result;
mod stats;
pub mod story;
pub mod table;
mod tables;
