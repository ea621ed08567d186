//! Attacks from EL1 and EL0 on this CPU's PMU, for the engine's probe.
//!
//! The engine chooses each attack ([`partition::probe`](vpmu::arm::partition::probe())); here its one
//! instruction is executed below EL2, with the MMU of EL1 off and no stage 2.
//!
//! UNSAFETY: writes EL2's control registers and enters EL1 and EL0. The guest does not exist yet.

use vpmu::arm::{
    Register,
    partition::{Attacker, Features, Findings, ProbedCpu, probe},
};
use vpmu_monitor::regs::{self, HcrEl2, IdAa64pfr0El1};

use super::{
    mmu,
    pmu_registers::PhysicalPmu,
    sysreg::{isb, read_sysreg, write_sysreg},
};

unsafe extern "C" {
    /// Executes the instructions at `code` with `value` in x1 and this `pstate`, until the first
    /// exception to EL2, and returns x0, which is 0 at the start.
    fn execute_below_el2(code: *const u32, value: u64, pstate: u64) -> u64;
}

/// EL1 is AArch64, nothing traps and there is no stage 2. Interrupts are not routed to EL2: one that ended an
/// attack before it was made would pass for isolation.
const HCR_PROBE: HcrEl2 = HcrEl2::RW;

/// HVC and SVC in A64, SVC in A32: they end an attack, the latter two by way of EL1's vectors.
const HVC: u32 = 0xd400_0002;
const SVC: u32 = 0xd400_0001;
const SVC_A32: u32 = 0xef00_0000;

/// All in one cache line.
#[repr(align(64))]
struct Code([u32; 2]);

/// Probes this CPU's partition. Leaves every counter stopped, and no trap of the PMU's set.
pub(super) fn findings(counters: u8, host_counters: u8, features: &Features) -> Findings {
    let hcr = read_sysreg!("hcr_el2");
    // ID_AA64PFR0_EL1.EL0 = 2: EL0 can be AArch32 as well.
    let aarch32 = read_sysreg!("id_aa64pfr0_el1") >> IdAa64pfr0El1::EL0_SHIFT & 0xf == 2;
    // SAFETY: the guest does not run yet; the probe's code touches no memory.
    unsafe {
        write_sysreg!("hcr_el2", HCR_PROBE.bits());
        if features.fgt {
            write_sysreg!("s3_4_c3_c1_4", 0_u64); // HDFGRTR_EL2
            write_sysreg!("s3_4_c3_c1_5", 0_u64); // HDFGWTR_EL2
        }
    }
    isb();
    let findings = probe(&mut PhysicalPmu, counters, host_counters, features, aarch32);
    // SAFETY: as they were; EL1's vectors, which the attacks have borrowed, are the guest's to set.
    unsafe {
        write_sysreg!("hcr_el2", hcr);
        write_sysreg!("vbar_el1", 0_u64);
    }
    isb();
    findings
}

impl ProbedCpu for PhysicalPmu {
    fn set_mdcr_el2(&mut self, value: u64) {
        // SAFETY: only the PMU's fields are set, and the guest does not run yet.
        unsafe {
            write_sysreg!("mdcr_el2", value);
        }
        isb();
    }

    fn attack(&mut self, from: Attacker, register: Register, write: Option<u64>) -> u64 {
        let (end, pstate) = match from {
            Attacker::El1 => (HVC, regs::SPSR_EL1H_MASKED),
            Attacker::El0 => (SVC, regs::SPSR_EL0T_MASKED),
            Attacker::El0AArch32 => (SVC_A32, regs::SPSR_AARCH32_USER_MASKED),
        };
        let code = Code([from.instruction(register, write.is_some()), end]);
        let at = code.0.as_ptr() as u64;
        mmu::clean_to_memory(at..at + size_of::<Code>() as u64);
        // SAFETY: the code is one access of a PMU register and a call; the vectors of `entry.s` bring
        // any exception of it back to EL2.
        unsafe {
            core::arch::asm!("ic iallu", "dsb sy", "isb", options(nostack));
            execute_below_el2(code.0.as_ptr(), write.unwrap_or(0), pstate)
        }
    }

    fn spend_time_at_el2(&mut self) {
        for _ in 0..64 {
            isb();
        }
    }
}
