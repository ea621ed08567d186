//! Stage-2 faults: accesses to the redistributors' SGI frames and to the doorbell.

use core::ops::Range;

use vpmu_monitor::world::{
    exit::DataAbort,
    redistributor::{self, IPRIORITYR0},
    statistics::Kind,
};

use super::{
    cpu::{self, Cpu, MARKS, Monitor},
    end::{guest_stopped, note_instructions},
    frame::Frame,
    gic::OWN_PRIORITY,
    irq::show_line,
    mmio::{read_device, write_device},
    sysreg::read_sysreg,
};

/// Guest physical page that the guest rings to mark the command being measured: a hole in the
/// address map of QEMU's `virt` machine.
pub(crate) const DOORBELL: Range<u64> = 0x0b00_0000..0x0b00_1000;

/// The guest physical address of a stage-2 fault.
pub(super) fn fault_address() -> u64 {
    (read_sysreg!("hpfar_el2") & 0xfff_ffff_fff0) << 8 | read_sysreg!("far_el2") & 0xfff
}

/// Serves a load or store that stage 2 does not let through.
pub(super) fn data_abort(
    frame: &mut Frame,
    abort: DataAbort,
    monitor: &Monitor,
    cpu: &Cpu,
) -> Kind {
    let address = fault_address();
    let redistributors = &monitor.machine.redistributors;
    let Some(access) = abort.access else {
        guest_stopped(format_args!(
            "it reached {address:#x} with an instruction that the processor does not describe"
        ));
    };
    if DOORBELL.contains(&address) {
        if abort.write {
            ring(address - DOORBELL.start, frame.register(access.rt));
        } else {
            let magic = if address == DOORBELL.start {
                0x564d_5056
            } else {
                0
            };
            frame.set_register(access.rt, access.extend(magic));
        }
        frame.step();
        return Kind::Doorbell;
    }
    let offset = address.wrapping_sub(redistributors.start);
    let number = (offset / redistributor::STRIDE) as usize;
    let offset = (offset % redistributor::STRIDE).wrapping_sub(redistributor::SGI_FRAME);
    if !redistributors.contains(&address)
        || number >= monitor.frames.len()
        || offset >= redistributor::SGI_FRAME
    {
        let verb = if abort.write { "wrote to" } else { "read from" };
        let what = if monitor.memory.contains(&address) {
            "the monitor's memory"
        } else {
            "no memory of its own"
        };
        guest_stopped(format_args!("it {verb} {address:#x}, which is {what}"));
    }
    let view = &monitor.frames[number];
    if abort.write {
        let value = view.write(offset, frame.register(access.rt));
        write_device(address, access.bytes, value);
        if (IPRIORITYR0..IPRIORITYR0 + 32).contains(&offset) {
            own_priorities(monitor, number);
        }
    } else {
        let value = view.read(offset, read_device(address, access.bytes));
        frame.set_register(access.rt, access.extend(value));
    }
    frame.step();
    show_line(&mut cpu.local.lock(), cpu, monitor);
    Kind::Redistributor
}

/// Gives the monitor's interrupts of CPU `number` the priority that no mask keeps out.
pub(super) fn own_priorities(monitor: &Monitor, number: usize) {
    let owned = monitor.frames[number].owned();
    for intid in (0..32).filter(|n| owned >> n & 1 != 0) {
        let at = monitor.sgi_frame(number) + IPRIORITYR0 + intid;
        write_device(at, 1, OWN_PRIORITY.into());
    }
}

/// The guest marks the beginning (1) or the end (2) of what is measured.
fn ring(offset: u64, value: u64) {
    note_instructions(Cpu::this(), &Cpu::this().local.lock());
    let mut marks = MARKS.lock();
    match (offset, value as u32) {
        (0, 1) => {
            marks.begin = Some(cpu::snapshot());
            marks.end = None;
        }
        (0, 2) => marks.end = Some(cpu::snapshot()),
        _ => {}
    }
}
