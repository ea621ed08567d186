//! The PMU under test.

// UNSAFETY: the interrupt handler touches PMU registers directly.
#![expect(unsafe_code, reason = "system registers")]

use core::arch::asm;

use crate::encoding::*;
use crate::fault::Fault;
use crate::percpu::{PerCpu, PmiAction};
use crate::{cell, loops};
use vpmu_payload_harness::Failure;

/// PMCR_EL0.E: count.
pub(crate) const PMCR_E: u64 = 1 << 0;
/// PMCR_EL0.P: reset the event counters.
pub(crate) const PMCR_P: u64 = 1 << 1;
/// PMCR_EL0.C: reset the cycle counter.
pub(crate) const PMCR_C: u64 = 1 << 2;
/// PMCR_EL0.D: count every 64th cycle.
pub(crate) const PMCR_D: u64 = 1 << 3;
/// PMCR_EL0.X: export events.
pub(crate) const PMCR_X: u64 = 1 << 4;
/// PMCR_EL0.DP: no cycles where event counting is prohibited.
pub(crate) const PMCR_DP: u64 = 1 << 5;
/// PMCR_EL0.LC: the cycle counter overflows at 64 bits.
pub(crate) const PMCR_LC: u64 = 1 << 6;
/// PMCR_EL0.LP: event counters overflow at 64 bits (v3p5).
pub(crate) const PMCR_LP: u64 = 1 << 7;
/// PMCR_EL0.FZO: freeze on overflow (v3p7).
pub(crate) const PMCR_FZO: u64 = 1 << 9;

/// PMEVTYPER<n>_EL0.P and PMCCFILTR_EL0.P: not at EL1.
pub(crate) const FILTER_P: u64 = 1 << 31;
/// U: not at EL0.
pub(crate) const FILTER_U: u64 = 1 << 30;
/// NSK: with EL3, inverts P outside the secure state.
pub(crate) const FILTER_NSK: u64 = 1 << 29;
/// NSU: with EL3, inverts U outside the secure state.
pub(crate) const FILTER_NSU: u64 = 1 << 28;
/// NSH: at EL2 too.
pub(crate) const FILTER_NSH: u64 = 1 << 27;

/// The cycle counter's bit, and its number in PMSELR_EL0.
pub(crate) const CYCLE: u8 = 31;

/// Events by number.
pub(crate) mod event {
    pub(crate) const SW_INCR: u16 = 0x00;
    pub(crate) const INST_RETIRED: u16 = 0x08;
    pub(crate) const CPU_CYCLES: u16 = 0x11;
    pub(crate) const CHAIN: u16 = 0x1e;
}

/// ID_AA64DFR0_EL1.PMUVer of PMUv3p1.
pub(crate) const V3P1: u64 = 4;
/// ID_AA64DFR0_EL1.PMUVer of PMUv3p5.
pub(crate) const V3P5: u64 = 6;
/// ID_AA64DFR0_EL1.PMUVer of PMUv3p7.
pub(crate) const V3P7: u64 = 7;
/// ID_AA64DFR0_EL1.PMUVer of PMUv3p9.
pub(crate) const V3P9: u64 = 9;

/// The identity of this PMU, from its own registers.
#[derive(Clone, Copy)]
pub(crate) struct Pmu {
    /// PMCR_EL0.N.
    pub(crate) counters: u8,
    /// ID_AA64DFR0_EL1.PMUVer.
    pub(crate) version: u64,
    /// Whether there is an EL3.
    pub(crate) el3: bool,
    ceid: [u64; 2],
}

impl Pmu {
    /// Reads the PMU's identity.
    pub(crate) fn identify() -> Result<Self, Fault> {
        Ok(Self {
            counters: (cell::read(PMCR_EL0)? >> 11 & 0x1f) as u8,
            version: cell::read(ID_AA64DFR0_EL1)? >> 8 & 0xf,
            el3: cell::read(ID_AA64PFR0_EL1)? >> 12 & 0xf != 0,
            ceid: [cell::read(PMCEID0_EL0)?, cell::read(PMCEID1_EL0)?],
        })
    }

    /// Returns the bits of the existing counters, cycle counter included.
    pub(crate) fn mask(&self) -> u64 {
        1 << CYCLE | ((1 << self.counters) - 1)
    }

    /// Returns whether PMCEID<n>_EL0 offers `event`, a common event below 0x40.
    pub(crate) fn offers(&self, event: u16) -> bool {
        self.ceid[usize::from(event >> 5 & 1)] & 1 << (event & 0x1f) != 0
    }

    /// Returns whether event counters have 64 bits.
    pub(crate) fn long_counters(&self) -> bool {
        self.version >= V3P5
    }

    /// Sets the PMU to a known state: all off, all zero.
    pub(crate) fn reset(&self) -> Result<(), Fault> {
        cell::write(PMCR_EL0, 0)?;
        cell::write(PMCNTENCLR_EL0, !0)?;
        cell::write(PMINTENCLR_EL1, !0)?;
        cell::write(PMUSERENR_EL0, 0)?;
        cell::write(PMSELR_EL0, 0)?;
        for n in 0..self.counters {
            cell::write(pmevtyper(n), 0)?;
            cell::write(pmevcntr(n), 0)?;
        }
        cell::write(PMCCFILTR_EL0, 0)?;
        cell::write(PMCCNTR_EL0, 0)?;
        cell::write(PMOVSCLR_EL0, !0)
    }

    /// Sets counter `n` to `value`, to count `event` (with filter bits), not
    /// enabled. Counter 31 takes filter bits only.
    pub(crate) fn set_up(&self, n: u8, event: u64, value: u64) -> Result<(), Fault> {
        if n == CYCLE {
            cell::write(PMCCFILTR_EL0, event)?;
            cell::write(PMCCNTR_EL0, value)
        } else {
            cell::write(pmevtyper(n), event)?;
            cell::write(pmevcntr(n), value)
        }
    }

    /// Returns the value of counter `n`.
    pub(crate) fn value(&self, n: u8) -> Result<u64, Fault> {
        cell::read(if n == CYCLE { PMCCNTR_EL0 } else { pmevcntr(n) })
    }

    /// Returns the count of `event` by `n` while `rounds` rounds run at EL1.
    pub(crate) fn count(&self, n: u8, event: u64, rounds: u64) -> Result<u64, Fault> {
        self.set_up(n, event, 0)?;
        loops::counted(1 << n, rounds);
        self.value(n)
    }

    /// Returns the count of `event` by `n` in 1,000 rounds at EL1. The result
    /// is the difference of two counts, so it has nothing but the rounds.
    pub(crate) fn count_rounds(&self, n: u8, event: u64) -> Result<u64, Fault> {
        let few = self.count(n, event, 1_000)?;
        let more = self.count(n, event, 2_000)?;
        Ok(more.wrapping_sub(few))
    }

    /// Counts like [`Self::count_rounds`], but the rounds run at EL0.
    pub(crate) fn count_rounds_at_el0(&self, n: u8, event: u64) -> Result<u64, Fault> {
        let count = |rounds| {
            self.set_up(n, event, 0)?;
            cell::write(PMCNTENSET_EL0, 1 << n)?;
            loops::spin_at_el0(rounds)?;
            cell::write(PMCNTENCLR_EL0, 1 << n)?;
            self.value(n)
        };
        let few = count(1_000)?;
        let more = count(2_000)?;
        Ok(more.wrapping_sub(few))
    }
}

/// Reads a register that must be there.
pub(crate) fn read(register: Encoding) -> Result<u64, Failure> {
    Ok(cell::read(register)?)
}

/// Writes a register that must be there.
pub(crate) fn write(register: Encoding, value: u64) -> Result<(), Failure> {
    Ok(cell::write(register, value)?)
}

/// Handles the PMU in the interrupt handler. `count` is how often this
/// interrupt has come.
pub(crate) fn handle_interrupt(cpu: &PerCpu, count: u32) {
    let flags: u64;
    // SAFETY: reads the overflow flags.
    unsafe { asm!("mrs {}, pmovsset_el0", out(reg) flags) };
    if flags == 0 {
        return;
    }
    cpu.set_pmi_flags(flags);
    let action = cpu.pmi_action();
    if action == PmiAction::KeepOnce && count == 1 {
        return;
    }
    // SAFETY: clears flags and enables.
    unsafe {
        if action == PmiAction::Stop {
            asm!("msr pmcntenclr_el0, {}", in(reg) !0_u64);
        }
        asm!("msr pmovsclr_el0, {}", "isb", in(reg) flags);
    }
}
