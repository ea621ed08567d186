//! EL2's control registers on each CPU: which of the guest's instructions trap.
//!
//! UNSAFETY: writes EL2's control registers.

use core::{
    fmt, mem,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
};

use vpmu::arm::partition::TrapRegisters;
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    boot::words::Interrupts,
    control_registers,
    lock::Unlocked,
    regs::{BUFFER_IS_NOT_OURS, MdcrEl2, MpamhcrEl2, MpamidrEl1, SCTLR_EL1_RESET},
    world::{
        guest_pmu::{GuestPmu, PmuError},
        offer::{self, Control, Machine, Sharing},
        profile::Profile,
        redistributor,
        vgic::VirtualInterface,
    },
};

use super::{
    console,
    cpu::{Cpu, Local, Monitor},
    gic, hardware,
    mmio::{read_device, write_device},
    sysreg::{isb, now, read_sysreg, write_sysreg},
};

/// Prepares EL2 on this CPU, and tries its PMU. On the CPU that `boots`, what firmware at EL3 may keep from EL2 is named on the
/// console before it is used, in one line: where firmware keeps it, the machine dies at EL3 and that line is the message.
pub(crate) fn init_cpu(number: usize, monitor: &Monitor, boots: bool, unlocked: &mut Unlocked) {
    // SAFETY: the number of this CPU, read back by `Cpu::number`.
    unsafe {
        write_sysreg!("tpidr_el2", number as u64);
    }
    let mut local = Cpu::this().local.lock(unlocked);
    local.interrupts = VirtualInterface::default();
    local.sharing = monitor.sharing();
    init_el1();
    local.machine = identify();
    let names = Names::begin(boots && local.machine.el3());
    write_hcr(monitor.settings.interrupts, monitor.sharing());
    write_controls(&local.machine, monitor.sharing(), &names);

    names.say(format_args!("the PMU"));
    // What the CPU is does not change while it is off.
    if local.hardware.is_none() {
        local.hardware = hardware::detect_pmu(monitor);
    }
    names.say(format_args!("ICC_SRE_EL2"));
    gic::init_cpu_interface(monitor);
}

/// Gives this CPU, which is [prepared](init_cpu), its guest's PMU and its translation.
pub(crate) fn start_pmu(monitor: &Monitor, unlocked: &mut Unlocked) -> Result<(), PmuError> {
    let mut local = Cpu::this().local.lock(unlocked);
    local.pmu = match &local.hardware {
        Some(hardware) => Some(GuestPmu::new(monitor.settings, hardware, &mut PhysicalPmu)?),
        None => None,
    };
    start_profile(&mut local, monitor)?;
    if let Some(pmu) = &mut local.pmu {
        pmu.load(None, &mut PhysicalPmu);
    }
    apply_traps(&mut local, true);
    follow_borrowing(&mut local, monitor);

    monitor.translation.enable_stage_2();
    own_interrupts(monitor);
    Ok(())
}

/// Starts the host's profile of the guest, where one is wanted.
fn start_profile(local: &mut Local, monitor: &Monitor) -> Result<(), PmuError> {
    let Some(settings) = &monitor.settings.profile else {
        return Ok(());
    };
    let pmu = local.pmu.as_ref().ok_or(PmuError::NoPmu)?;
    if local.profile.is_none() {
        let counters = match monitor.settings.borrow {
            true => pmu.borrowed_counters(settings.events().len() as u8),
            false => Some(pmu.free_host_counters()),
        };
        let counters = counters.ok_or(PmuError::Profile)?;
        let buffer = mem::take(&mut local.samples);
        local.profile = Profile::new(settings, counters, read_sysreg!("cntfrq_el0"), buffer);
    }
    let profile = local.profile.as_mut().ok_or(PmuError::Profile)?;
    if !monitor.settings.borrow {
        profile.start(now(), &mut PhysicalPmu);
    }
    Ok(())
}

/// The host has the counters that it borrows: from the doorbell's mark of the beginning to that of the end.
static BORROWED: AtomicBool = AtomicBool::new(false);

/// Takes the profile's counters from the guest on every CPU, or gives them back; where they are to be borrowed. The other
/// CPUs leave the guest for that.
pub(crate) fn borrow(local: &mut Local, monitor: &Monitor, take: bool) {
    if monitor.settings.borrow && BORROWED.swap(take, SeqCst) != take {
        follow_borrowing(local, monitor);
        gic::call_others(monitor);
    }
}

/// Does on this CPU what [`borrow`] has said, unless it is done. Each CPU calls it when it starts, too.
pub(crate) fn follow_borrowing(local: &mut Local, monitor: &Monitor) {
    let take = BORROWED.load(SeqCst);
    let (Some(pmu), Some(profile)) = (&mut local.pmu, &mut local.profile) else {
        return;
    };
    let counters = monitor.settings.kept_counters(take);
    if pmu.kept() == counters {
        return;
    }
    if !take {
        profile.stop(&mut PhysicalPmu);
    }
    let Some(lost) = pmu.keep(counters, &mut PhysicalPmu) else {
        return;
    };
    Cpu::this().statistics.lost(lost);
    if take {
        profile.start(now(), &mut PhysicalPmu);
    }
    apply_traps(local, true);
}

/// Names what EL3 may keep from EL2, on one line that ends when this is dropped.
struct Names(bool);

impl Names {
    fn begin(wanted: bool) -> Self {
        if wanted {
            console::print(format_args!(
                "vpmu-monitor: EL3 must let EL2 use (if this is the last line, EL3 has not permitted the last name):"
            ));
        }
        Self(wanted)
    }

    fn say(&self, name: fmt::Arguments<'_>) {
        if self.0 {
            console::print(format_args!(" {name}"));
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        if self.0 {
            console::print(format_args!(": permitted\r\n"));
        }
    }
}

/// Enables this CPU's interrupts that belong to the monitor, in its redistributor.
fn own_interrupts(monitor: &Monitor) {
    let (place, view) = monitor.redistributor(Cpu::number());
    let (frame, owned) = (place.sgi_frame(), view.owned);
    // A bootloader may have used LPIs; the guest's writes do not reach this register.
    let control = place.frames.start + redistributor::CTLR;
    let without_lpis = read_device(control, 4) & !redistributor::CTLR_ENABLE_LPIS;
    write_device(control, 4, without_lpis);
    for intid in (0..32).filter(|n| owned >> n & 1 != 0) {
        let priority = frame + redistributor::IPRIORITYR0 + intid;
        write_device(priority, 1, gic::OWN_PRIORITY.into());
    }
    let group = frame + redistributor::IGROUPR0;
    write_device(group, 4, read_device(group, 4) | u64::from(owned));
    write_device(frame + redistributor::ISENABLER0, 4, owned.into());
}

/// EL1 as a CPU has it after reset, where that matters.
fn init_el1() {
    let (midr, mpidr) = (read_sysreg!("midr_el1"), read_sysreg!("mpidr_el1"));
    // SAFETY: EL1 does not run yet.
    unsafe {
        write_sysreg!("sctlr_el1", SCTLR_EL1_RESET);
        write_sysreg!("cpacr_el1", 0_u64);
        write_sysreg!("cntkctl_el1", 0_u64);
        write_sysreg!("cntv_ctl_el0", 0_u64);
        write_sysreg!("cntp_ctl_el0", 0_u64);
        write_sysreg!("cntvoff_el2", 0_u64);
        write_sysreg!("vpidr_el2", midr);
        write_sysreg!("vmpidr_el2", mpidr);
    }
}

/// Says where physical interrupts go, beside all else that `HCR_EL2` says.
pub(crate) fn write_hcr(interrupts: Interrupts, sharing: Sharing) {
    // SAFETY: routes interrupts and traps; the guest is not running on this CPU.
    unsafe {
        write_sysreg!("hcr_el2", offer::hcr(interrupts, sharing).bits());
    }
    isb();
}

/// What the ID registers of this CPU say.
fn identify() -> Machine {
    Machine {
        pfr0: read_sysreg!("id_aa64pfr0_el1"),
        pfr1: read_sysreg!("id_aa64pfr1_el1"),
        dfr0: read_sysreg!("id_aa64dfr0_el1"),
        mmfr0: read_sysreg!("id_aa64mmfr0_el1"),
        mmfr1: read_sysreg!("id_aa64mmfr1_el1"),
        mmfr3: read_sysreg!("id_aa64mmfr3_el1"),
    }
}

/// Writes the control registers that say what of the guest traps.
fn write_controls(machine: &Machine, sharing: Sharing, names: &Names) {
    offer::controls(machine, sharing, |control, value| {
        macro_rules! write {
            ($($name:ident = $register:literal;)*) => {
                match control {
                    $(Control::$name => write_sysreg!($register, value),)*
                }
            };
        }
        names.say(format_args!("{control:?}"));
        // CPTR_EL2.TZ and TSM hold for EL2, too.
        if matches!(control, Control::ZcrEl2 | Control::SmcrEl2) {
            isb();
        }
        // SAFETY: these registers exist, as `machine` says, and say what traps; none gives the guest the
        // monitor's memory.
        unsafe { control_registers!(write) }
    });
    stop_buffers(machine);
    isb();
}

/// Switches the profiling and the trace buffer off, where they are not a higher exception level's, and lets
/// reads of MPAMIDR_EL1 trap.
fn stop_buffers(machine: &Machine) {
    // PMBIDR_EL1, TRBIDR_EL1, MPAMIDR_EL1.
    let spe = machine.spe() && read_sysreg!("s3_0_c9_c10_7") & BUFFER_IS_NOT_OURS == 0;
    let trbe = machine.trbe() && read_sysreg!("s3_0_c9_c11_7") & BUFFER_IS_NOT_OURS == 0;
    let mpamidr = || MpamidrEl1::from_bits_retain(read_sysreg!("s3_0_c10_c4_4"));
    let mpamhcr = machine.mpam() && mpamidr().contains(MpamidrEl1::HAS_HCR);
    // SAFETY: registers of features that exist, which only stop and trap.
    unsafe {
        if spe {
            // PMSCR_EL1, PMSCR_EL2, PMBLIMITR_EL1.
            write_sysreg!("s3_0_c9_c9_0", 0_u64);
            write_sysreg!("s3_4_c9_c9_0", 0_u64);
            write_sysreg!("s3_0_c9_c10_0", 0_u64);
        }
        if trbe {
            // TRBLIMITR_EL1.
            write_sysreg!("s3_0_c9_c11_0", 0_u64);
        }
        if mpamhcr {
            // MPAMHCR_EL2.
            write_sysreg!("s3_4_c10_c4_0", MpamhcrEl2::TRAP_MPAMIDR_EL1.bits());
        }
    }
}

/// Makes the trap registers agree with the PMU's wishes; `always` writes them unseen.
pub(crate) fn apply_traps(local: &mut Local, always: bool) {
    let wanted = match &local.pmu {
        Some(pmu) => pmu.trap_registers(),
        // No PMU: MDCR_EL2.TPM and TPMCR, so that every access is undefined.
        None => TrapRegisters {
            mdcr_el2: MdcrEl2::TPM.union(MdcrEl2::TPMCR).bits(),
            ..TrapRegisters::default()
        },
    };
    if wanted == local.traps && !always {
        return;
    }
    local.traps = wanted;
    let own = offer::traps(&local.machine, local.sharing);
    vpmu_el2::set_traps(&wanted, &own, local.machine.fgt());
}
