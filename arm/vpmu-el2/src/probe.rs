//! Attacks from EL1 and EL0 on this CPU's PMU, for the engine's probe.
//!
//! The engine chooses each attack ([`partition::probe`](vpmu::arm::partition::probe())); here its one instruction is
//! executed below EL2, with the MMU of EL1 off and no stage 2, at the physical address that the hardware says.
//!
//! UNSAFETY: writes control registers, and enters EL1 and EL0. All of them are put back, and no guest runs meanwhile.

use core::arch::{asm, global_asm};
use core::cell::Cell;

use vpmu::arm::Register;
use vpmu::arm::partition::{self, Attacker, Features, Findings, ProbedCpu};

use crate::registers::PhysicalPmu;
use crate::sysreg::{HCR_E2H, el1, isb, read_sysreg, write_sysreg};

global_asm!(include_str!("probe.s"));

unsafe extern "C" {
    /// Executes the instructions at the physical address `code` with `value` in x1 and this `pstate`, until the first
    /// exception to EL2, and returns x0, which is 0 at the start. VBAR_EL1 is the physical address of `vpmu_el2_vectors`.
    fn vpmu_el2_execute_below(code: u64, value: u64, pstate: u64) -> u64;
    static vpmu_el2_vectors: u8;
}

/// HCR_EL2.RW: EL1 is AArch64, nothing traps and there is no stage 2. Interrupts are not routed to EL2: one that ended an
/// attack before it was made would pass for isolation.
const HCR_PROBE: u64 = 1 << 31;
/// SCTLR_EL1 with its RES1 bits and nothing else: MMU and caches off, little-endian.
const SCTLR_EL1_OFF: u64 = 0x30d0_0800;

/// SPSR_EL2 with all exceptions masked, of EL1 on SP_EL1, of EL0, and of AArch32's User mode.
const EL1H: u64 = 0x3c5;
const EL0T: u64 = 0x3c0;
const AARCH32_USER: u64 = 0x1d0;

/// HVC and SVC in A64, SVC in A32: they end an attack, the latter two by way of EL1's vectors.
const HVC: u32 = 0xd400_0002;
const SVC: u32 = 0xd400_0001;
const SVC_A32: u32 = 0xef00_0000;

/// The instruction of an attack and its end, in one cache line.
#[repr(align(64))]
struct Code(Cell<[u32; 2]>);

/// The CPU, and the line from which it is attacked.
struct Attacked {
    pmu: PhysicalPmu,
    code: Code,
}

/// Probes the partition of this CPU, at EL2 and before a guest runs on it; machines with several kinds of CPUs are probed on
/// each kind. `counters` and `host_counters` are as for [`partition::probe`]. Leaves every counter stopped, and MDCR_EL2,
/// HDFGRTR_EL2 and HDFGWTR_EL2 to be written, the hypervisor's own bits included.
///
/// The caller's stack is mapped readable and its stage 1 of EL2 translates it to one physical line. Takes some milliseconds.
pub fn probe(counters: u8, host_counters: u8, features: &Features) -> Findings {
    let hcr = read_sysreg!("hcr_el2");
    let e2h = hcr & HCR_E2H != 0;
    // ID_AA64PFR0_EL1.EL0 = 2: EL0 can be AArch32 as well.
    let aarch32 = read_sysreg!("id_aa64pfr0_el1") & 0xf == 2;
    let el1 = [
        el1!(e2h, read_sysreg, sctlr),
        el1!(e2h, read_sysreg, vbar),
        el1!(e2h, read_sysreg, esr),
        el1!(e2h, read_sysreg, elr),
        el1!(e2h, read_sysreg, spsr),
        read_sysreg!("par_el1"),
    ];
    let el2 = [read_sysreg!("elr_el2"), read_sysreg!("spsr_el2")];
    // SAFETY: no guest runs, so nobody executes under these; the probe's code touches no memory.
    unsafe {
        // E2H stays: EL2's own translation depends on it.
        write_sysreg!("hcr_el2", HCR_PROBE | hcr & HCR_E2H);
        el1!(e2h, write_sysreg, sctlr, SCTLR_EL1_OFF);
        let vectors = physical(&raw const vpmu_el2_vectors as u64);
        el1!(e2h, write_sysreg, vbar, vectors);
        if features.fgt {
            write_sysreg!("s3_4_c3_c1_4", 0_u64); // HDFGRTR_EL2
            write_sysreg!("s3_4_c3_c1_5", 0_u64); // HDFGWTR_EL2
        }
    }
    isb();
    let mut attacked = Attacked {
        pmu: PhysicalPmu,
        code: Code(Cell::new([0; 2])),
    };
    let findings = partition::probe(&mut attacked, counters, host_counters, features, aarch32);
    let [sctlr, vbar, esr, elr, spsr, par] = el1;
    // SAFETY: as they were.
    unsafe {
        write_sysreg!("hcr_el2", hcr);
        el1!(e2h, write_sysreg, sctlr, sctlr);
        el1!(e2h, write_sysreg, vbar, vbar);
        el1!(e2h, write_sysreg, esr, esr);
        el1!(e2h, write_sysreg, elr, elr);
        el1!(e2h, write_sysreg, spsr, spsr);
        write_sysreg!("par_el1", par);
        write_sysreg!("elr_el2", el2[0]);
        write_sysreg!("spsr_el2", el2[1]);
    }
    isb();
    findings
}

/// Returns the physical address of what EL2 has at `address`.
fn physical(address: u64) -> u64 {
    // SAFETY: asks EL2's stage 1, and changes PAR_EL1, which `probe` puts back.
    unsafe { asm!("at s1e2r, {}", "isb", in(reg) address, options(nostack)) }
    let par = read_sysreg!("par_el1");
    par & 0x000f_ffff_ffff_f000 | address & 0xfff
}

/// Writes the line at `address` back to memory, for who reads it with caches off, and forgets instructions.
fn publish(address: u64) {
    // SAFETY: cleaning a line changes no value.
    unsafe {
        asm!("dc civac, {}", "dsb sy", "ic iallu", "dsb sy", "isb", in(reg) address, options(nostack));
    }
}

impl partition::PmuRegisters for Attacked {
    fn read(&mut self, register: Register) -> u64 {
        self.pmu.read(register)
    }

    fn write(&mut self, register: Register, value: u64) {
        self.pmu.write(register, value);
    }
}

impl ProbedCpu for Attacked {
    fn set_mdcr_el2(&mut self, value: u64) {
        // SAFETY: only the PMU's fields are set, and no guest runs.
        unsafe { write_sysreg!("mdcr_el2", value) }
        isb();
    }

    fn attack(&mut self, from: Attacker, register: Register, write: Option<u64>) -> u64 {
        let (end, pstate) = match from {
            Attacker::El1 => (HVC, EL1H),
            Attacker::El0 => (SVC, EL0T),
            Attacker::El0AArch32 => (SVC_A32, AARCH32_USER),
        };
        let Code(code) = &self.code;
        code.set([from.instruction(register, write.is_some()), end]);
        let at = code.as_ptr() as u64;
        publish(at);
        // SAFETY: the code is one access of a PMU register and a call; the vectors of `probe.s` bring any exception of it
        // back to EL2.
        unsafe { vpmu_el2_execute_below(physical(at), write.unwrap_or(0), pstate) }
    }

    fn spend_time_at_el2(&mut self) {
        for _ in 0..64 {
            isb();
        }
    }
}
