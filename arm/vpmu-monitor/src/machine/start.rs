//! The start of every CPU but the first, and the entry into the guest on all of them.
//!
//! UNSAFETY: hands a block of memory to a CPU whose MMU is off, and sets where the guest begins.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use smccc::{
    Smc,
    psci::{Error, cpu_on},
};
use vpmu_monitor::{lock::Unlocked, regs::SPSR_EL1H_MASKED};

use super::{
    console::say,
    cpu::{Cpu, Monitor, StartBlock, cpus},
    el2, end, mmu,
    sysreg::{isb, write_sysreg},
};

unsafe extern "C" {
    fn start_secondary();
    safe fn enter_guest(x0: u64, stack: u64) -> !;
}

/// Called by `entry.s` on every CPU but the first, with the MMU on.
#[unsafe(no_mangle)]
extern "C" fn secondary_cpu(block: &StartBlock) -> ! {
    let number = block.number as usize;
    let Some(monitor) = Monitor::installed() else {
        end::power_off()
    };
    let unlocked = &mut Unlocked::at_exception();
    el2::init_cpu(number, monitor, false, unlocked);
    if let Err(error) = el2::start_pmu(monitor, unlocked) {
        say!("error: CPU {number}: {error}");
        end::power_off();
    }
    enter(block.entry, block.context)
}

/// Starts CPU `number`, on behalf of the guest, and returns PSCI's answer.
pub(crate) fn start_cpu(
    number: usize,
    monitor: &Monitor,
    entry: u64,
    context: u64,
) -> Result<(), Error> {
    let cpu = &cpus()[number];
    // Sequentially consistent: who looks for CPUs to call finds this one, or it finds what they would read.
    if cpu.on.swap(true, SeqCst) {
        return Err(Error::AlreadyOn);
    }
    let filled = StartBlock {
        stack: cpu.stack_top,
        translation: monitor.translation,
        number: number as u64,
        entry,
        context,
    };
    // Nobody writes it again until the CPU is off.
    let at = cpu.block.with(|block| {
        *block = filled;
        &raw const *block as u64
    });
    mmu::clean_to_memory(at..at + size_of::<StartBlock>() as u64);
    let target = monitor.machine.cpus[number];
    let started = cpu_on::<Smc>(target, start_secondary as *const () as u64, at);
    if started.is_err() {
        cpu.on.store(false, Relaxed);
    }
    started
}

/// Enters the guest on this CPU for the first time.
pub(crate) fn enter(entry: u64, x0: u64) -> ! {
    let cpu = Cpu::this();
    cpu.on.store(true, Relaxed);
    // SAFETY: where and how the guest starts; stage 2 limits what it can reach.
    unsafe {
        write_sysreg!("elr_el2", entry);
        write_sysreg!("spsr_el2", SPSR_EL1H_MASKED);
    }
    isb();
    enter_guest(x0, cpu.stack_top)
}
