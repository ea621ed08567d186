//! The partitioned design: the guest owns hardware counters and reaches them without a trap.
//!
//! # Why it is driven this way
//!
//! MDCR_EL2.HPMN divides the event counters of a CPU in two ranges (DDI 0487, D13.7 "Controlling
//! the PMU counters", and the register page of MDCR_EL2). EL1 and EL0 have the counters `0..HPMN`
//! and the cycle counter, controlled by PMCR_EL0; the rest is EL2's alone, controlled by
//! MDCR_EL2.{HPME, HLP}. Below EL2 the architecture makes the second range vanish: PMCR_EL0.N reads
//! as HPMN, the bits of host counters read as zero and ignore writes in every set/clear pair, and
//! PMCR_EL0.P resets only the first range. So a guest may be given the real registers, and what a
//! profiler does for each sample costs nothing but the physical interrupt.
//!
//! At EL2 nothing vanishes, and that is where mistakes are made: a write of PMCR_EL0.P at EL2
//! resets *all* counters, and a set/clear register written with ones reaches all of them. This
//! module therefore writes only bits of the guest's counters, never sets PMCR_EL0.P or C, and
//! performs a trapped reset counter by counter.
//!
//! Three things remain to be decided, and [`Plan::new`] decides them all:
//!
//! - *Counting at EL2.* The guest programs PMEVTYPERn_EL0.NSH too. Either MDCR_EL2 forbids its
//!   counters to count at EL2, or NSH is cleared at each exit.
//! - *Events* the guest may not count, which must trap to be noticed.
//! - *Machines that do not isolate* (QEMU): [`probe`](probe()) attacks the partition at boot, and where it is
//!   not proven, and the host keeps counters, everything traps.
//!
//! # Who does what
//!
//! The physical registers change hands at a switch: [`PartitionedPmu::load`] and
//! [`PartitionedPmu::put`]. A guest that does not use its PMU pays for neither, since nothing is
//! loaded before its first access (which traps for that purpose), and an idle PMU is not loaded
//! again. The caller
//!
//! - writes [`PartitionedPmu::trap_registers`] (with its own bits) to MDCR_EL2, and where FEAT_FGT
//!   exists to HDFGRTR_EL2 and HDFGWTR_EL2, before it enters the guest and whenever the value
//!   changed: it may change in `load`, `put`, `read`, `write`, `migrate` and `restore`;
//! - calls `load` after it has chosen this vCPU for a CPU and `put` before it takes it off, on that
//!   same CPU and with MDCR_EL2.HPMN of the plan in force;
//! - calls [`PartitionedPmu::exited`] first at each exit;
//! - at the physical PMU interrupt asks [`PartitionedPmu::overflow`] whose it is;
//! - needs no ISB for the registers, because [`PmuRegisters`] has it, but needs one between writing MDCR_EL2 and the
//!   next `load` or `put`. Entering the guest is a context synchronization event anyway.

mod error;
mod machine;
mod plan;
mod pmu;
mod probe;
mod swinc;
mod switch;
mod traps;

pub use error::{MigrateError, PlanError};
pub use machine::{Features, Isolation};
pub use plan::{PartitionConfig, Plan, Why};
pub use pmu::{OverflowSplit, PartitionedPmu, Residence};
pub use probe::{Accesses, Attacker, Findings, ProbedCpu, probe};
pub use traps::TrapRegisters;

use super::Register;

/// The PMU registers of the CPU that executes this, accessed from EL2.
///
/// A write has taken effect before the next call: the implementation has an ISB behind it. The
/// engine relies on it where it stops counters before it reads them.
///
/// Only registers that exist are accessed, and event counters below PMCR_EL0.N: an implementation
/// may ignore others.
pub trait PmuRegisters {
    /// Executes an MRS of `register`.
    fn read(&mut self, register: Register) -> u64;

    /// Executes an MSR to `register`, and an ISB.
    fn write(&mut self, register: Register, value: u64);
}

/// Stops all counters and clears their interrupts, which are UNKNOWN after reset: once on each CPU, before the first guest.
pub fn quiet<R: PmuRegisters>(registers: &mut R) {
    // Bit 32 is FEAT_PMUv3_ICNTR's, which the PMU never uses, and whose interrupt would otherwise not end.
    const EVERY_COUNTER: u64 = 0x1_ffff_ffff;
    registers.write(Register::PmcntenClr, EVERY_COUNTER);
    registers.write(Register::PmintenClr, EVERY_COUNTER);
    registers.write(Register::PmovsClr, EVERY_COUNTER);
}
