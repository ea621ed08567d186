//! Overflow bits, without interrupts. SDM vol. 3B, 20.2.2 and 20.2.4.

use super::{Context, Test};
use crate::fault::Fault;
use crate::instructions::wrmsr;
use crate::msr::*;
use crate::percpu;
use crate::pmu::{COUNT, Counter, INT, SOME, pass, read, wait, write};
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("overflow.every_counter", every_counter),
    ("overflow.at_minus_one", at_minus_one),
    ("overflow.not_before", not_before),
    ("overflow.not_by_a_write", not_by_a_write),
    ("overflow.legacy_period", legacy_period),
    ("overflow.goes_on", goes_on),
    ("overflow.ovf_ctrl", ovf_ctrl),
    ("overflow.again", again),
    ("overflow.status_set", status_set),
];

/// Waits until `counter` has overflowed.
fn overflowed(counter: Counter) -> Result<(), Failure> {
    wait(|| {
        let status = crate::instructions::rdmsr(GLOBAL_STATUS)?;
        Ok(status & counter.bit() != 0)
    })
}

/// Checks that each counter has its own bit, with and without a wish for an
/// interrupt. While LVTPC is masked, nothing else happens.
fn every_counter(cx: &Context) -> Verdict {
    for bits in [COUNT, COUNT | INT] {
        for counter in cx.pmu.counting() {
            cx.pmu.configure(counter, bits)?;
            cx.pmu.set_period(counter, SOME)?;
            check(format_args!("before {counter}"), read(GLOBAL_STATUS)?, 0)?;
            cx.pmu.enable(counter.bit())?;
            overflowed(counter)?;
            cx.pmu.enable(0)?;
            let status = read(GLOBAL_STATUS)?;
            check(format_args!("after {counter}"), status, counter.bit())?;
            write(GLOBAL_OVF_CTRL, counter.bit())?;
        }
    }
    check("interrupts", percpu::this().taken_any(), 0)?;
    Ok(Pass::Ok)
}

fn at_minus_one(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.set_period(counter, 1)?;
        cx.pmu.enable(counter.bit())?;
        overflowed(counter)?;
        cx.pmu.enable(0)?;
        check_range(counter, counter.value()?, 0, 1 << 31)?;
        write(GLOBAL_OVF_CTRL, counter.bit())?;
    }
    Ok(Pass::Ok)
}

/// Checks that a counter that has not come to its end has not overflowed: not
/// at 32 bits, nor on its way.
fn not_before(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        for value in [0, 0xffff_ffff, 0x7fff_ffff] {
            cx.pmu.configure(counter, COUNT)?;
            cx.pmu.set(counter, value)?;
            cx.pmu.enable(counter.bit())?;
            wait(|| Ok(counter.value()? >= value + SOME))?;
            cx.pmu.enable(0)?;
            check(counter, read(GLOBAL_STATUS)?, 0)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that software writes are no events.
fn not_by_a_write(cx: &Context) -> Verdict {
    for counter in cx.pmu.counters() {
        cx.pmu.set(counter, cx.pmu.mask(counter))?;
        cx.pmu.set(counter, 0)?;
    }
    check("GLOBAL_STATUS", read(GLOBAL_STATUS)?, 0)?;
    check(
        "write of GLOBAL_STATUS is #GP",
        (wrmsr(GLOBAL_STATUS, 1) == Err(Fault::GP)).into(),
        1,
    )?;
    Ok(Pass::Ok)
}

/// Checks a period of -period in 32 bits, as kernels without full-width writes
/// set it.
fn legacy_period(cx: &Context) -> Verdict {
    for counter in cx.pmu.general() {
        cx.pmu.configure(counter, COUNT)?;
        write(counter.address(), SOME.wrapping_neg() & 0xffff_ffff)?;
        cx.pmu.enable(counter.bit())?;
        overflowed(counter)?;
        cx.pmu.enable(0)?;
        write(GLOBAL_OVF_CTRL, counter.bit())?;
    }
    Ok(Pass::Ok)
}

/// Checks that counting does not end with an overflow.
fn goes_on(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT | INT)?;
        cx.pmu.set_period(counter, SOME)?;
        cx.pmu.enable(counter.bit())?;
        overflowed(counter)?;
        let value = counter.value()?;
        wait(|| Ok(counter.value()? >= value + SOME))?;
        cx.pmu.enable(0)?;
        write(GLOBAL_OVF_CTRL, counter.bit())?;
    }
    Ok(Pass::Ok)
}

/// Checks that IA32_PERF_GLOBAL_OVF_CTRL clears the bits that are written, and
/// no others.
fn ovf_ctrl(cx: &Context) -> Verdict {
    let mut all = 0;
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.set_period(counter, SOME)?;
        all |= counter.bit();
    }
    cx.pmu.enable(all)?;
    for counter in cx.pmu.counting() {
        overflowed(counter)?;
    }
    cx.pmu.enable(0)?;
    check("all", read(GLOBAL_STATUS)?, all)?;
    write(GLOBAL_OVF_CTRL, 0)?;
    check("after 0", read(GLOBAL_STATUS)?, all)?;
    for counter in cx.pmu.counting() {
        all &= !counter.bit();
        write(GLOBAL_OVF_CTRL, counter.bit())?;
        check(format_args!("without {counter}"), read(GLOBAL_STATUS)?, all)?;
    }
    Ok(Pass::Ok)
}

/// Checks that a counter whose bit has been cleared sets the bit again, and not
/// before the counter overflows again.
fn again(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT | INT)?;
        for _ in 0..3 {
            cx.pmu.set_period(counter, SOME)?;
            check(format_args!("{counter} before"), read(GLOBAL_STATUS)?, 0)?;
            cx.pmu.enable(counter.bit())?;
            overflowed(counter)?;
            // The counter is far from its end now.
            check_range(counter, counter.value()?, 0, 1 << 31)?;
            write(GLOBAL_OVF_CTRL, counter.bit())?;
            pass(SOME);
            check(format_args!("{counter} after"), read(GLOBAL_STATUS)?, 0)?;
            cx.pmu.enable(0)?;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that IA32_PERF_GLOBAL_STATUS_SET sets bits (SDM vol. 3B, 20.2.4.2), and that
/// CTR_FRZ stops all counters whoever sets it.
fn status_set(cx: &Context) -> Verdict {
    if cx.pmu.0.version < 4 {
        return Ok(Pass::Skip(
            "no IA32_PERF_GLOBAL_STATUS_SET before version 4",
        ));
    }
    for counter in cx.pmu.counters() {
        write(GLOBAL_STATUS_SET, counter.bit())?;
        check(counter, read(GLOBAL_STATUS)?, counter.bit())?;
        write(GLOBAL_OVF_CTRL, counter.bit())?;
        check(counter, read(GLOBAL_STATUS)?, 0)?;
    }
    let counter = Counter::General(0);
    cx.pmu.configure(counter, COUNT)?;
    cx.pmu.enable(counter.bit())?;
    write(GLOBAL_STATUS_SET, CTR_FRZ)?;
    let frozen = counter.value()?;
    pass(SOME);
    check(format_args!("{counter} stands"), counter.value()?, frozen)?;
    check("status", read(GLOBAL_STATUS)?, CTR_FRZ)?;
    write(GLOBAL_OVF_CTRL, CTR_FRZ)?;
    wait(|| Ok(counter.value()? >= frozen + SOME))?;
    Ok(Pass::Ok)
}
