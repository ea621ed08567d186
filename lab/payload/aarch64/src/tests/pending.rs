//! Interrupts that stay pending for long: more of them than any processor has list registers, and some that a CPU
//! leaves behind when it goes off. Whoever takes them on the guest's behalf must lose none.

use core::ops::Range;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::interrupt::TAKEN_ON_BEHALF;
use super::{Context, Test};
use crate::gic::{self, Gic, PRIORITY};
use crate::loops::{interruptible, spin};
use crate::machine::Machine;
use crate::{entry, percpu, psci, uart};
use vpmu_payload_harness::{Pass, Verdict, check, check_or};

pub(super) const TESTS: &[Test] = &[
    ("pending.spi_60", |cx| many(cx, 60)),
    ("pending.spi_90", |cx| many(cx, 90)),
    ("pending.spi_90_again", |cx| {
        many(cx, 90)?;
        many(cx, 90)
    }),
    ("pending.spi_90_by_priority", by_priority),
    ("pending.most_urgent_priority", most_urgent),
    ("pending.urgent_when_full", urgent_when_full),
    ("pending.device", device),
];

/// Checks the interrupt of a device: a level, which comes for each byte that the UART has sent.
fn device(cx: &Context) -> Verdict {
    let Some(intid) = cx.machine.uart_interrupt else {
        return Ok(Pass::Skip("the UART has no interrupt"));
    };
    percpu::this().set_uart_interrupt(intid);
    cx.gic.route_here(intid);
    cx.gic.follow_level(intid);
    uart::interrupt_when_sent(true);
    cx.gic.enable(intid);
    for count in 1..=3 {
        uart::print(format_args!("\r"));
        check("taken while masked", percpu::this().taken_any(), count - 1)?;
        interruptible(|| spin(10_000));
        check("taken", percpu::this().taken(intid), count)?;
        check("any", percpu::this().taken_any(), count)?;
        check("active", cx.gic.is_active(intid).into(), 0)?;
    }
    // What goes away while it is not enabled.
    cx.gic.disable(intid);
    uart::print(format_args!("\r"));
    uart::interrupt_when_sent(false);
    cx.gic.enable(intid);
    interruptible(|| spin(10_000));
    let taken = percpu::this().taken_any();
    let pass = check_or("gone", taken, 3, (4, TAKEN_ON_BEHALF));
    cx.gic.disable(intid);
    pass
}

/// Tests for the boot CPU, which starts another.
pub(super) const BOOT_CPU: &[Test] = &[("pending.cpu_off", left_behind)];

/// SPIs that no device of the `virt` machine uses. They are those of its platform bus, and beyond.
const FREE_SPIS: Range<u32> = 160..250;
/// SPIs that the other CPU takes before it goes off; more than it has list registers.
const LEFT: Range<u32> = 160..168;
/// Number of times that each comes afterwards.
const TIMES: u64 = 2_000 / 8;

/// Whether the CPU that starts next takes [`LEFT`] and goes off.
static LEAVES: AtomicBool = AtomicBool::new(false);

fn free(count: u32) -> Range<u32> {
    FREE_SPIS.start..FREE_SPIS.start + count
}

/// Makes all of `spis` pending here, with interrupts masked.
fn pend(gic: &Gic, spis: Range<u32>, priority: impl Fn(u32) -> u8) {
    for spi in spis {
        gic.route_here(spi);
        gic.set_priority(spi, priority(spi));
        gic.enable(spi);
        gic.set_pending(spi);
    }
    spin(1_000);
}

fn quiet(gic: &Gic, spis: Range<u32>) {
    for spi in spis {
        gic.disable(spi);
    }
}

fn many(cx: &Context, count: u32) -> Verdict {
    percpu::this().reset();
    pend(&cx.gic, free(count), |_| PRIORITY);
    check("taken while masked", percpu::this().taken_any(), 0)?;
    interruptible(|| spin(200_000));
    check(
        format_args!("arrived of {count}"),
        percpu::this().taken_any(),
        count.into(),
    )?;
    for spi in free(count) {
        check(format_args!("SPI {spi}"), percpu::this().taken(spi), 1)?;
        check("active", cx.gic.is_active(spi).into(), 0)?;
    }
    quiet(&cx.gic, free(count));
    // The CPU still takes interrupts.
    cx.gic.enable(1);
    gic::send(1, gic::affinity());
    interruptible(|| spin(1_000));
    check("SGI after", percpu::this().taken(1), 1)?;
    Ok(Pass::Ok)
}

/// Checks that eight priorities come with the most urgent first, when they were sent in another order.
fn by_priority(cx: &Context) -> Verdict {
    let priority = |spi: u32| 0x20 + (spi * 5 % 8) as u8 * 0x10;
    pend(&cx.gic, FREE_SPIS, priority);
    interruptible(|| spin(200_000));
    let count = FREE_SPIS.len();
    check("arrived", percpu::this().taken_any(), count as u64)?;
    let mut last = 0;
    for index in 0..count {
        let spi = percpu::this().logged(index).unwrap_or(1023);
        let this = priority(spi);
        if this < last {
            check(
                format_args!("priority of number {index}, SPI {spi}, after {last:#x}"),
                this.into(),
                last.into(),
            )?;
        }
        last = this;
    }
    quiet(&cx.gic, FREE_SPIS);
    Ok(Pass::Ok)
}

/// Checks that the guest may use priority 0.
fn most_urgent(cx: &Context) -> Verdict {
    pend(&cx.gic, free(20), |_| 0);
    interruptible(|| spin(200_000));
    for spi in free(20) {
        check(format_args!("SPI {spi}"), percpu::this().taken(spi), 1)?;
    }
    quiet(&cx.gic, free(20));
    Ok(Pass::Ok)
}

/// Checks that an interrupt that is more urgent than all waiting ones is taken next.
fn urgent_when_full(cx: &Context) -> Verdict {
    pend(&cx.gic, free(20), |_| PRIORITY);
    cx.gic.enable(2);
    cx.gic.set_priority(2, 0x40);
    gic::send(2, gic::affinity());
    spin(1_000);
    check("next", gic::next_interrupt(), 2)?;
    interruptible(|| spin(200_000));
    check("arrived", percpu::this().taken_any(), 21)?;
    quiet(&cx.gic, free(20));
    Ok(Pass::Ok)
}

/// Checks that interrupts that another CPU took masked, before it went off, come here once they are routed here.
fn left_behind(cx: &Context) -> Verdict {
    if cx.machine.cpu_count < 2 {
        return Ok(Pass::Skip("one CPU"));
    }
    let other = cx.machine.cpus[1];
    LEAVES.store(true, Relaxed);
    let answer = psci::cpu_on(other, entry::secondary_address(), 1);
    check("CPU_ON", answer as u64, 0)?;
    const OFF: i64 = 1;
    // First the CPU must be on: it clears the flag.
    for _ in 0..10_000 {
        if !LEAVES.load(Relaxed) && psci::affinity_info(other) == OFF {
            break;
        }
        spin(10_000);
    }
    check(
        "AFFINITY_INFO",
        psci::affinity_info(other) as u64,
        OFF as u64,
    )?;
    for spi in LEFT {
        cx.gic.route_here(spi);
    }
    interruptible(|| spin(10_000));
    for spi in LEFT {
        check(
            format_args!("SPI {spi}, left pending"),
            percpu::this().taken(spi),
            1,
        )?;
    }
    let mut arrived = 0;
    for _ in 0..TIMES {
        percpu::this().reset();
        for spi in LEFT {
            cx.gic.set_pending(spi);
        }
        interruptible(|| spin(1_000));
        arrived += percpu::this().taken_any();
    }
    check("arrived afterwards", arrived, TIMES * LEFT.len() as u64)?;
    quiet(&cx.gic, LEFT);
    Ok(Pass::Ok)
}

/// Takes interrupts masked and goes off, if the started CPU is asked for that instead of running tests.
pub(super) fn leave_behind(machine: &Machine<'_>) -> bool {
    if !LEAVES.load(Relaxed) {
        return false;
    }
    let gic = Gic::for_this_cpu(machine);
    pend(&gic, LEFT, |_| PRIORITY);
    while !gic::interrupt_waits() {}
    LEAVES.store(false, Relaxed);
    true
}
