//! Stage-2 faults: accesses to the interrupt controller's filtered frames and to the doorbell.

use alloc::vec::Vec;
use core::ops::Range;

use vpmu_monitor::boot::device_tree::Machine;
use vpmu_monitor::world::{distributor, exit::MemoryAccess, statistics::Kind};

use super::{
    cpu::{Cpu, DOORBELL_PAGE, Local, Monitor},
    el2::borrow,
    figures::{self, note_instructions},
    frame::Frame,
    gic::least_mask,
    irq::show_line,
    mmio::{read_device, write_device},
    sysreg::read_sysreg,
};

/// What the guest does not reach, or only through the monitor: devices, and `more`.
pub(super) fn holes(machine: &Machine, more: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let distributor = machine.distributor.start;
    distributor::PAGES
        .into_iter()
        .map(|page| distributor + page.start..distributor + page.end)
        .chain(machine.redistributors.iter().cloned())
        .chain(machine.its.iter().cloned())
        .chain(more)
        .collect()
}

/// The guest physical address of a stage-2 fault.
pub(super) fn fault_address() -> u64 {
    (read_sysreg!("hpfar_el2") & 0xfff_ffff_fff0) << 8 | read_sysreg!("far_el2") & 0xfff
}

/// Serves a load or store that stage 2 does not let through. `None`: nothing is there.
pub(super) fn memory_access(
    frame: &mut Frame,
    access: MemoryAccess,
    monitor: &Monitor,
    cpu: &Cpu,
    local: &mut Local,
) -> Option<Kind> {
    let address = fault_address();
    let doorbell = monitor.doorbell();
    if (doorbell..doorbell + DOORBELL_PAGE).contains(&address) {
        if access.write {
            let value = frame.register(access.rt);
            ring(address - doorbell, value, monitor, cpu, local);
        } else {
            let magic = if address == doorbell { 0x564d_5056 } else { 0 };
            frame.set_register(access.rt, access.extend(magic));
        }
        frame.step();
        return Some(Kind::Doorbell);
    }
    if interrupt_controller(frame, address, access, monitor) {
        frame.step();
        show_line(local, cpu, monitor);
        return Some(Kind::Redistributor);
    }
    None
}

/// Serves an access to a filtered frame of the interrupt controller; false when `address` is in none.
fn interrupt_controller(
    frame: &mut Frame,
    address: u64,
    access: MemoryAccess,
    monitor: &Monitor,
) -> bool {
    let MemoryAccess { bytes, rt, .. } = access;
    let written = access.write.then(|| frame.register(rt));
    let machine = || read_device(address, bytes);
    let answer = if let Some(number) = monitor.redistributor_at(address) {
        let (place, view) = monitor.redistributor(number);
        let offset = address - place.frames.start;
        match written {
            // The frame of a shared CPU holds what is the second guest's while that runs.
            Some(_) if monitor.shared == Some(number) && number != Cpu::number() => Err(None),
            Some(value) => Err(view.write(offset, bytes, value, machine)),
            None => Ok(view.read(offset, bytes, machine)),
        }
    } else if monitor.machine.distributor.contains(&address) {
        let offset = address - monitor.machine.distributor.start;
        if let Some(value) = written {
            let kept = match monitor.keeps_group1() {
                true => distributor::CTLR_GROUP1,
                false => 0,
            };
            let value = distributor::write(offset, bytes, value, kept);
            let value = value.map(|value| match monitor.shared {
                Some(_) => distributor::less_urgent(offset, bytes, value, least_mask()),
                None => value,
            });
            Err(match monitor.kept_spi {
                Some(spi) => value.and_then(|value| spi.write(offset, bytes, value, machine)),
                None => value,
            })
        } else {
            let value = distributor::read(offset, bytes, machine);
            let spi = monitor.kept_spi;
            Ok(spi.map_or(value, |spi| spi.read(offset, bytes, value)))
        }
    } else {
        return false;
    };
    match answer {
        Ok(value) => frame.set_register(rt, access.extend(value)),
        Err(Some(value)) => write_device(address, bytes, value),
        Err(None) => {}
    }
    true
}

/// The guest marks the beginning (1) or the end (2) of what is measured.
fn ring(offset: u64, value: u64, monitor: &Monitor, cpu: &Cpu, local: &mut Local) {
    note_instructions(cpu, local);
    if offset == 0 {
        borrow(local, monitor, value as u32 == 1);
        // Where the hardware no longer asserts the guest's line, the monitor does.
        show_line(local, cpu, monitor);
    }
    match (offset, value as u32) {
        (0, 1) => figures::begin_measurement(),
        (0, 2) => figures::end_measurement(),
        _ => {}
    }
}
