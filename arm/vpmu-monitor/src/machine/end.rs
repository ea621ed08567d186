//! The guest's end, and what is said then: why, and the statistics.

use core::fmt;

use smccc::{Smc, psci::system_off};
use vpmu_el2::PhysicalPmu;
use vpmu_monitor::{
    boot::words::Interrupts,
    world::statistics::{Json, OrNull, Snapshot},
};

use super::{
    console::{self, say},
    cpu::{self, Cpu, Monitor},
    figures::{self, MARKS, SECOND, note_instructions},
    sysreg::read_sysreg,
};

/// Ends the guest, because it cannot go on.
pub(crate) fn guest_stopped(reason: fmt::Arguments<'_>) -> ! {
    say!(
        "guest stopped: {reason} (at {:#x})",
        read_sysreg!("elr_el2")
    );
    print_statistics();
    power_off()
}

/// Prints the statistics as one line of JSON after a record separator, for the lab to parse.
pub(crate) fn print_statistics() {
    let Some(monitor) = Monitor::installed() else {
        return;
    };
    let cpu = Cpu::this();
    let Some(local) = cpu.local.peek() else {
        return;
    };
    note_instructions(cpu, &local);
    let last = figures::snapshot();
    let frequency = read_sysreg!("cntfrq_el0");

    console::print(format_args!(
        "\r\n\x1e{{\"vpmu-monitor\":{{\"design\":\"{}\",\"interrupts\":\"{}\"",
        monitor.settings.design.name(),
        monitor.settings.interrupts.name()
    ));
    let mut counts_instructions = false;
    if let Some(pmu) = &local.pmu {
        counts_instructions = pmu.own_instructions(&mut PhysicalPmu).is_some();
        console::print(format_args!(
            ",{},\"counters_lost\":{}",
            pmu.describe(),
            last.lost()
        ));
    }
    let measured = MARKS.with(|marks| {
        let begin = marks.begin.as_ref()?;
        Some(marks.end.as_ref().unwrap_or(&last).since(begin))
    });
    let total = MARKS.with(|marks| last.since(&marks.entered));
    let second = Snapshot::take(core::iter::once(&SECOND), last.now);
    let json = |figures| Json {
        figures,
        frequency,
        counts_instructions,
        sees_pmis: monitor.settings.interrupts == Interrupts::Virtual,
    };
    console::print(format_args!(
        ",\"measured\":{},\"total\":{}",
        OrNull(measured.as_ref().map(json)),
        json(&total)
    ));
    if monitor.shared.is_some() {
        console::print(format_args!(",\"second\":{}", json(&second)));
    }
    console::print(format_args!("}}}}\r\n"));
    drop(local);
    for (number, cpu) in cpu::cpus().iter().enumerate() {
        // Whoever holds the lock has not come back from an exit: the machine is broken, and its other CPUs' samples go out.
        if let Some(local) = cpu.local.peek()
            && let Some(profile) = &local.profile
        {
            let vectors = read_sysreg!("vbar_el1");
            let records = profile.records(number, figures::measurement(), vectors);
            console::print(format_args!("{records}"));
        }
    }
}

/// Switches the machine off.
pub(crate) fn power_off() -> ! {
    let _ = system_off::<Smc>();
    loop {
        core::hint::spin_loop();
    }
}

/// Called by `entry.s` for an exception at EL2 itself: a fault of the monitor's own.
#[unsafe(no_mangle)]
extern "C" fn own_fault(vector: u64, esr: u64, elr: u64, far: u64) -> ! {
    if let Some(number) = (cpu::cpus().iter()).position(|cpu| cpu.is_below_stack(far)) {
        say!("error: the monitor's stack on CPU {number} is too small (ELR {elr:#x}): a bug");
        power_off()
    }
    say!(
        "error: an exception in the monitor itself (vector {vector}, ESR {esr:#x}, ELR {elr:#x}, FAR {far:#x})"
    );
    power_off()
}
