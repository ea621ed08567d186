//! Whose a count is: of a privilege ring, and of a thread, on whatever processor it runs. Instructions tell, which a loop
//! has as many of each time.

use std::hint::black_box;
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, sched_yield};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost};
use vpmu::x86::intel::RawPerfEvtSel;
use vpmu_perf::{Backing, PerfHost};

use super::{FIRST, Found, SECOND, THIRD, Unseen, event, hardware_only, holds_if, host};

const USER: u64 = RawPerfEvtSel::USR;
const KERNEL: u64 = RawPerfEvtSel::OS;
const THREADS: u64 = 3;
const ROUNDS: u64 = 100_000;
/// Moves of a thread to another processor.
const MOVES: usize = 20;

/// Returns a host that counts instructions of each of these rings.
fn counting(rings: &[(Counter, u64)]) -> Result<PerfHost, Unseen> {
    let mut host = host(Backing::Hardware)?;
    for &(counter, ring) in rings {
        host.create(counter, &event(0xc0 | ring))
            .map_err(|lost| match lost {
                // As in a guest whose PMU is made of a clock.
                Lost::Unsupported => Unseen::Skipped(lost.to_string()),
                _ => Unseen::Broken(format!("instructions cannot be counted: {lost}")),
            })?;
    }
    Ok(host)
}

/// The instructions of both rings together are those of each.
pub(super) fn rings(backing: Backing) -> Found {
    hardware_only(backing)?;
    let counted = [(FIRST, USER), (SECOND, KERNEL), (THIRD, USER | KERNEL)];
    let mut host = counting(&counted)?;
    host.resume(CounterSet::first(3));
    for n in 0..2000 {
        black_box(n);
        sched_yield();
    }
    host.pause(CounterSet::first(3));
    let [user, kernel, both] = counted.map(|(counter, _)| host.read(counter));
    // Each of the three is stopped after the one before it.
    let is_whole = (user + kernel).abs_diff(both) <= both / 50;
    let seen = format!("{user} of user space and {kernel} of the kernel, {both} together");
    holds_if(user > 0 && kernel > 0 && is_whole, seen)
}

/// A thread's loops are counted alike: alone or beside others, still or moved between processors. One thread runs at a
/// time, because QEMU counts the instructions of all its processors on each.
pub(super) fn threads(backing: Backing) -> Found {
    hardware_only(backing)?;
    counting(&[(FIRST, USER)])?;
    let allowed = sched_getaffinity(None).map_err(|error| error.to_string())?;
    let all: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|&at| allowed.is_set(at))
        .collect();
    let first = &all[..1];
    let alone = thread::scope(|scope| joined(scope.spawn(|| work(1, first))))?;
    let moved = thread::scope(|scope| joined(scope.spawn(|| work(1, &all))))?;
    let together = thread::scope(|scope| {
        let threads = (1..=THREADS).map(|times| scope.spawn(move || work(times, first)));
        let threads: Vec<_> = threads.collect();
        let counts = threads.into_iter().map(joined);
        counts.collect::<Result<Vec<u64>, Unseen>>()
    })?;
    // Another thread's loops would be a third as many again, at least.
    let is_of = |count: u64, times| {
        let wanted = times * alone;
        count > times * ROUNDS * MOVES as u64 && count.abs_diff(wanted) <= wanted / 10
    };
    let alike = (1..=THREADS)
        .zip(&together)
        .all(|(times, &count)| is_of(count, times));
    let seen = format!(
        "{alone} alone, {moved} on {} processors in turn, {together:?} beside each other",
        all.len()
    );
    holds_if(alike && is_of(moved, 1), seen)
}

fn joined(thread: thread::ScopedJoinHandle<'_, Result<u64, Unseen>>) -> Result<u64, Unseen> {
    thread.join().map_err(|_| "a thread ended".to_owned())?
}

/// Does some loops `times` times on each of these processors in turn, and returns the instructions of this thread's user
/// space.
fn work(times: u64, processors: &[usize]) -> Result<u64, Unseen> {
    let mut host = counting(&[(FIRST, USER)])?;
    host.resume(FIRST.alone());
    for &processor in processors.iter().cycle().take(MOVES) {
        let mut one = CpuSet::new();
        one.set(processor);
        sched_setaffinity(None, &one).map_err(|error| error.to_string())?;
        for n in 0..times * ROUNDS {
            black_box(n);
        }
    }
    host.pause(FIRST.alone());
    Ok(host.read(FIRST))
}
