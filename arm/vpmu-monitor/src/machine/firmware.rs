//! The guest's firmware calls, performed.
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use smccc::{
    Call as _, Smc,
    psci::{Error, PSCI_CPU_SUSPEND_32, PSCI_FEATURES, system_reset},
};
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    boot::words::Interrupts,
    lock::Unlocked,
    world::psci::{self, Call, PowerState},
};

use super::{
    cpu::{Cpu, Monitor},
    el2::{apply_traps, write_hcr},
    end::{power_off, print_statistics},
    frame::Frame,
    gic::{self, PhysicalInterface},
    start,
    sysreg::wait_for_interrupt,
};

/// The first of two guests has switched itself off, on a CPU that it does not share.
pub(super) static FIRST_IS_OFF: AtomicBool = AtomicBool::new(false);

/// Serves an SMC; the PC is past it.
pub(super) fn firmware_call(frame: &mut Frame, monitor: &Monitor, unlocked: &mut Unlocked) {
    let call = Call::decode([frame.x[0], frame.x[1], frame.x[2], frame.x[3]]);
    let answer = match call {
        Call::CpuOn {
            target,
            entry,
            context,
        } => match monitor.machine.cpus.iter().position(|&cpu| cpu == target) {
            Some(number) => start::start_cpu(number, monitor, entry, context),
            None => Err(Error::InvalidParameters),
        },
        Call::CpuOff => cpu_off(monitor, unlocked),
        Call::CpuSuspend(state) => {
            if may_suspend(state, monitor) {
                suspend(monitor, unlocked);
                Ok(())
            } else {
                Err(Error::InvalidParameters)
            }
        }
        // The machine goes off with the last of its guests.
        Call::SystemOff | Call::SystemReset if monitor.shared.is_some() => {
            first_is_off(monitor, unlocked)
        }
        Call::SystemOff => {
            print_statistics();
            power_off()
        }
        Call::SystemReset => {
            print_statistics();
            let _ = system_reset::<Smc>();
            power_off()
        }
        Call::Forward | Call::AffinityInfo { .. } => {
            forward(frame);
            return;
        }
        Call::Unknown => Err(Error::NotSupported),
    };
    frame.answer(answer);
}

/// Whether the firmware knows this state.
pub(super) fn may_suspend(state: PowerState, monitor: &Monitor) -> bool {
    let features = Smc::call32(PSCI_FEATURES, [PSCI_CPU_SUSPEND_32, 0, 0, 0, 0, 0, 0])[0];
    state.is_valid(&monitor.machine.suspend_states, features.into())
}

/// Passes a call and its answer through.
pub(super) fn forward(frame: &mut Frame) {
    let mut arguments = [0; 17];
    arguments.copy_from_slice(&frame.x[1..18]);
    let answers = Smc::call64(psci::function(frame.x[0]), arguments);
    frame.x[..4].copy_from_slice(&answers[..4]);
}

/// Stops this CPU. Returns only when the firmware refuses, with its answer.
fn cpu_off(monitor: &Monitor, unlocked: &mut Unlocked) -> Result<(), Error> {
    let cpu = Cpu::this();
    let mut local = cpu.local.lock(unlocked);
    local.interrupts.give_all_back(&mut PhysicalInterface);
    if let Some(pmu) = &mut local.pmu {
        pmu.put(&mut PhysicalPmu);
    }
    // The line is low by now.
    if let Some(intid) = monitor.pmu_intid(Cpu::number())
        && cpu.pmi_waits.swap(false, Relaxed)
    {
        gic::deactivate(intid);
    }
    drop(local);
    cpu.on.store(false, Relaxed);
    let refused = smccc::psci::cpu_off::<Smc>();
    cpu.on.store(true, Relaxed);
    let mut local = cpu.local.lock(unlocked);
    if let Some(pmu) = &mut local.pmu {
        pmu.load(None, &mut PhysicalPmu);
    }
    apply_traps(&mut local, false);
    refused
}

/// Waits for an interrupt, in stand-by.
fn suspend(monitor: &Monitor, unlocked: &mut Unlocked) {
    let local = Cpu::this().local.lock(unlocked);
    // What waits in a list register is no physical interrupt any more and need not wake a CPU at EL2.
    let may_wait = local.interrupts.may_wait(&PhysicalInterface);
    drop(local);
    if may_wait {
        // An interrupt that goes to EL1 need not wake EL2: meanwhile all come here, where they stay pending.
        write_hcr(Interrupts::Virtual, monitor.sharing());
        wait_for_interrupt(unlocked);
        write_hcr(monitor.settings.interrupts, monitor.sharing());
    }
}

/// The first guest has switched itself off on this CPU, which it does not share. The CPU rests until the second guest has
/// gone, too.
fn first_is_off(monitor: &Monitor, unlocked: &mut Unlocked) -> ! {
    FIRST_IS_OFF.store(true, Relaxed);
    // The shared CPU checks, whichever interrupt comes.
    gic::call_others(monitor);
    loop {
        wait_for_interrupt(unlocked);
    }
}
