//! The parts of guests: packages, a kernel, a file tree, the job to do.

pub mod archive;
pub mod artifacts;
pub mod cache;
pub mod debian;
pub mod disk;
pub mod elf;
pub mod extras;
mod fat;
pub mod host_kernel;
pub mod images;
pub mod job;
pub mod kallsyms;
mod kernel_module;
pub mod module;
pub mod program;
pub mod seed;
pub mod theirs;
