//! The guest's registers at an exit, and an exception put back into it.
//!
//! UNSAFETY: writes EL1's exception registers.

use smccc::psci::Error;
use vpmu::arm::ExceptionLevel;
use vpmu_el2::access::{self, Vcpu};
use vpmu_el2::exception;
use vpmu_monitor::regs::{SPSR_EL1H_MASKED, VttbrEl2};
use vpmu_monitor::world::{
    profile::Sample,
    statistics::{CpuStatistics, Kind},
};

use super::sysreg::{now, read_sysreg, write_sysreg};

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
        // 31 is XZR.
        self.x.get(n).copied().unwrap_or(0)
    }

    pub(super) fn set_register(&mut self, n: usize, value: u64) {
        if let Some(register) = self.x.get_mut(n) {
            *register = value;
        }
    }

    /// Answers a firmware call.
    pub(super) fn answer(&mut self, answer: Result<(), Error>) {
        self.set_register(0, answer.map_or_else(i64::from, |()| 0) as u64);
    }

    /// Steps over the instruction that trapped, as if it had executed.
    pub(super) fn step(&mut self) {
        // A program in T32 loads, stores and waits by instructions of 16 bits, too.
        const IL: u64 = 1 << 25;
        access::step(&mut self.elr, &mut self.spsr);
        if read_sysreg!("esr_el2") & IL == 0 {
            self.elr = self.elr.wrapping_sub(2);
        }
    }

    /// The registers that an access of the PMU reads and writes.
    pub(super) fn vcpu(&mut self) -> Vcpu<'_> {
        Vcpu {
            x: &mut self.x,
            pc: &mut self.elr,
            pstate: &mut self.spsr,
        }
    }

    pub(super) fn exception_level(&self) -> ExceptionLevel {
        access::level(self.spsr)
    }

    /// What the guest was doing, as a sample of the host's; its event is 0.
    pub(super) fn sample(&self) -> Sample {
        Sample {
            time: self.entered,
            pc: self.elr,
            context: read_sysreg!("contextidr_el1") as u32,
            vmid: VttbrEl2::from_bits_retain(read_sysreg!("vttbr_el2")).vmid(),
            el: u8::from(self.exception_level() == ExceptionLevel::El1),
            event: 0,
        }
    }

    /// Gives the guest an exception with syndrome `esr`.
    pub(super) fn inject(&mut self, esr: u64) {
        vpmu_el2::inject(esr, self.vcpu());
    }

    /// Gives the guest a synchronous external abort for the access that left the guest with syndrome `esr_el2`.
    pub(super) fn inject_external_abort(&mut self, esr_el2: u64) {
        let address = read_sysreg!("far_el2");
        // SAFETY: EL1's own fault address, as the processor would write it.
        unsafe {
            write_sysreg!("far_el1", address);
        }
        let esr = exception::external_abort(esr_el2, self.exception_level());
        self.inject(esr);
    }

    /// Accounts for an exit that is about to end.
    pub(super) fn account(&self, statistics: &CpuStatistics, kind: Kind) {
        statistics.exit(kind, now().wrapping_sub(self.entered));
    }
}
