//! Physical interrupts: each is taken here and goes on into a list register.
//!
//! UNSAFETY: called from assembly.

use core::sync::atomic::Ordering::Relaxed;

use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    lock::Unlocked,
    world::{
        guest_pmu::{GuestPmu, Pmi},
        statistics::Kind,
        vgic::{Interrupt, Source},
    },
};

use super::{
    cpu::{Cpu, Local, Monitor},
    el2::follow_borrowing,
    end::power_off,
    figures,
    frame::Frame,
    gic::{self, PhysicalInterface},
};

/// A physical interrupt while the guest ran, of group 1 or of group 0.
#[unsafe(no_mangle)]
extern "C" fn guest_interrupt(frame: &mut Frame, group1: bool) {
    let cpu = Cpu::this();
    let Some(monitor) = Monitor::installed() else {
        power_off()
    };
    let mut unlocked = Unlocked::at_exception();
    let mut local = cpu.local.lock(&mut unlocked);
    local.at_exit();
    if cpu.pmi_waits.load(Relaxed) {
        pass_pmi_on(&mut local, cpu, monitor);
    }
    let mut kind = Kind::Other;
    // One exit for all that is pending; each that is taken costs no entry of its own.
    while let Some(irq) = gic::acknowledge(group1) {
        kind = serve(&irq, frame, monitor, cpu, &mut local);
    }
    drop(local);
    frame.account(&cpu.statistics, kind);
}

pub(super) fn serve(
    irq: &gic::Acknowledged,
    frame: &Frame,
    monitor: &Monitor,
    cpu: &Cpu,
    local: &mut Local,
) -> Kind {
    let mut interrupt = irq.0;
    let intid = interrupt.intid;
    if intid == monitor.machine.maintenance_intid {
        // Before the refill, which may raise it anew.
        irq.finish();
        follow_borrowing(local, monitor);
        local.interrupts.refill(&mut PhysicalInterface);
        show_line(local, cpu, monitor);
        return Kind::IrqMaintenance;
    }
    if Some(intid) == monitor.pmu_intid(Cpu::number())
        && let Some((pmi, kind)) = take_pmi(local, frame)
    {
        match pmi {
            Pmi::Physical => {
                irq.drop_priority();
                if local.profile.is_some() && !is_let_through(&mut interrupt, monitor) {
                    // The physical interrupt stays active, and so silent, until it is passed on.
                    cpu.pmi_waits.store(true, Relaxed);
                } else {
                    local.interrupts.inject(interrupt, &mut PhysicalInterface);
                    cpu.statistics.pmi();
                }
            }
            Pmi::None => irq.finish(),
            Pmi::Line => {
                irq.finish();
                show_line(local, cpu, monitor);
            }
        }
        return kind;
    }
    let kind = if intid < 16 {
        // SGIs have nothing for the guest to deactivate.
        irq.finish();
        interrupt.source = Source::Software;
        Kind::IrqSgi
    } else {
        irq.drop_priority();
        match monitor.machine.timer_intids.contains(&intid) {
            true => Kind::IrqTimer,
            false => Kind::IrqOther,
        }
    };
    local.interrupts.inject(interrupt, &mut PhysicalInterface);
    kind
}

/// Takes an interrupt of the PMU, with the samples of the host's profile that it stands for. Returns what of it is the
/// guest's, and how the exit counts.
pub(super) fn take_pmi(local: &mut Local, frame: &Frame) -> Option<(Pmi, Kind)> {
    let (pmi, host) = local.pmu.as_mut()?.interrupt(&mut PhysicalPmu);
    if host.is_empty() {
        return Some((pmi, Kind::IrqPmu));
    }
    if let Some(profile) = &mut local.profile {
        // A sample belongs to the measurement in which it was taken, and the doorbell may ring on another CPU.
        let epoch = figures::current_measurement();
        profile.overflow(host, epoch, frame.sample(), &mut PhysicalPmu);
    }
    Some((pmi, Kind::IrqHostPmu))
}

/// Whether the guest lets the interrupt of its PMU through, which gets the priority that the guest has given it: where the
/// host samples by it, both are in the guest's view.
#[cold]
fn is_let_through(interrupt: &mut Interrupt, monitor: &Monitor) -> bool {
    let (_, view) = monitor.redistributor(Cpu::number());
    if !view.owns(interrupt.intid) {
        return true;
    }
    interrupt.priority = view.priority(interrupt.intid);
    view.enabled(interrupt.intid)
}

/// Passes the interrupt of the guest's PMU on, which waits for that: for a list register, or for the guest to enable it.
/// Where its cause has gone meanwhile, it ends here. Apart from its callers, because a guest whose PMU is not sampled never
/// needs it.
///
/// Not called in the exit that took the interrupt: a machine that lowers the line late would raise it at once, for ever.
#[cold]
fn pass_pmi_on(local: &mut Local, cpu: &Cpu, monitor: &Monitor) {
    let (Some(pmu), Some(intid)) = (&local.pmu, monitor.pmu_intid(Cpu::number())) else {
        return;
    };
    let (_, view) = monitor.redistributor(Cpu::number());
    let asserted = pmu.wakes(&mut PhysicalPmu);
    // It goes on to wait for the guest.
    if asserted && !view.enabled(intid) {
        return;
    }
    cpu.pmi_waits.store(false, Relaxed);
    if !asserted {
        return gic::deactivate(intid);
    }
    let interrupt = Interrupt {
        intid,
        priority: view.priority(intid),
        group1: true,
        source: Source::Hardware,
    };
    if local.interrupts.inject(interrupt, &mut PhysicalInterface) {
        cpu.statistics.pmi();
    }
}

/// Shows the guest its PMU's interrupt as it is now: the emulated PMU's line, or what waits to be passed on.
pub(super) fn show_line(local: &mut Local, cpu: &Cpu, monitor: &Monitor) {
    if cpu.pmi_waits.load(Relaxed) {
        pass_pmi_on(local, cpu, monitor);
    }
    let (Some(line), Some(intid)) = (
        local.pmu.as_ref().and_then(GuestPmu::line),
        monitor.pmu_intid(Cpu::number()),
    ) else {
        return;
    };
    if local.is_second {
        // It goes into that guest's own interrupt controller.
        return;
    }
    let (_, view) = monitor.redistributor(Cpu::number());
    let high = line && view.enabled(intid);
    let priority = view.priority(intid);
    let interrupt = Interrupt {
        intid,
        priority,
        group1: true,
        source: Source::Line,
    };
    if local
        .interrupts
        .set_line(high, interrupt, &mut PhysicalInterface)
    {
        cpu.statistics.pmi();
    }
}
