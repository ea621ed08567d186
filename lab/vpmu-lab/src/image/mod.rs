//! The parts of guests: packages, a kernel, a file tree, the job to do.

pub mod archive;
pub mod artifacts;
pub mod cache;
pub mod debian;
pub mod disk;
pub mod elf;
pub(crate) mod extras;
mod fat;
pub(crate) mod host_kernel;
pub mod images;
pub mod job;
pub(crate) mod kallsyms;
mod kernel_module;
pub mod module;
pub(crate) mod program;
pub(crate) mod seed;
pub(crate) mod theirs;
