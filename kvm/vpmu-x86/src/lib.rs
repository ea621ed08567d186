//! An interpreter of x86-64 guest code, which a hypervisor uses to spare exits.
//!
//! - [`paging`]: a guest's page tables, and the rule by which they permit an access.
//! - [`replay`](mod@replay): executes a guest's instructions exactly, and makes what they store visible at one moment.
//! - [`predict`]: executes on values of which not every bit is known, to learn where a guest is going. It changes nothing.
//!
//! Arithmetic, flags, conditions and addresses are the same code in both: the machine is generic over what a
//! [`Word`](word::Word) knows, and over the bus by which it reaches memory.
//!
//! The guest is hostile. Every loop that a guest can lengthen has a budget, nothing here allocates once it is made, and none of it
//! panics whatever the registers, the tables and the code are.
#![cfg_attr(not(test), forbid(unsafe_code))]

pub mod cpu;
pub mod memory;
pub mod paging;

#[cfg(feature = "interpreter")]
mod code;
#[cfg(feature = "interpreter")]
mod flags;
#[cfg(feature = "interpreter")]
mod journal;
#[cfg(feature = "interpreter")]
mod machine;
#[cfg(feature = "interpreter")]
mod op;
#[cfg(feature = "interpreter")]
pub mod predict;
#[cfg(feature = "interpreter")]
pub mod replay;
#[cfg(feature = "interpreter")]
mod space;
#[cfg(feature = "interpreter")]
pub mod word;

pub use cpu::Executed;
#[cfg(feature = "interpreter")]
pub use cpu::Stop;
#[cfg(feature = "interpreter")]
pub use op::Kind;

#[cfg(all(test, target_os = "linux", target_arch = "x86_64"))]
mod tests;
