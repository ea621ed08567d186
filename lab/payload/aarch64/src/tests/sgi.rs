//! The interrupt controller around the PMU: SGIs, the timer's PPI and an SPI,
//! with more of them pending than a monitor has list registers.

use super::{ANSWERS, ASK, Context, Test};
use crate::gic::{self, PRIORITY};
use crate::loops::{interruptible, spin, wait_for_interrupt};
use crate::percpu;
use vpmu_payload_harness::{Deviation, Pass, Verdict, check, check_or};

pub(super) const TESTS: &[Test] = &[
    ("gic.sgi_to_self", sgi_to_self),
    ("gic.sgi_many", many),
    ("gic.sgi_many_again", many_again),
    ("gic.sgi_priority", by_priority),
    ("gic.sgi_disabled", disabled),
    ("gic.sgi_disabled_while_pending", disabled_while_pending),
    ("gic.sgi_cleared_while_pending", cleared_while_pending),
    ("gic.sgi_twice_while_masked", twice_while_masked),
    ("gic.priority_mask", priority_mask),
    ("gic.ppi_by_software", ppi_by_software),
    ("gic.spi_by_software", spi_by_software),
    ("gic.spi_many", spi_many),
    ("gic.timer", timer),
    ("gic.timer_wakes_wfi", timer_wakes_wfi),
    ("gic.split_end", split_end),
];

/// Tests for CPUs other than the boot CPU.
pub(super) const ANSWERED: &[Test] = &[("gic.sgi_from_other", from_other)];

/// As for the PMU's interrupt: a hypervisor has already taken the interrupt on
/// the guest's behalf.
const TAKEN_ON_BEHALF: Deviation =
    Deviation("the interrupt, taken back while it waited, still comes once");

/// SPIs that no device of the `virt` machine uses.
const FREE_SPIS: core::ops::Range<u32> = 100..112;
/// A PPI that no device uses.
const FREE_PPI: u32 = 18;

fn sgi_to_self(cx: &Context) -> Verdict {
    for intid in 0..16 {
        percpu::this().reset();
        cx.gic.enable(intid);
        gic::send(intid, gic::affinity());
        interruptible(|| spin(1_000));
        check(format_args!("SGI {intid}"), percpu::this().taken(intid), 1)?;
        check(
            format_args!("any with SGI {intid}"),
            percpu::this().taken_any(),
            1,
        )?;
        check(
            format_args!("SGI {intid} active"),
            cx.gic.is_active(intid).into(),
            0,
        )?;
    }
    // SGIs for other CPUs do not come here.
    percpu::this().reset();
    gic::send_to_others(1);
    interruptible(|| spin(1_000));
    check("sent to others", percpu::this().taken_any(), 0)?;
    Ok(Pass::Ok)
}

/// Checks all sixteen SGIs, pending at once.
pub(super) fn many(cx: &Context) -> Verdict {
    for intid in 0..16 {
        cx.gic.enable(intid);
    }
    for intid in 0..16 {
        gic::send(intid, gic::affinity());
    }
    spin(1_000);
    check("taken while masked", percpu::this().taken_any(), 0)?;
    interruptible(|| spin(100_000));
    for intid in 0..16 {
        check(format_args!("SGI {intid}"), percpu::this().taken(intid), 1)?;
    }
    check("any", percpu::this().taken_any(), 16)?;
    check("waits after", gic::interrupt_waits().into(), 0)?;
    Ok(Pass::Ok)
}

fn many_again(cx: &Context) -> Verdict {
    for _ in 0..20 {
        percpu::this().reset();
        many(cx)?;
    }
    Ok(Pass::Ok)
}

/// Checks that the most urgent SGI comes first, in whatever order they were
/// sent.
fn by_priority(cx: &Context) -> Verdict {
    for intid in 0..16 {
        cx.gic.enable(intid);
        // 15 is the most urgent.
        cx.gic.set_priority(intid, 0xf0 - (intid as u8) * 8);
    }
    for intid in 0..16 {
        gic::send(intid, gic::affinity());
    }
    spin(1_000);
    check("next", gic::next_interrupt(), 15)?;
    interruptible(|| spin(100_000));
    check("any", percpu::this().taken_any(), 16)?;
    for index in 0..16 {
        let got = percpu::this().logged(index).unwrap_or(1023);
        check(
            format_args!("taken as number {index}"),
            got.into(),
            15 - index as u64,
        )?;
    }
    Ok(Pass::Ok)
}

/// Checks that a disabled SGI waits until it is enabled.
fn disabled(cx: &Context) -> Verdict {
    cx.gic.disable(5);
    gic::send(5, gic::affinity());
    interruptible(|| spin(1_000));
    check("while disabled", percpu::this().taken_any(), 0)?;
    check("pending", cx.gic.is_pending(5).into(), 1)?;
    cx.gic.enable(5);
    interruptible(|| spin(1_000));
    check("enabled", percpu::this().taken(5), 1)?;
    Ok(Pass::Ok)
}

fn disabled_while_pending(cx: &Context) -> Verdict {
    cx.gic.enable(5);
    gic::send(5, gic::affinity());
    spin(1_000);
    cx.gic.disable(5);
    interruptible(|| spin(1_000));
    let first = check_or(
        "while disabled",
        percpu::this().taken_any(),
        0,
        (1, TAKEN_ON_BEHALF),
    )?;
    cx.gic.enable(5);
    interruptible(|| spin(1_000));
    check("enabled", percpu::this().taken(5), 1)?;
    Ok(first)
}

fn cleared_while_pending(cx: &Context) -> Verdict {
    cx.gic.enable(5);
    gic::send(5, gic::affinity());
    spin(1_000);
    cx.gic.clear_pending(5);
    interruptible(|| spin(1_000));
    check_or(
        "cleared",
        percpu::this().taken_any(),
        0,
        (1, TAKEN_ON_BEHALF),
    )
}

/// Checks that an SGI sent twice before it is taken comes once: pending is one
/// bit.
fn twice_while_masked(cx: &Context) -> Verdict {
    cx.gic.enable(3);
    gic::send(3, gic::affinity());
    spin(1_000);
    gic::send(3, gic::affinity());
    spin(1_000);
    interruptible(|| spin(10_000));
    check_or(
        "SGI 3",
        percpu::this().taken(3),
        1,
        (
            2,
            Deviation("the first, already taken on the guest's behalf, and the second both come"),
        ),
    )
}

/// Checks that ICC_PMR_EL1 holds back interrupts that are not urgent enough.
fn priority_mask(cx: &Context) -> Verdict {
    cx.gic.enable(6);
    gic::set_priority_mask(PRIORITY);
    gic::send(6, gic::affinity());
    interruptible(|| spin(1_000));
    check("masked", percpu::this().taken_any(), 0)?;
    gic::set_priority_mask(0xff);
    interruptible(|| spin(1_000));
    check("unmasked", percpu::this().taken(6), 1)?;
    Ok(Pass::Ok)
}

fn ppi_by_software(cx: &Context) -> Verdict {
    cx.gic.enable(FREE_PPI);
    cx.gic.set_pending(FREE_PPI);
    interruptible(|| spin(1_000));
    cx.gic.clear_pending(FREE_PPI);
    check("PPI", percpu::this().taken(FREE_PPI), 1)?;
    check("active", cx.gic.is_active(FREE_PPI).into(), 0)?;
    Ok(Pass::Ok)
}

fn spi_by_software(cx: &Context) -> Verdict {
    let spi = FREE_SPIS.start;
    cx.gic.route_here(spi);
    cx.gic.enable(spi);
    for count in 1..=3 {
        cx.gic.set_pending(spi);
        interruptible(|| spin(1_000));
        check("SPI", percpu::this().taken(spi), count)?;
        check("active", cx.gic.is_active(spi).into(), 0)?;
    }
    cx.gic.disable(spi);
    Ok(Pass::Ok)
}

/// Checks SPIs, SGIs and a PPI, all pending.
fn spi_many(cx: &Context) -> Verdict {
    for spi in FREE_SPIS {
        cx.gic.route_here(spi);
        cx.gic.enable(spi);
        cx.gic.set_pending(spi);
    }
    for intid in 0..8 {
        cx.gic.enable(intid);
        gic::send(intid, gic::affinity());
    }
    cx.gic.enable(FREE_PPI);
    cx.gic.set_pending(FREE_PPI);
    spin(1_000);
    interruptible(|| spin(100_000));
    cx.gic.clear_pending(FREE_PPI);
    for intid in (0..8).chain(FREE_SPIS).chain([FREE_PPI]) {
        check(
            format_args!("interrupt {intid}"),
            percpu::this().taken(intid),
            1,
        )?;
    }
    for spi in FREE_SPIS {
        cx.gic.disable(spi);
    }
    Ok(Pass::Ok)
}

fn timer(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.timer);
    for count in 1..=5 {
        gic::start_timer(gic::timer_frequency() / 10_000);
        interruptible(|| spin(1_000_000));
        check("interrupts", percpu::this().taken(cx.machine.timer), count)?;
    }
    Ok(Pass::Ok)
}

fn timer_wakes_wfi(cx: &Context) -> Verdict {
    cx.gic.enable(cx.machine.timer);
    for count in 1..=5 {
        gic::start_timer(gic::timer_frequency() / 1_000);
        gic::wait_for_timer();
        interruptible(|| spin(1_000));
        check("interrupts", percpu::this().taken(cx.machine.timer), count)?;
    }
    Ok(Pass::Ok)
}

fn split_end(cx: &Context) -> Verdict {
    gic::set_split_end(true);
    let verdict = many(cx);
    gic::set_split_end(false);
    verdict
}

/// Asks the boot CPU for SGIs, which come while this CPU is halted. They are
/// sent to this CPU first, then to all others.
fn from_other(cx: &Context) -> Verdict {
    for intid in 0..ANSWERS {
        cx.gic.enable(intid);
    }
    // If they do not come, the timer wakes this CPU.
    cx.gic.enable(cx.machine.timer);
    let cpu = percpu::this();
    for round in 1..=2 {
        gic::start_timer(gic::timer_frequency());
        gic::send(ASK, cx.machine.cpus[0]);
        while cpu.taken(cx.machine.timer) == 0 && (0..ANSWERS).any(|intid| cpu.taken(intid) < round)
        {
            wait_for_interrupt();
            interruptible(|| spin(10));
        }
        gic::stop_timer();
        for intid in 0..ANSWERS {
            check(format_args!("SGI {intid}"), cpu.taken(intid), round)?;
        }
    }
    Ok(Pass::Ok)
}
