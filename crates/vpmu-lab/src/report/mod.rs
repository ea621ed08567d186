//! The reports of guests, the figures made from them, and their display.

pub mod figures;
pub mod markdown;
pub mod page;
pub mod result;
mod stats;
pub mod table;
