//! Serving the guest's synchronous exits.
//!
//! UNSAFETY: called from assembly, reads system registers.

use vpmu::arm::{Outcome, Register};
use vpmu_monitor::world::{
    exit::{ESR_UNDEFINED, Exit, RegisterAccess},
    offer, psci,
    statistics::Kind,
};

use super::{
    cpu::{Cpu, Local, Monitor},
    device::{data_abort, fault_address},
    el2::apply_traps,
    end::{guest_stopped, power_off},
    firmware::firmware_call,
    frame::Frame,
    gic,
    irq::show_line,
    pmu_registers::PhysicalPmu,
    sysreg::{read_id_register, read_sysreg},
};

/// A synchronous exception of the guest.
#[unsafe(no_mangle)]
extern "C" fn guest_synchronous(frame: &mut Frame) {
    let Some(monitor) = Monitor::installed() else {
        power_off()
    };
    let cpu = Cpu::this();
    let esr = read_sysreg!("esr_el2");
    let kind = match Exit::decode(esr) {
        Exit::SystemRegister(access) => {
            let mut local = cpu.local.lock();
            system_register(frame, access, esr, monitor, cpu, &mut local)
        }
        Exit::Smc => {
            frame.step();
            firmware_call(frame, monitor);
            Kind::Smc
        }
        Exit::Hvc => {
            // There is no hypervisor for the guest to call.
            frame.set_register(0, psci::NOT_SUPPORTED);
            Kind::Hvc
        }
        Exit::DataAbort(abort) => data_abort(frame, abort, monitor, cpu),
        Exit::InstructionAbort => guest_stopped(format_args!(
            "it jumped to {:#x}, which is not its memory",
            fault_address()
        )),
        Exit::Other(_) => {
            frame.inject(ESR_UNDEFINED, monitor.mte);
            Kind::Other
        }
    };
    frame.leave(cpu, kind);
}

fn system_register(
    frame: &mut Frame,
    access: RegisterAccess,
    esr: u64,
    monitor: &Monitor,
    cpu: &Cpu,
    local: &mut Local,
) -> Kind {
    let encoding = access.encoding;
    if let Some(register) = Register::decode(encoding) {
        let level = frame.exception_level();
        let outcome = match &mut local.pmu {
            None => Outcome::NotHandled,
            Some(pmu) => {
                let line = pmu.line();
                let outcome = if access.write {
                    pmu.write(register, level, frame.register(access.rt), &mut PhysicalPmu)
                } else {
                    pmu.read(register, level, &mut PhysicalPmu)
                };
                let (lazy, line_moved) = (pmu.is_lazy(), pmu.line() != line);
                if lazy {
                    apply_traps(local, false);
                }
                if line_moved {
                    show_line(local, cpu, monitor);
                }
                outcome
            }
        };
        match outcome {
            Outcome::Value(value) => {
                frame.set_register(access.rt, value);
                frame.step();
            }
            Outcome::Done => frame.step(),
            Outcome::TrapToEl1 => frame.inject(esr, monitor.mte),
            Outcome::Undefined | Outcome::NotHandled => frame.inject(ESR_UNDEFINED, monitor.mte),
        }
        return Kind::Pmu(register, access.write);
    }
    if !access.write && offer::is_id_register(encoding) {
        let value = offer::id_register(encoding, read_id_register(encoding.crm, encoding.op2));
        frame.set_register(access.rt, value);
        frame.step();
        return Kind::IdRegister;
    }
    // ICC_SGI1R_EL1, ICC_ASGI1R_EL1 and ICC_SGI0R_EL1 trap because interrupts are virtual.
    if access.write && (encoding.op0, encoding.op1, encoding.crn, encoding.crm) == (3, 0, 12, 11) {
        gic::send_sgi(encoding.op2, frame.register(access.rt));
        frame.step();
        return Kind::SendSgi;
    }
    frame.inject(ESR_UNDEFINED, monitor.mte);
    Kind::UnknownRegister
}

/// An SError of the guest's. `HCR_EL2.AMO` is clear, so that it goes to EL1 and never here.
#[unsafe(no_mangle)]
extern "C" fn guest_serror(_: &mut Frame) {
    guest_stopped(format_args!("the machine reported an SError at EL2"));
}
