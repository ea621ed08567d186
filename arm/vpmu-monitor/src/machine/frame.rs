//! The guest's registers at an exit, and an exception put back into it.
//!
//! UNSAFETY: writes EL1's exception registers.

use vpmu::arm::ExceptionLevel;
use vpmu_monitor::regs::{SPSR_EL1H_MASKED, translation::VTTBR_VMID_SHIFT};
use vpmu_monitor::world::{
    aarch32,
    exit::{self, ExceptionEntry},
    profile::Sample,
    statistics::{CpuStatistics, Kind},
};

use super::{
    cpu::Cpu,
    sysreg::{now, read_sysreg, write_sysreg},
};

/// The guest's registers at an exit; the layout is known to `entry.s`.
#[derive(Clone)]
#[repr(C)]
pub(crate) struct Frame {
    pub(super) x: [u64; 31],
    elr: u64,
    spsr: u64,
    /// `CNTPCT_EL0` when the exit began.
    entered: u64,
}

const _: () = assert!(
    size_of::<Frame>() == 272,
    "entry.s stores pairs at fixed offsets"
);

impl Frame {
    /// Of a guest that begins at `pc` with `x0`.
    pub(super) fn entry(pc: u64, x0: u64) -> Self {
        let mut x = [0; 31];
        x[0] = x0;
        Self {
            x,
            elr: pc,
            spsr: SPSR_EL1H_MASKED,
            entered: 0,
        }
    }

    pub(super) fn register(&self, n: usize) -> u64 {
        self.x.get(n).copied().unwrap_or(0)
    }

    pub(super) fn set_register(&mut self, n: usize, value: u64) {
        if let Some(register) = self.x.get_mut(n) {
            *register = value;
        }
    }

    /// Steps over the instruction that trapped, as if it had executed; all of them are 32 bits long.
    pub(super) fn step(&mut self) {
        self.elr = self.elr.wrapping_add(4);
        self.spsr = exit::stepped(self.spsr);
    }

    /// Whether an AArch32 instruction does nothing, because its condition fails.
    pub(super) fn is_skipped(&self, access: &aarch32::Access) -> bool {
        !access.is_executed(self.spsr)
    }

    pub(super) fn exception_level(&self) -> ExceptionLevel {
        if self.spsr & 0xc == 0 {
            ExceptionLevel::El0
        } else {
            ExceptionLevel::El1
        }
    }

    /// What the guest was doing, as a sample of the host's; its event is 0.
    pub(super) fn sample(&self) -> Sample {
        Sample {
            time: self.entered,
            pc: self.elr,
            context: read_sysreg!("contextidr_el1") as u32,
            vmid: (read_sysreg!("vttbr_el2") >> VTTBR_VMID_SHIFT) as u16,
            el: u8::from(self.exception_level() == ExceptionLevel::El1),
            event: 0,
        }
    }

    /// Gives the guest an exception with syndrome `esr`.
    pub(super) fn inject(&mut self, esr: u64, mte: bool) {
        let entry = ExceptionEntry::synchronous(
            self.spsr,
            read_sysreg!("vbar_el1"),
            read_sysreg!("sctlr_el1"),
            mte,
        );
        // SAFETY: EL1's own exception registers, as the processor would write them.
        unsafe {
            write_sysreg!("esr_el1", esr);
            write_sysreg!("elr_el1", self.elr);
            write_sysreg!("spsr_el1", self.spsr);
        }
        self.elr = entry.pc;
        self.spsr = entry.pstate;
    }

    /// Gives the guest a synchronous external abort for the access that left the guest with syndrome `esr_el2`.
    pub(super) fn inject_external_abort(&mut self, esr_el2: u64, mte: bool) {
        let address = read_sysreg!("far_el2");
        // SAFETY: EL1's own fault address, as the processor would write it.
        unsafe {
            write_sysreg!("far_el1", address);
        }
        let esr = exit::external_abort(esr_el2, self.exception_level());
        self.inject(esr, mte);
    }

    /// Accounts for an exit that is about to end.
    pub(super) fn leave(&self, cpu: &Cpu, kind: Kind) {
        self.account(&cpu.statistics, kind);
    }

    /// The same, in other statistics than the CPU's.
    pub(super) fn account(&self, statistics: &CpuStatistics, kind: Kind) {
        statistics.exit(kind, now().wrapping_sub(self.entered));
    }
}
