//! A second guest on the CPU that booted: exceptions there come here first.
//!
//! The CPU has vectors of its own for that (`shared_vectors`), so that a guest that is alone, and the first guest on
//! every other CPU, take the same way as ever.
//!
//! UNSAFETY: called from assembly; writes the timer and the vectors of EL2.

mod boot;
mod context;
mod exits;
mod pair;
mod private;

use core::sync::atomic::Ordering::Relaxed;

use smccc::psci::Error;
use spin::Once;
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    lock::{Own, Unlocked},
    regs::HcrEl2,
    world::{
        exit::Exit,
        guest_pmu::{GuestPmu, PmuError},
        offer,
        psci::Call,
        second::{
            gic::VirtualGic,
            scheduler::{Decision, Scheduler, Who, serve_interrupts},
            statistics::Figure,
        },
        statistics::Kind,
    },
};

use super::{
    cpu::{Cpu, Local, Monitor, cpus},
    end::{power_off, print_statistics},
    figures::SECOND,
    firmware::{FIRST_IS_OFF, may_suspend},
    frame::Frame,
    gic::{self, PhysicalInterface},
    irq,
    sysreg::{isb, now, read_sysreg, wait_for_interrupt, write_sysreg},
    trap,
};
use context::Context;
use pair::{Pair, set_alarm};
use private::{Private, PrivateInterrupts};

pub(crate) use boot::{Plan, Second, plan};

/// The shared CPU's own: no other CPU waits for it.
static PAIR: Once<Own<Pair>> = Once::new();

unsafe extern "C" {
    fn shared_vectors();
}

/// Makes the second guest, which runs on CPU `number`. Called once, at boot.
pub(crate) fn install(second: &Second, number: usize, monitor: &'static Monitor) {
    // The binding's order: secure, physical, virtual, EL2's.
    let timers = monitor.machine.timer_intids.iter().skip(1).take(2);
    let pmi = monitor.pmu_intid(number);
    let (place, view) = monitor.redistributor(number);
    let intids = timers
        .copied()
        .chain(pmi)
        .filter(|&intid| intid < 32)
        .fold(0, |intids, intid| intids | 1 << intid);
    let frequency = read_sysreg!("cntfrq_el0");
    let slice = u64::from(monitor.settings.slice) * frequency / 1_000_000;
    let context = Context::new(second.entry, second.tree, second.vttbr);
    PAIR.call_once(|| {
        Own::new(Pair {
            monitor,
            cpu: &cpus()[number],
            scheduler: Scheduler::new(slice),
            contexts: [context.clone(), context],
            other_pmu: None,
            gic: VirtualGic::new(monitor.machine.cpus[number]),
            interrupts: PrivateInterrupts {
                frame: place.sgi_frame(),
                // What is the monitor's, as an emulated PMU's interrupt is, stays as it is.
                intids: intids & !view.owned,
            },
            private: Private::default(),
            alarm_intid: second.alarm_intid,
        })
    });
}

/// Makes the second guest's PMU, which is on no CPU, from what this CPU's can do.
// Apart from what makes the first guest's: a PMU is large, and a frame is on the stack as long as its function runs.
#[inline(never)]
pub(crate) fn make_pmu(unlocked: &mut Unlocked) -> Result<(), PmuError> {
    let Some(pair) = PAIR.get() else {
        return Ok(());
    };
    let (mut pair, local) = pair.lock_with(&Cpu::this().local, unlocked);
    let (hardware, settings) = (local.hardware.as_ref(), pair.monitor.settings);
    let pmu = hardware.map(|hardware| GuestPmu::new(settings, hardware, &mut PhysicalPmu));
    pair.other_pmu = pmu.transpose()?;
    if let Some(pmu) = &mut pair.other_pmu {
        pmu.put(&mut PhysicalPmu);
    }
    Ok(())
}

/// The two guests begin to take turns on this CPU, which is about to enter the first.
pub(crate) fn begin(unlocked: &mut Unlocked) {
    let Some(pair) = PAIR.get() else { return };
    let mut pair = pair.lock(unlocked);
    let monitor = pair.monitor;
    let hcr = offer::hcr(monitor.settings.interrupts, monitor.sharing()) | HcrEl2::TWI;
    // SAFETY: more traps; the vectors are the monitor's own.
    unsafe {
        write_sysreg!("hcr_el2", hcr.bits());
        write_sysreg!("vbar_el2", shared_vectors as *const () as u64);
        write_sysreg!("mdscr_el1", 0_u64);
    }
    isb();
    if let Some(spi) = monitor.kept_spi {
        let affinity = pair.gic.affinity;
        private::own_shared(monitor.machine.distributor.start, spi, affinity);
    }
    pair.scheduler.begin(now());
    if let Decision::GoOn(alarm) = pair.scheduler.decide(now()) {
        set_alarm(alarm);
    }
}

/// Any synchronous exception on the shared CPU.
#[unsafe(no_mangle)]
extern "C" fn shared_synchronous(frame: &mut Frame) {
    let Some(pair) = PAIR.get() else { power_off() };
    let (cpu, mut unlocked) = (Cpu::this(), Unlocked::at_exception());
    let (mut turns, mut local) = pair.lock_with(&cpu.local, &mut unlocked);
    if turns.scheduler.current() == Who::Second {
        local.at_exit();
        turns.leave_second();
        let kind = exits::synchronous(frame, &mut turns, &mut local);
        if let Kind::Pmu(..) = kind {
            cpu.statistics.switched(Figure::SecondTraps, 1);
        }
        frame.account(&SECOND, kind);
        drop((turns, local));
    } else {
        let waits = first_waits(frame, &mut turns, &mut local);
        drop((turns, local));
        if !waits {
            trap::synchronous(frame, &mut unlocked);
        }
    }
    schedule(frame, pair, cpu, &mut unlocked);
}

/// A physical interrupt on the shared CPU, of group 1 or of group 0.
#[unsafe(no_mangle)]
extern "C" fn shared_interrupt(frame: &mut Frame, group1: bool) {
    let Some(pair) = PAIR.get() else { power_off() };
    let (cpu, mut unlocked) = (Cpu::this(), Unlocked::at_exception());
    let (mut turns, mut local) = pair.lock_with(&cpu.local, &mut unlocked);
    local.at_exit();
    if turns.scheduler.current() == Who::Second {
        turns.leave_second();
        let kind = turns.interrupts_of_second(frame, group1, &mut local);
        frame.account(&SECOND, kind);
    } else {
        let mut kind = Kind::Other;
        let some_left = serve_interrupts(|| {
            let Some(irq) = gic::acknowledge(group1) else {
                return false;
            };
            kind = match turns.serve_any(&irq) {
                Some(kind) => kind,
                None => irq::serve(&irq, frame, turns.monitor, cpu, &mut local),
            };
            true
        });
        // A device that interrupts without end costs its own guest the turn, not the other one.
        if some_left {
            turns.scheduler.end_turn();
        }
        frame.account(&cpu.statistics, kind);
    }
    drop((turns, local));
    schedule(frame, pair, cpu, &mut unlocked);
}

/// Serves those exits of the first guest by which it gives the CPU away; false when this is none.
fn first_waits(frame: &mut Frame, pair: &mut Pair, local: &mut Local) -> bool {
    let kind = match Exit::decode(read_sysreg!("esr_el2")) {
        Exit::Wfi => Kind::Wfi,
        Exit::Smc => {
            let call = Call::decode([frame.x[0], frame.x[1], frame.x[2], frame.x[3]]);
            match call {
                Call::CpuSuspend(state) if may_suspend(state, pair.monitor) => {
                    frame.answer(Ok(()));
                }
                Call::CpuOff => {
                    // The other guest needs the CPU, which PSCI lets the firmware say.
                    frame.answer(Err(Error::Denied));
                    frame.step();
                    return true;
                }
                Call::SystemOff | Call::SystemReset => {
                    pair.scheduler.switch_off(Who::First);
                    return true;
                }
                _ => return false,
            }
            Kind::Smc
        }
        _ => return false,
    };
    local.at_exit();
    frame.step();
    if local.interrupts.may_wait(&PhysicalInterface) && gic::highest_pending(true).is_none() {
        pair.scheduler.wait(Context::next_timer());
    }
    frame.account(&pair.cpu.statistics, kind);
    true
}

/// Lets whoever's turn it is run.
fn schedule(frame: &mut Frame, pair: &Own<Pair>, cpu: &Cpu, unlocked: &mut Unlocked) {
    loop {
        let (mut turns, mut local) = pair.lock_with(&cpu.local, unlocked);
        if FIRST_IS_OFF.load(Relaxed) {
            turns.scheduler.switch_off(Who::First);
        }
        match turns.scheduler.decide(now()) {
            Decision::GoOn(alarm) => {
                set_alarm(alarm);
                if turns.scheduler.current() == Who::Second {
                    turns.enter_second(&local);
                }
                return;
            }
            Decision::Switch => turns.switch(frame, &mut local),
            Decision::Wait(alarm) => {
                set_alarm(alarm);
                // The lock is given up before the wait: a doorbell on another CPU may want it for as long as both sleep.
                turns.admit();
                drop((turns, local));
                wait_for_interrupt(unlocked);
                pair.lock(unlocked).find_interrupts();
            }
            Decision::End => {
                drop((turns, local));
                print_statistics();
                power_off()
            }
        }
    }
}
