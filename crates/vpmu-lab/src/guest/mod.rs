//! What guests are made of: a kernel, a file tree, the job to do.

pub mod artifacts;
pub mod images;
pub mod job;
pub mod module;
