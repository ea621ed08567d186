//! Tests that a clock's perf events are a group: together or by themselves, each counts exactly while it should.
#![cfg(target_os = "linux")]

use std::num::NonZeroU64;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vpmu::counter::{Counter, CounterHost, CounterSet, Slots};
use vpmu::x86::intel::{RawPerfEvtSel, Version};
use vpmu_perf::{Backing, PerfError, PerfHost, PerfOptions};

/// Cycles, in both rings.
const CYCLES: u64 = 0x3c | 1 << 16 | 1 << 17;
/// Counters in no order: the kernel reads a group in the order of its making.
const COUNTERS: [u8; 4] = [3, 0, 5, 1];
/// A moment, ns. It is less than a kernel's tick, after which the kernel may schedule anew what should count.
const MOMENT: u64 = 300_000;

fn set(counters: &[u8]) -> CounterSet {
    let mut set = CounterSet::EMPTY;
    counters
        .iter()
        .for_each(|&counter| set.insert(nth(counter)));
    set
}

/// Returns a host, or says that this machine has no perf events and returns `None`.
fn host() -> Option<PerfHost> {
    let options = PerfOptions {
        tsc_hz: 1_000_000_000,
        backing: Some(Backing::Clock),
        ..PerfOptions::default()
    };
    let mut host = match PerfHost::new(options) {
        Ok(host) => host,
        Err(error @ (PerfError::Forbidden(_) | PerfError::NoPerf)) => {
            eprintln!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    let cycles = RawPerfEvtSel(CYCLES).config(Version::V2);
    for counter in COUNTERS {
        host.create(nth(counter), &cycles).unwrap();
    }
    Some(host)
}

/// Returns the thread's time on the CPU, ns.
fn now() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Uses the CPU for a moment. `counting` must count all of it, and no other counter anything.
fn only(host: &mut PerfHost, counting: &[u8]) {
    let totals = |host: &mut PerfHost| COUNTERS.map(|counter| host.read(nth(counter)));
    let before = totals(host);
    let start = now();
    while now() < start + MOMENT {}
    let after = totals(host);
    for (n, (before, after)) in COUNTERS.into_iter().zip(before.into_iter().zip(after)) {
        let counted = after - before;
        if counting.contains(&n) {
            assert!(counted >= MOMENT * 9 / 10, "{n} of {counting:?}: {counted}");
        } else {
            assert_eq!(counted, 0, "{n} beside {counting:?}");
        }
    }
}

/// Stops and reads `counters`, and panics unless their totals are right for each.
fn stop(host: &mut PerfHost, counters: &[u8]) {
    let mut totals = Slots::filled(0);
    assert!(host.pause_and_read(set(counters), &mut totals));
    for &counter in counters {
        assert_eq!(totals[nth(counter)], host.read(nth(counter)), "{counter}");
    }
}

#[test]
fn each_counts_while_it_is_to() {
    let Some(mut host) = host() else { return };
    only(&mut host, &[]);
    host.resume(set(&[3, 0]));
    only(&mut host, &[3, 0]);
    stop(&mut host, &[3, 0]);
    only(&mut host, &[]);
    // 3 was stopped with the group, and does not start with it.
    host.resume(set(&[0, 5]));
    only(&mut host, &[0, 5]);
    host.resume(set(&[3]));
    only(&mut host, &[0, 5, 3]);
    stop(&mut host, &[5]);
    only(&mut host, &[0, 3]);
    // A counter that stands still may be stopped with the others.
    stop(&mut host, &[0, 3, 5]);
    only(&mut host, &[]);
    host.resume(set(&[1]));
    only(&mut host, &[1]);
    stop(&mut host, &[1]);
    host.resume(set(&COUNTERS));
    only(&mut host, &COUNTERS);
    stop(&mut host, &COUNTERS);
    only(&mut host, &[]);
}

#[test]
fn a_counter_that_stood_still_overflows_after_its_own_period() {
    let Some(mut host) = host() else { return };
    host.resume(set(&[3, 0]));
    only(&mut host, &[3, 0]);
    stop(&mut host, &[3, 0]);
    only(&mut host, &[]);
    let before = host.read(nth(3));
    host.set_period(nth(3), NonZeroU64::new(4 * MOMENT));
    only(&mut host, &[]);
    host.resume(set(&[3]));
    let start = Instant::now();
    while !host.take_overflows().any(|(counter, _)| counter == nth(3)) {
        assert!(start.elapsed() < Duration::from_secs(120), "it hangs");
    }
    let counted = host.read(nth(3)) - before;
    assert!(counted >= 4 * MOMENT, "{counted}");
    // A counter that waits for an overflow is stopped, and the one that stands still is left as it is.
    stop(&mut host, &[3]);
    only(&mut host, &[]);
    host.set_period(nth(3), None);
    host.resume(set(&[0, 3]));
    only(&mut host, &[0, 3]);
    host.pause(set(&[0, 3]));
    only(&mut host, &[]);
    host.resume(set(&[0]));
    only(&mut host, &[0]);
}

#[test]
fn the_time_of_a_thread_that_waits_is_not_counted() {
    let (give, take) = mpsc::channel();
    let (ask, asked) = mpsc::channel();
    let thread = thread::spawn(move || {
        let host = host().map(|mut host| {
            for _ in 0..2 {
                host.resume(set(&COUNTERS));
                only(&mut host, &COUNTERS);
                stop(&mut host, &COUNTERS);
            }
            host.resume(set(&COUNTERS));
            host
        });
        give.send(host).unwrap();
        asked.recv().unwrap();
        now()
    });
    let Some(mut host) = take.recv().unwrap() else {
        return;
    };
    thread::sleep(Duration::from_millis(50));
    let mut totals = Slots::filled(0);
    assert!(host.pause_and_read(set(&COUNTERS), &mut totals));
    ask.send(()).unwrap();
    let used = thread.join().unwrap();
    for counter in COUNTERS {
        let counted = totals[nth(counter)];
        assert!(counted > 0 && counted <= used, "{counted} of {used}");
    }
}

#[test]
fn the_others_go_on_when_one_is_given_back() {
    let Some(mut host) = host() else { return };
    host.resume(set(&COUNTERS));
    only(&mut host, &COUNTERS);
    host.pause(set(&[0]));
    host.release(nth(0));
    assert_eq!(host.read(nth(0)), 0);
    only(&mut host, &[3, 5, 1]);
    stop(&mut host, &[3, 5, 1]);
    let cycles = RawPerfEvtSel(CYCLES).config(Version::V2);
    host.create(nth(0), &cycles).unwrap();
    host.resume(set(&[0, 1]));
    only(&mut host, &[0, 1]);
    stop(&mut host, &[0, 1]);
    host.resume(set(&COUNTERS));
    only(&mut host, &COUNTERS);
    stop(&mut host, &COUNTERS);
    assert!(
        COUNTERS
            .into_iter()
            .all(|counter| host.deficit(nth(counter)).is_none())
    );
}

const fn nth(number: u8) -> Counter {
    Counter::new(number).expect("a counter's number")
}
