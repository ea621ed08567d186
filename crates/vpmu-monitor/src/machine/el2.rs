//! EL2's control registers on each CPU: which of the guest's instructions trap.
//!
//! UNSAFETY: writes EL2's control registers.

use core::ptr;

use vpmu::arm::partition::TrapRegisters;
use vpmu_monitor::world::{
    guest_pmu::{GuestPmu, PmuError},
    redistributor,
    vgic::VirtualInterface,
};

use super::{
    cpu::{Cpu, Local, Monitor},
    device::own_priorities,
    gic, hardware,
    pmu_registers::PhysicalPmu,
    sysreg::{isb, read_sysreg, write_sysreg},
};

/// Prepares EL2 and the PMU of this CPU.
pub(crate) fn init_cpu(number: usize, monitor: &Monitor) -> Result<(), PmuError> {
    // SAFETY: the number of this CPU, read back by `Cpu::number`.
    unsafe {
        write_sysreg!("tpidr_el2", number as u64);
    }
    let cpu = Cpu::this();
    let mut local = cpu.local.lock();
    local.interrupts = VirtualInterface::new();
    init_el1();
    let mdcr = open_to_the_guest();

    let hardware = hardware::detect_pmu();
    local.mdcr = mdcr;
    local.pmu = match &hardware {
        Some(hardware) => Some(GuestPmu::new(monitor.settings, hardware, &mut PhysicalPmu)?),
        None => None,
    };
    if let Some(pmu) = &mut local.pmu {
        pmu.load(&mut PhysicalPmu);
    }
    apply_traps(&mut local, true);

    monitor.translation.enable_stage_2();
    gic::init_cpu_interface(monitor.group0);
    own_interrupts(number, monitor);
    Ok(())
}

/// Enables this CPU's interrupts that belong to the monitor, in its redistributor.
fn own_interrupts(number: usize, monitor: &Monitor) {
    own_priorities(monitor, number);
    let frame = monitor.sgi_frame(number);
    let owned = monitor.frames[number].owned();
    // SAFETY: this CPU's redistributor, as the device tree says; the guest is not running on it.
    unsafe {
        let group = (frame + redistributor::IGROUPR0) as *mut u32;
        ptr::write_volatile(group, ptr::read_volatile(group) | owned);
        ptr::write_volatile((frame + redistributor::ISENABLER0) as *mut u32, owned);
    }
}

/// EL1 as a CPU has it after reset, where that matters.
fn init_el1() {
    let (midr, mpidr) = (read_sysreg!("midr_el1"), read_sysreg!("mpidr_el1"));
    // SAFETY: EL1 does not run yet.
    unsafe {
        write_sysreg!("sctlr_el1", 0x30d0_0800_u64);
        write_sysreg!("cpacr_el1", 0_u64);
        write_sysreg!("cntkctl_el1", 0_u64);
        write_sysreg!("cntv_ctl_el0", 0_u64);
        write_sysreg!("cntp_ctl_el0", 0_u64);
        write_sysreg!("cntvoff_el2", 0_u64);
        write_sysreg!("vpidr_el2", midr);
        write_sysreg!("vmpidr_el2", mpidr);
    }
}

/// `HCR_EL2` without stage 2: EL1 is AArch64, physical interrupts and SMC come here, and nothing else
/// that the guest may use traps (pointer authentication, allocation tags, SCXTNUM, RAS fault injection).
pub(crate) const HCR_OPEN: u64 =
    1 << 56 | 1 << 53 | 1 << 47 | 1 << 41 | 1 << 40 | 1 << 31 | 1 << 19 | 1 << 4 | 1 << 3;
pub(crate) const HCR_VM: u64 = 1 << 0;
/// Those of [`HCR_OPEN`] that route interrupts to EL2: FMO and IMO.
pub(crate) const HCR_INTERRUPTS: u64 = 3 << 3;

/// Opens every feature that the CPU has to the guest, and returns the bits of `MDCR_EL2` for that.
fn open_to_the_guest() -> u64 {
    let pfr0 = read_sysreg!("id_aa64pfr0_el1");
    let pfr1 = read_sysreg!("id_aa64pfr1_el1");
    let dfr0 = read_sysreg!("id_aa64dfr0_el1");
    let mmfr0 = read_sysreg!("id_aa64mmfr0_el1");
    let mmfr1 = read_sysreg!("id_aa64mmfr1_el1");
    let field = |register: u64, at: u32| register >> at & 0xf;

    // SAFETY: these registers say what of the guest traps; none gives it the monitor's memory.
    unsafe {
        write_sysreg!("hcr_el2", HCR_OPEN | HCR_VM);
        // Floating point, SVE, SME and trace untrapped; the rest of the bits are RES1.
        write_sysreg!("cptr_el2", 0x22ff_u64);
        write_sysreg!("hstr_el2", 0_u64);
        // EL1 uses the physical counter and timer as well as the virtual ones.
        write_sysreg!("cnthctl_el2", 3_u64);
        isb();
        if field(pfr0, 32) != 0 {
            write_sysreg!("s3_4_c1_c2_0", 0xf_u64); // ZCR_EL2: every vector length
        }
        if field(pfr1, 24) != 0 {
            write_sysreg!("s3_4_c1_c2_6", 0xc000_000f_u64); // SMCR_EL2: the same, FA64 and ZT0
        }
        if field(mmfr1, 40) != 0 {
            // HCRX_EL2: EnAS0, EnALS, EnASR, MSCEn, TCR2En, SCTLR2En, D128En, EnIDCP128, GCSEn, EnFPM
            let open = [0, 1, 2, 11, 14, 15, 17, 21, 22, 23];
            write_sysreg!(
                "s3_4_c1_c2_2",
                open.iter().fold(0_u64, |bits, n| bits | 1 << n)
            );
        }
        if field(mmfr0, 56) != 0 {
            // Fine-grained traps whose *zero* means "trap" (their names begin with n).
            write_sysreg!("s3_4_c1_c1_4", 0xfffc_0000_0000_0000_u64); // HFGRTR_EL2
            write_sysreg!("s3_4_c1_c1_5", 0xfffc_0000_0000_0000_u64); // HFGWTR_EL2
            write_sysreg!("s3_4_c1_c1_6", 0x0f80_0000_0000_0000_u64); // HFGITR_EL2
        }
    }
    isb();
    // MDCR_EL2.E2PB and E2TB = 0b11: profiling and trace buffers belong to EL1.
    let spe = if field(dfr0, 32) != 0 { 3 << 12 } else { 0 };
    let trbe = if field(dfr0, 44) != 0 { 3 << 24 } else { 0 };
    spe | trbe
}

/// Makes the trap registers agree with the PMU's wishes; `always` writes them unseen.
pub(crate) fn apply_traps(local: &mut Local, always: bool) {
    let wanted = match &local.pmu {
        Some(pmu) => pmu.trap_registers(),
        // No PMU: MDCR_EL2.TPM and TPMCR, so that every access is undefined.
        None => TrapRegisters {
            mdcr_el2: 3 << 5,
            hdfgrtr_el2: 0,
            hdfgwtr_el2: 0,
        },
    };
    if wanted == local.traps && !always {
        return;
    }
    local.traps = wanted;
    // Trace, branch records and profiling registers whose *zero* bit means "trap".
    const READS: u64 = 0xf << 59;
    const WRITES: u64 = 0x7 << 60;
    let fine_grained = read_sysreg!("id_aa64mmfr0_el1") >> 56 & 0xf != 0;
    // SAFETY: the plan says which accesses may go untrapped.
    unsafe {
        write_sysreg!("mdcr_el2", wanted.mdcr_el2 | local.mdcr);
        if fine_grained {
            write_sysreg!("s3_4_c3_c1_4", wanted.hdfgrtr_el2 | READS); // HDFGRTR_EL2
            write_sysreg!("s3_4_c3_c1_5", wanted.hdfgwtr_el2 | WRITES); // HDFGWTR_EL2
        }
    }
    isb();
}
