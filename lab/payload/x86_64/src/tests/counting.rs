//! Counters count the events that they are set to, and nothing when they
//! are off. SDM vol. 3B, 20.2.1 (event selects), 20.2.2 (fixed counters and the
//! global enables).

use super::{Context, Test};
use crate::instructions::tsc;
use crate::msr::*;
use crate::pmu::{COUNT, CYCLES, Counter, EN, EVENTS, OS, SOME, USR, pass, read, wait, write};
use crate::user;
use vpmu_payload_harness::{Failure, Pass, Verdict, check, check_range};

pub(super) const TESTS: &[Test] = &[
    ("count.every_counter", every_counter),
    ("count.all_at_once", all_at_once),
    ("count.not_offered", not_offered),
    ("count.events", events),
    ("count.no_faster_than_time", no_faster_than_time),
    ("count.monotonic", monotonic),
    ("count.goes_on_from_a_write", from_a_write),
    ("count.wraps", wraps),
    ("stop.en", stop_en),
    ("stop.fixed_ctr_ctrl", stop_fixed),
    ("stop.global_ctrl", stop_global),
    ("stop.rewritten_while_it_counts", rewritten),
    ("ring.none", ring_none),
    ("ring.usr_in_ring_0", usr_in_ring_0),
    ("ring.os_in_ring_0", os_in_ring_0),
    ("ring.usr_in_ring_3", usr_in_ring_3),
    ("ring.os_in_ring_3", os_in_ring_3),
    ("ring.both_in_ring_3", both_in_ring_3),
];

/// Cycles, enough for any counter to notice.
const A_WHILE: u64 = 200_000;
/// Rounds in ring 3 that take several times as long: where the host counts with a clock, samples tell the rings apart,
/// some 50 microseconds from each other.
const RING_3_ROUNDS: u64 = 500_000;

/// Checks each counter by itself. Meanwhile no other counts.
fn every_counter(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        for other in cx.pmu.counters() {
            cx.pmu.configure(other, COUNT)?;
            cx.pmu.set(other, 0)?;
        }
        cx.pmu.count_some(counter)?;
        for other in cx.pmu.counters().filter(|&other| other != counter) {
            check(format_args!("{other} beside {counter}"), other.value()?, 0)?;
        }
    }
    Ok(Pass::Ok)
}

fn all_at_once(cx: &Context) -> Verdict {
    for counter in cx.pmu.counters() {
        cx.pmu.configure(counter, COUNT)?;
    }
    cx.pmu.enable(cx.pmu.0.counters())?;
    for counter in cx.pmu.counting() {
        wait(|| Ok(counter.value()? >= SOME))?;
    }
    cx.pmu.enable(0)?;
    check("GLOBAL_STATUS", read(GLOBAL_STATUS)?, 0)?;
    Ok(Pass::Ok)
}

/// Checks that counters whose event CPUID does not offer are registers, and
/// count nothing.
fn not_offered(cx: &Context) -> Verdict {
    let mut skip = Pass::Skip("every event is offered");
    for (n, (name, event)) in EVENTS.into_iter().enumerate() {
        if !cx.pmu.offers(n) {
            skip = Pass::Ok;
            write(PERFEVTSEL, event | COUNT)?;
            cx.pmu.enable(1)?;
            pass(A_WHILE);
            check(
                format_args!("PMC0, {name}"),
                Counter::General(0).value()?,
                0,
            )?;
            cx.pmu.enable(0)?;
        }
    }
    for counter in cx.pmu.counters().filter(|&counter| !cx.pmu.counts(counter)) {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.enable(counter.bit())?;
        pass(A_WHILE);
        check(counter, counter.value()?, 0)?;
        cx.pmu.enable(0)?;
    }
    Ok(skip)
}

/// Checks that the last general counter counts every event that is offered.
/// Caches and branch predictors may count nothing.
fn events(cx: &Context) -> Verdict {
    let n = cx.pmu.0.general - 1;
    for (index, (name, event)) in EVENTS.into_iter().enumerate() {
        if !cx.pmu.offers(index) || matches!(index, 3 | 4 | 6) {
            continue;
        }
        write(PERFEVTSEL + n, event | COUNT)?;
        write(PMC + n, 0)?;
        let value = cx.pmu.count_some(Counter::General(n))?;
        check_range(name, value, SOME, u64::MAX)?;
    }
    Ok(Pass::Ok)
}

/// Checks that there are no more reference cycles than cycles of the time-stamp
/// counter, because they are the same. A hypervisor knows its frequency by one
/// part in 50.
fn no_faster_than_time(cx: &Context) -> Verdict {
    let counter = Counter::Fixed(2);
    if cx.pmu.0.fixed >> 2 & 1 == 0 || !cx.pmu.counts(counter) {
        return Ok(Pass::Skip("no fixed counter of reference cycles"));
    }
    cx.pmu.configure(counter, COUNT)?;
    let begin = tsc();
    cx.pmu.enable(counter.bit())?;
    pass(10 * A_WHILE);
    cx.pmu.enable(0)?;
    let elapsed = tsc() - begin;
    let most = elapsed + elapsed / 50;
    check_range(counter, counter.value()?, SOME, most)?;
    Ok(Pass::Ok)
}

/// Checks that a counter that runs never goes back, whichever way it is read.
fn monotonic(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
    }
    cx.pmu.enable(cx.pmu.0.counters())?;
    for counter in cx.pmu.counting() {
        let mut last = 0;
        for _ in 0..50 {
            let value = counter.value()?;
            check_range(counter, value, last, u64::MAX)?;
            last = value;
        }
    }
    Ok(Pass::Ok)
}

/// Checks that a running counter goes on from a written value.
fn from_a_write(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.enable(counter.bit())?;
        for value in [0x1_0000_0000, 0x4000_0000, 0] {
            cx.pmu.set(counter, value)?;
            wait(|| Ok(counter.value()? >= value + SOME))?;
            let got = counter.value()?;
            check_range(counter, got, value, value + (1 << 30))?;
        }
        cx.pmu.enable(0)?;
    }
    Ok(Pass::Ok)
}

/// Checks that a counter has its width, and goes on from 0.
fn wraps(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, COUNT)?;
        cx.pmu.set_period(counter, SOME)?;
        cx.pmu.enable(counter.bit())?;
        wait(|| Ok(counter.value()? < cx.pmu.mask(counter) / 2))?;
        cx.pmu.enable(0)?;
        check_range(counter, counter.value()?, 0, 1 << 31)?;
    }
    Ok(Pass::Ok)
}

/// Runs `counter`, lets `stop` stop it, and checks that it stands still.
fn stops(
    cx: &Context,
    counter: Counter,
    stop: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    cx.pmu.configure(counter, COUNT)?;
    cx.pmu.enable(counter.bit())?;
    wait(|| Ok(counter.value()? >= SOME))?;
    stop()?;
    let stopped = counter.value()?;
    pass(A_WHILE);
    check(format_args!("{counter} stands"), counter.value()?, stopped)
}

fn stop_en(cx: &Context) -> Verdict {
    for n in 0..cx.pmu.0.general {
        stops(cx, Counter::General(n), || {
            write(PERFEVTSEL + n, CYCLES | COUNT & !EN)
        })?;
    }
    Ok(Pass::Ok)
}

fn stop_fixed(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        if matches!(counter, Counter::Fixed(_)) {
            stops(cx, counter, || write(FIXED_CTR_CTRL, 0))?;
        }
    }
    Ok(Pass::Ok)
}

fn stop_global(cx: &Context) -> Verdict {
    for counter in cx.pmu.counting() {
        stops(cx, counter, || {
            write(GLOBAL_CTRL, cx.pmu.0.counters() & !counter.bit())
        })?;
    }
    Ok(Pass::Ok)
}

/// Checks that writing the same event select again changes nothing, and that
/// another one does not touch the value.
fn rewritten(cx: &Context) -> Verdict {
    let counter = Counter::General(0);
    cx.pmu.configure(counter, COUNT)?;
    cx.pmu.enable(1)?;
    wait(|| Ok(counter.value()? >= SOME))?;
    let before = counter.value()?;
    cx.pmu.configure(counter, COUNT)?;
    wait(|| Ok(counter.value()? >= before + SOME))?;
    let before = counter.value()?;
    // No processor has event 0.
    write(PERFEVTSEL, COUNT)?;
    check_range(counter, counter.value()?, before, u64::MAX)?;
    cx.pmu.configure(counter, COUNT)?;
    wait(|| Ok(counter.value()? >= before + SOME))?;
    Ok(Pass::Ok)
}

/// Returns the sum that all counting counters have counted in ring 0 with these
/// bits of their event selects.
fn counted_in_ring_0(cx: &Context, rings: u64) -> Result<u64, Failure> {
    counted(cx, rings, || {
        pass(A_WHILE);
        Ok(())
    })
}

fn counted_in_ring_3(cx: &Context, rings: u64) -> Result<u64, Failure> {
    counted(cx, rings, || {
        user::run(user::SPIN, RING_3_ROUNDS)?;
        Ok(())
    })
}

fn counted(
    cx: &Context,
    rings: u64,
    during: impl FnOnce() -> Result<(), Failure>,
) -> Result<u64, Failure> {
    for counter in cx.pmu.counting() {
        cx.pmu.configure(counter, EN | rings)?;
    }
    cx.pmu.enable(cx.pmu.0.counters())?;
    during()?;
    cx.pmu.enable(0)?;
    let mut least = u64::MAX;
    for counter in cx.pmu.counting() {
        least = least.min(counter.value()?);
    }
    Ok(least)
}

fn ring_none(cx: &Context) -> Verdict {
    check("ring 0", counted_in_ring_0(cx, 0)?, 0)?;
    check("ring 3", counted_in_ring_3(cx, 0)?, 0)?;
    Ok(Pass::Ok)
}

fn usr_in_ring_0(cx: &Context) -> Verdict {
    check("cycles", counted_in_ring_0(cx, USR)?, 0)?;
    Ok(Pass::Ok)
}

fn os_in_ring_0(cx: &Context) -> Verdict {
    let some = u64::from(counted_in_ring_0(cx, OS)? > 0);
    check("counted", some, 1)?;
    Ok(Pass::Ok)
}

fn usr_in_ring_3(cx: &Context) -> Verdict {
    let some = u64::from(counted_in_ring_3(cx, USR)? > 0);
    check("counted", some, 1)?;
    Ok(Pass::Ok)
}

/// Checks that a counter of ring 0 does not count the rounds in ring 3, which one of ring 3 does. What the hypervisor
/// does meanwhile may be ring 0's.
fn os_in_ring_3(cx: &Context) -> Verdict {
    let [os, usr] = [Counter::General(0), Counter::General(1)];
    cx.pmu.configure(os, EN | OS)?;
    cx.pmu.configure(usr, EN | USR)?;
    cx.pmu.enable(os.bit() | usr.bit())?;
    user::run(user::SPIN, 10 * RING_3_ROUNDS)?;
    cx.pmu.enable(0)?;
    let most = usr.value()? / 2;
    check_range("cycles", os.value()?, 0, most)?;
    Ok(Pass::Ok)
}

fn both_in_ring_3(cx: &Context) -> Verdict {
    let some = u64::from(counted_in_ring_3(cx, USR | OS)? > 0);
    check("counted", some, 1)?;
    Ok(Pass::Ok)
}
