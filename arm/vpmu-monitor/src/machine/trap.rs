//! Serving the guest's synchronous exits.
//!
//! UNSAFETY: called from assembly, reads system registers, maintains caches.

use smccc::psci::Error;
use vpmu::arm::{Encoding, ExceptionLevel, Outcome, Register};
use vpmu_el2::access::Access;
use vpmu_el2::{PhysicalPmu, exception::ESR_UNDEFINED};
use vpmu_monitor::{
    lock::Unlocked,
    world::{
        exit::{Exit, RegisterAccess},
        offer::{self, Sharing},
        second::registers,
        set_way::{self, Cache},
        statistics::Kind,
    },
};

use super::{
    cpu::{Cpu, Local, Monitor},
    device::memory_access,
    el2::apply_traps,
    end::{guest_stopped, power_off},
    firmware::firmware_call,
    frame::Frame,
    gic,
    irq::show_line,
    sysreg::{isb, read_id_register, read_sysreg, write_sysreg},
};

/// A synchronous exception of the guest.
#[unsafe(no_mangle)]
extern "C" fn guest_synchronous(frame: &mut Frame) {
    synchronous(frame, &mut Unlocked::at_exception());
}

pub(super) fn synchronous(frame: &mut Frame, unlocked: &mut Unlocked) {
    let cpu = Cpu::this();
    let Some(monitor) = Monitor::installed() else {
        power_off()
    };
    let mut local = cpu.local.lock(unlocked);
    local.at_exit();
    let esr = read_sysreg!("esr_el2");
    let kind = match Exit::decode(esr) {
        Exit::Smc => {
            drop(local);
            frame.step();
            firmware_call(frame, monitor, unlocked);
            Kind::Smc
        }
        Exit::Memory(access) => {
            let served = memory_access(frame, access, monitor, cpu, &mut local);
            served.unwrap_or_else(|| nothing_there(frame, esr))
        }
        exit => of_any_guest(frame, exit, esr, cpu, &mut local),
    };
    frame.account(&cpu.statistics, kind);
}

/// Serves an exit that is served alike whichever guest is in the CPU.
#[inline]
pub(super) fn of_any_guest(
    frame: &mut Frame,
    exit: Exit,
    esr: u64,
    cpu: &Cpu,
    local: &mut Local,
) -> Kind {
    match exit {
        Exit::Pmu(access) => pmu_register(frame, access, cpu, local),
        Exit::SystemRegister(access) => system_register(frame, access, local),
        Exit::Aarch32 => {
            frame.inject(ESR_UNDEFINED);
            Kind::UnknownRegister
        }
        Exit::Hvc => {
            // There is no hypervisor for the guest to call.
            frame.answer(Err(Error::NotSupported));
            Kind::Hvc
        }
        Exit::CacheMaintenance => {
            // Of memory that the guest does not have: no cache has a line of it.
            frame.step();
            Kind::Other
        }
        Exit::Abort => nothing_there(frame, esr),
        // What is not offered is undefined. WFI traps only where two guests share a CPU, and is served there.
        _ => {
            frame.inject(ESR_UNDEFINED);
            Kind::Other
        }
    }
}

/// Ends an access to memory that the guest does not have, as a bus without a device there does.
pub(super) fn nothing_there(frame: &mut Frame, esr: u64) -> Kind {
    frame.inject_external_abort(esr);
    Kind::ExternalAbort
}

fn system_register(frame: &mut Frame, access: RegisterAccess, local: &Local) -> Kind {
    let encoding = access.encoding;
    if !access.write && offer::is_id_register(encoding) {
        let physical = read_id_register(encoding.crm, encoding.op2);
        let value = match local.sharing {
            Sharing::Alone => offer::id_register(encoding, physical),
            Sharing::Two => offer::shared_id_register(encoding, physical),
        };
        frame.set_register(access.rt, value);
        frame.step();
        return Kind::IdRegister;
    }
    if access.write && sends_sgi(encoding) {
        gic::send_sgi(encoding.op2, frame.register(access.rt));
        frame.step();
        return Kind::SendSgi;
    }
    if access.write && set_way::is_operation(encoding) {
        clean_set_way(frame.register(access.rt));
        frame.step();
        return Kind::SetWay;
    }
    if local.sharing == Sharing::Two
        && let Some(value) = registers::fixed(encoding)
    {
        frame.set_register(if access.write { 31 } else { access.rt }, value);
        frame.step();
        return Kind::UnknownRegister;
    }
    frame.inject(ESR_UNDEFINED);
    Kind::UnknownRegister
}

/// Cleans and invalidates the cache line that the operand of a guest's set/way instruction names, whichever the instruction
/// is: to invalidate without cleaning would throw away lines of others.
#[cold]
fn clean_set_way(operand: u64) {
    let selected = read_sysreg!("csselr_el1");
    // SAFETY: CSSELR_EL1 is the guest's, and becomes what it was below.
    unsafe { write_sysreg!("csselr_el1", set_way::select(operand)) }
    isb();
    let cache = Cache {
        clidr: read_sysreg!("clidr_el1"),
        ccsidr: read_sysreg!("ccsidr_el1"),
        mmfr2: read_sysreg!("id_aa64mmfr2_el1"),
    };
    // SAFETY: as above.
    unsafe { write_sysreg!("csselr_el1", selected) }
    if cache.contains(operand) {
        // SAFETY: a line that is cleaned keeps its value, and this one exists: another might be undefined.
        unsafe {
            core::arch::asm!("dc cisw, {}", "dsb sy", in(reg) operand, options(nostack));
        }
    }
    isb();
}

/// Whether `register` is ICC_SGI1R_EL1, ICC_ASGI1R_EL1 or ICC_SGI0R_EL1 (S3_0_C12_C11_5 to 7), which trap where
/// interrupts are virtual.
pub(super) fn sends_sgi(register: Encoding) -> bool {
    register.op2 >= 5 && register == Encoding::new(3, 0, 12, 11, register.op2)
}

/// Reads a PMU register of the guest's, or writes `written` to it.
fn pmu_access(
    register: Register,
    level: ExceptionLevel,
    written: Option<u64>,
    cpu: &Cpu,
    local: &mut Local,
) -> Outcome {
    let (Some(monitor), Some(pmu)) = (Monitor::installed(), &mut local.pmu) else {
        return Outcome::NotHandled;
    };
    let line = pmu.line();
    let outcome = pmu.access(register, level, written, &mut PhysicalPmu);
    let line_moved = pmu.line() != line;
    apply_traps(local, false);
    if line_moved {
        show_line(local, cpu, monitor);
    }
    outcome
}

/// Performs an access of a PMU register.
fn pmu_register(frame: &mut Frame, access: Access, cpu: &Cpu, local: &mut Local) -> Kind {
    let exception = access.complete(frame.vcpu(), |register, level, written| {
        pmu_access(register, level, written, cpu, local)
    });
    if let Some(esr) = exception {
        frame.inject(esr);
    }
    Kind::Pmu(access.register, access.write)
}

/// An SError of the guest's. `HCR_EL2.AMO` is clear, so that it goes to EL1 and never here.
#[unsafe(no_mangle)]
extern "C" fn guest_serror(_: &mut Frame) {
    guest_stopped(format_args!("the machine reported an SError at EL2"));
}
