//! The vpmu engine for hypervisors written in C.
//!
//! `include/vpmu.h` is made from this crate and says what each function does; this page says what
//! holds for all of them. The engine's functions allocate nothing and keep no state of their own:
//! the caller gives the room for each PMU, and a PMU may be moved with `memcpy` between two calls. The
//! functions `vpmu_kvm_*` are for VMMs on Linux, and allocate.
//!
//! One PMU is one vCPU's. Calls for the same PMU must not overlap; different PMUs are independent.
//!
//! # Safety
//!
//! The caller promises what C programs know: a pointer is null or points to what its type says, of the length that is stated
//! with it, and nobody else uses that memory during the call. C alone makes the [`Ref`]s and [`Mut`]s that are the functions'
//! pointers, so that Rust's compiler need not ask for the promise. A null or misaligned pointer, a length beyond any sense, or room that no `vpmu_*_init` has filled is
//! answered with `VPMU_STATUS_MISUSE`, and nothing happens. Handles of `vpmu_kvm_*` are numbers: a stale one is refused.
//!
//! UNSAFETY: C hands over raw pointers and functions.
#![expect(unsafe_code, reason = "an interface for C")]
#![cfg_attr(not(feature = "kvm"), no_std)]

#[cfg(feature = "x86")]
mod amd;
#[cfg(feature = "arm")]
mod arm;
#[cfg(feature = "arm")]
mod backed;
mod counter;
#[cfg(all(feature = "el2", target_arch = "aarch64", target_os = "none"))]
mod el2;
#[cfg(feature = "arm")]
mod filter;
mod host;
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
mod kvm;
#[cfg(feature = "arm")]
mod partition;
#[cfg(feature = "arm")]
mod pmu;
#[cfg(feature = "arm")]
mod registers;
mod room;
mod state;
mod status;
mod version;
#[cfg(feature = "x86")]
mod x86;

#[cfg(feature = "x86")]
pub use amd::*;
#[cfg(feature = "arm")]
pub use arm::*;
#[cfg(feature = "arm")]
pub use backed::*;
pub use counter::*;
#[cfg(all(feature = "el2", target_arch = "aarch64", target_os = "none"))]
pub use el2::*;
#[cfg(feature = "arm")]
pub use filter::*;
pub use host::*;
#[cfg(all(feature = "kvm", target_os = "linux", target_arch = "x86_64"))]
pub use kvm::*;
#[cfg(feature = "arm")]
pub use partition::*;
#[cfg(feature = "arm")]
pub use registers::VpmuRegisters;
pub use room::{Mut, Ref};
pub use state::VPMU_STATE_SIZE;
pub use status::*;
pub use version::*;
#[cfg(feature = "x86")]
pub use x86::*;

// The engine cannot panic (its release build holds no call of a panic function), but the compiler
// wants a handler where there is no standard library to bring it.
#[cfg(all(not(feature = "kvm"), not(test)))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}
