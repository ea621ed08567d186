//! What guests report, the figures that come of it, and how they are shown.

pub mod figures;
pub mod markdown;
pub mod page;
pub mod result;
mod stats;
pub mod table;
