//! The Arm Performance Monitors Extension, PMUv3, as a guest at EL1 and EL0 sees it.
//!
//! # Why it is driven this way
//!
//! PMUv3 (Arm ARM DDI 0487, chapter D13 "The Performance Monitors Extension", and the register pages of chapter D24) is
//! up to 31 event counters and one cycle counter, each with an enable, an interrupt-enable and an overflow bit held in
//! *set/clear pairs* of registers: writing ones to PMCNTENSET_EL0 enables, writing ones to PMCNTENCLR_EL0 disables, and
//! reading either gives the same bits. One bit, PMCR_EL0.E, gates them all. The interrupt line is a plain level, the OR
//! of PMOVS & PMINTEN gated by PMCR_EL0.E (`CheckForPMUOverflow` in the manual's pseudocode), so this engine never
//! latches the line: it computes the level from the registers at each query.
//!
//! A profiler takes one interrupt for each sample and touches about ten registers in its handler.
//! When each touch is a trap to the hypervisor, profiling measures the hypervisor. The two designs
//! here answer that differently:
//!
//! - [`emulated`]: the engine models the PMU. What a trap costs is then what the engine makes the host do, so the
//!   engine touches a host counter only where the guest's write really changed something. Where the host is a CPU's own
//!   counters, an access that these answer as the model would does not trap.
//! - [`partition`]: the guest owns hardware counters `0..MDCR_EL2.HPMN` and reaches the hot
//!   registers without a trap; one plan decides what still has to trap and says why the rest is
//!   safe.
//!
//! Both speak of a register as a [`Register`], decoded from the trap's syndrome, answer with an
//! [`Outcome`], and save to the same [`PmuState`].

//! # In a hypervisor at EL2
//!
//! Build for `aarch64-unknown-none-softfloat`. For `aarch64-unknown-none` the compiler copies values through SIMD
//! registers, which are the guest's: a hypervisor that does not save them at each exit corrupts its guests, silently. A
//! test of the C library finds no such register in its object.
//!
//! A PMU takes some kilobytes and has no place on a hypervisor's stack: put a `vacant()` one into a static or the vCPU's
//! own memory, and make it the PMU that is wanted by `init`. No function that the C library calls takes more than 1 KiB
//! of stack, as a test computes; of these a `save`, which returns a [`PmuState`], and the making of a
//! [`Plan`](partition::Plan) take most. `new` returns the PMU by value, which costs its size once or several times.

mod access;
mod config;
pub mod emulated;
mod filter;
pub mod partition;
mod register;
mod state;
mod version;

pub use config::{
    CHAIN, CPU_CYCLES, CYCLE_COUNTER, CounterConfig, EventKind, MAX_EVENT_COUNTERS, RawPmevtyper,
    SW_INCR, pmcr, pmuserenr,
};
pub use filter::{EventFilter, TooManyRules};
pub use register::{Encoding, Register};
use state::fits;
pub use state::{PmuState, RestoreError};
pub use version::PmuVersion;

/// Where in the guest an access came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
// No guest here has an EL2 or EL3: virtualization is not nested.
pub enum ExceptionLevel {
    /// The guest's user space: what it may touch is decided by the guest's PMUSERENR_EL0.
    El0,
    /// The guest's kernel.
    El1,
}

/// How an access ended, and so what the caller does next. The engine never injects anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "the access is complete only when the caller has acted on its outcome"]
pub enum Outcome {
    /// Not a register of this PMU: the caller goes on as for any unknown register.
    NotHandled,
    /// A read is complete: put the value into Xt and step over the instruction.
    Value(u64),
    /// A write is complete: step over the instruction.
    Done,
    /// Inject an Undefined Instruction exception (EC 0x00) into EL1.
    Undefined,
    // Not undefined: the syndrome names the register for the guest's kernel, and the kernel may emulate that.
    /// User space was refused: inject a trapped system register access (EC 0x18) into EL1, with
    /// the syndrome of the trap that brought the access here.
    TrapToEl1,
}
