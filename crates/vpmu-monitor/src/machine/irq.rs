//! Physical interrupts: each is taken here and goes on into a list register.
//!
//! UNSAFETY: called from assembly.

use vpmu_monitor::world::{
    guest_pmu::{GuestPmu, Pmi},
    statistics::Kind,
    vgic::{Interrupt, Source},
};

use super::{
    cpu::{self, Cpu, Local, Monitor},
    end::power_off,
    frame::Frame,
    gic::{self, PhysicalInterface},
    pmu_registers::PhysicalPmu,
};

/// A physical interrupt (group 1) while the guest ran.
#[unsafe(no_mangle)]
extern "C" fn guest_irq(frame: &mut Frame) {
    interrupts(frame, true);
}

/// A physical interrupt of group 0.
#[unsafe(no_mangle)]
extern "C" fn guest_fiq(frame: &mut Frame) {
    interrupts(frame, false);
}

fn interrupts(frame: &mut Frame, group1: bool) {
    let cpu = Cpu::at_exit();
    let Some(monitor) = Monitor::installed() else {
        power_off()
    };
    let mut local = cpu.local.lock();
    let mut kind = Kind::Other;
    while let Some(irq) = gic::acknowledge(group1) {
        kind = serve(&irq, group1, frame, monitor, cpu, &mut local);
    }
    drop(local);
    frame.leave(cpu, kind);
}

pub(super) fn serve(
    irq: &gic::Acknowledged,
    group1: bool,
    frame: &Frame,
    monitor: &Monitor,
    cpu: &Cpu,
    local: &mut Local,
) -> Kind {
    let intid = irq.intid;
    let mut interrupt = Interrupt {
        intid,
        priority: irq.priority,
        group1,
        source: Source::Hardware,
    };
    if intid == monitor.machine.maintenance_intid {
        irq.finish();
        local.interrupts.refill(&mut PhysicalInterface);
        show_line(local, cpu, monitor);
        return Kind::IrqMaintenance;
    }
    if Some(intid) == monitor.pmu_intid(Cpu::number())
        && let Some(pmu) = &mut local.pmu
    {
        let (pmi, host) = pmu.interrupt(&mut PhysicalPmu);
        if let Some(profile) = local.profile.as_mut().filter(|_| !host.is_empty()) {
            let epoch = cpu::current_measurement();
            profile.overflow(host, epoch, frame.sample(), &mut PhysicalPmu);
        }
        match pmi {
            Pmi::Physical => {
                irq.drop_priority();
                local.interrupts.inject(interrupt, &mut PhysicalInterface);
                cpu.statistics.pmi();
            }
            Pmi::None => irq.finish(),
            Pmi::Line => {
                irq.finish();
                show_line(local, cpu, monitor);
            }
        }
        return if host.is_empty() {
            Kind::IrqPmu
        } else {
            Kind::IrqHostPmu
        };
    }
    let kind = if intid < 16 {
        Kind::IrqSgi
    } else if monitor.machine.timer_intids.contains(&intid) {
        Kind::IrqTimer
    } else {
        Kind::IrqOther
    };
    if intid < 16 {
        // SGIs have nothing for the guest to deactivate.
        irq.finish();
        interrupt.source = Source::Software;
    } else {
        irq.drop_priority();
    }
    local.interrupts.inject(interrupt, &mut PhysicalInterface);
    kind
}

/// Shows the guest the emulated PMU's line.
pub(super) fn show_line(local: &mut Local, cpu: &Cpu, monitor: &Monitor) {
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
