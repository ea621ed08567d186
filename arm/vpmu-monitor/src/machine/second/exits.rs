//! Serving the second guest's exits.

use smccc::psci::{Error, PSCI_FEATURES, PSCI_MIGRATE_INFO_TYPE, PSCI_VERSION};
use vpmu_monitor::world::{
    exit::{Exit, MemoryAccess},
    psci::{self, Call},
    second::{
        gic::{DISTRIBUTOR, REDISTRIBUTOR},
        scheduler::Who,
    },
    statistics::Kind,
};

use super::super::{
    cpu::Local,
    device::fault_address,
    firmware::{forward, may_suspend},
    frame::Frame,
    sysreg::read_sysreg,
    trap::{nothing_there, of_any_guest, sends_sgi},
};
use super::{context::Context, pair::Pair};

/// A synchronous exception of the second guest.
pub(super) fn synchronous(frame: &mut Frame, pair: &mut Pair, local: &mut Local) -> Kind {
    let esr = read_sysreg!("esr_el2");
    match Exit::decode(esr) {
        Exit::SystemRegister(access) if access.write && sends_sgi(access.encoding) => {
            pair.gic
                .send_sgi(access.encoding.op2, frame.register(access.rt));
            frame.step();
            Kind::SendSgi
        }
        Exit::Smc => {
            frame.step();
            firmware_call(frame, pair);
            Kind::Smc
        }
        Exit::Wfi => {
            frame.step();
            wait(pair);
            Kind::Wfi
        }
        // The second guest has no doorbell.
        Exit::Memory(access) => {
            let served = interrupt_controller(frame, access, pair);
            served.unwrap_or_else(|| nothing_there(frame, esr))
        }
        exit => of_any_guest(frame, exit, esr, pair.cpu, local),
    }
}

/// Waits, unless an interrupt is there.
fn wait(pair: &mut Pair) {
    // WFI ends for what is pending, even where PSTATE masks it: not to wait is always right.
    if !pair.gic.has_pending() {
        pair.scheduler.wait(Context::next_timer());
    }
}

/// Serves an access to the guest's interrupt controller; `None`: nothing is there.
fn interrupt_controller(frame: &mut Frame, access: MemoryAccess, pair: &mut Pair) -> Option<Kind> {
    let address = fault_address();
    let machine = &pair.monitor.machine;
    let distributor = machine.distributor.start;
    let redistributor = machine.redistributors.first()?.start;
    let written = access.write.then(|| frame.register(access.rt));
    let read = if let Some(offset) = within(address, distributor, DISTRIBUTOR) {
        pair.gic.distributor(offset, access.bytes, written)
    } else {
        let offset = within(address, redistributor, REDISTRIBUTOR)?;
        pair.gic.redistributor(offset, access.bytes, written)
    };
    if written.is_none() {
        frame.set_register(access.rt, access.extend(read));
    }
    frame.step();
    Some(Kind::Redistributor)
}

fn within(address: u64, start: u64, length: u64) -> Option<u64> {
    address.checked_sub(start).filter(|&offset| offset < length)
}

/// Serves an SMC; the PC is past it. The guest has one CPU, which it cannot start.
fn firmware_call(frame: &mut Frame, pair: &mut Pair) {
    let call = Call::decode([frame.x[0], frame.x[1], frame.x[2], frame.x[3]]);
    let own = pair.gic.affinity;
    let answer = match call {
        Call::CpuOn { target, .. } if target == own => Err(Error::AlreadyOn),
        Call::AffinityInfo { target } if target == own => Ok(()),
        Call::CpuOn { .. } | Call::AffinityInfo { .. } => Err(Error::InvalidParameters),
        Call::CpuSuspend(state) if may_suspend(state, pair.monitor) => {
            wait(pair);
            Ok(())
        }
        Call::CpuSuspend(_) => Err(Error::InvalidParameters),
        Call::CpuOff | Call::SystemOff | Call::SystemReset => {
            // These calls do not return, and there is no answer.
            pair.scheduler.switch_off(Who::Second);
            return;
        }
        Call::Forward if is_question(frame.x[0]) => return forward(frame),
        Call::Forward | Call::Unknown => Err(Error::NotSupported),
    };
    frame.answer(answer);
}

/// Whether a call asks only what the firmware is. What else the calling convention has (workarounds of errata) is performed
/// by the CPU's kernel for itself, and is forwarded, too.
fn is_question(x0: u64) -> bool {
    let function = psci::function(x0);
    matches!(
        function,
        PSCI_VERSION | PSCI_FEATURES | PSCI_MIGRATE_INFO_TYPE
    ) || function >> 16 == 0x8000
}
