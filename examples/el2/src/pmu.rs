//! All that a hypervisor writes for its guest's PMU.

use core::cell::UnsafeCell;

use vpmu::arm::partition::{Plan, TrapRegisters};
use vpmu_el2::access::{Access, Vcpu};
use vpmu_el2::{PhysicalPmu, exception, inject, partition_config, probe, set_traps};

use crate::machine;
use crate::machine::Frame;

#[cfg(not(feature = "emulated"))]
type Pmu = vpmu::arm::partition::PartitionedPmu;
#[cfg(feature = "emulated")]
type Pmu = vpmu::arm::emulated::BackedPmu;

/// The PMU's interrupt.
pub(crate) const PPI: u64 = 23;
/// Whether the guest's interrupt is the physical one, and not computed.
pub(crate) const IS_WIRED: bool = cfg!(not(feature = "emulated"));

/// One vCPU, that of the only CPU. In a static: a PMU is too large for a stack.
struct Vpmu {
    pmu: Pmu,
    traps: TrapRegisters,
    fgt: bool,
    /// Exits that the PMU has caused, and interrupts that its guest got.
    exits: u64,
    pmis: u64,
}

struct Only(UnsafeCell<Vpmu>);
// SAFETY: one CPU, on which no exit interrupts another.
unsafe impl Sync for Only {}
static VPMU: Only = Only(UnsafeCell::new(Vpmu {
    pmu: Pmu::vacant(),
    traps: TrapRegisters {
        mdcr_el2: 0,
        hdfgrtr_el2: 0,
        hdfgwtr_el2: 0,
    },
    fgt: false,
    exits: 0,
    pmis: 0,
}));

fn vpmu() -> &'static mut Vpmu {
    // SAFETY: as for `Sync`, and no caller keeps the reference over another call.
    unsafe { &mut *VPMU.0.get() }
}

/// At boot, before the first guest.
pub(crate) fn init() {
    let vpmu = vpmu();
    let affinity = machine::read!("mpidr_el1");
    let Some(mut cpu) = partition_config(0, [affinity]) else {
        return;
    };
    cpu.isolation = probe(cpu.implemented, cpu.host_counters, &cpu.features).isolation;
    let Ok(plan) = Plan::new(&cpu) else { return };
    vpmu.fgt = cpu.features.fgt;
    #[cfg(not(feature = "emulated"))]
    vpmu.pmu.init(&plan, &mut PhysicalPmu);
    #[cfg(feature = "emulated")]
    let _ = vpmu
        .pmu
        .init(&vpmu_el2::emulated_config(&cpu), &plan, &mut PhysicalPmu);
    vpmu.pmu.load(&mut PhysicalPmu);
    apply_traps(true);
}

/// First at each exit.
pub(crate) fn exited() {
    #[cfg(not(feature = "emulated"))]
    vpmu().pmu.exited(&mut PhysicalPmu);
}

/// Serves a trapped access; `false`: it is none of the PMU.
pub(crate) fn access(esr: u64, frame: &mut Frame) -> bool {
    let Some(access) = Access::decode(esr) else {
        return false;
    };
    vpmu().exits += 1;
    let refused = access.complete(vcpu(frame), |register, level, written| match written {
        Some(value) => vpmu().pmu.write(register, level, value, &mut PhysicalPmu),
        None => vpmu().pmu.read(register, level, &mut PhysicalPmu),
    });
    if let Some(esr) = refused {
        inject(esr, vcpu(frame));
    }
    apply_traps(false);
    show_line();
    true
}

/// Takes the physical interrupt; returns whether it goes on to the guest as such.
pub(crate) fn interrupt() -> bool {
    vpmu().exits += 1;
    #[cfg(not(feature = "emulated"))]
    {
        let guest = vpmu().pmu.overflow(&mut PhysicalPmu).guest;
        vpmu().pmis += u64::from(guest);
        guest
    }
    #[cfg(feature = "emulated")]
    {
        vpmu().pmu.overflow(&mut PhysicalPmu);
        show_line();
        false
    }
}

/// Gives the guest an undefined instruction.
pub(crate) fn undefined(frame: &mut Frame) {
    inject(exception::ESR_UNDEFINED, vcpu(frame));
}

fn vcpu(frame: &mut Frame) -> Vcpu<'_> {
    Vcpu {
        x: &mut frame.x,
        pc: &mut frame.pc,
        pstate: &mut frame.pstate,
    }
}

/// What a load, a put or an access may have changed. The hypervisor has no bits of its own in these registers.
fn apply_traps(always: bool) {
    let vpmu = vpmu();
    let wanted = vpmu.pmu.trap_registers();
    if always || wanted != vpmu.traps {
        vpmu.traps = wanted;
        set_traps(&wanted, &TrapRegisters::default(), vpmu.fgt);
    }
}

/// The computed level goes to the guest when it changes.
fn show_line() {
    #[cfg(feature = "emulated")]
    if let Some(level) = vpmu().pmu.line_changed() {
        vpmu().pmis += u64::from(level);
        crate::gic::set_level(level);
    }
}

/// Returns how many exits the PMU has caused, and how many interrupts the guest got from it.
pub(crate) fn statistics() -> (u64, u64) {
    (vpmu().exits, vpmu().pmis)
}
