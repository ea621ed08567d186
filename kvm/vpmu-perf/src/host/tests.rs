//! A host beside the events that it has made.

use std::thread;
use std::time::Instant;

use vpmu::x86::intel::{RawPerfEvtSel, Version};

use super::*;
use crate::kick::Kick;
use crate::options::PerfOptions;
use crate::tests::fake::{Fake, Machine};

mod argument;

/// Counters of a clock that ticks as fast as the TSC.
fn by_the_clock() -> PerfOptions {
    PerfOptions {
        tsc_hz: 1_000_000_000,
        backing: Some(Backing::Clock),
        kick: Kick::Nothing,
        ..PerfOptions::default()
    }
}

#[test]
fn counters_that_began_alone_do_not_keep_the_period_of_a_lone_one() {
    let options = PerfOptions {
        repeating: true,
        ..by_the_clock()
    };
    let Ok(mut host) = PerfHost::new(options) else {
        eprintln!("skipped: no perf events");
        return;
    };
    const CYCLES: u64 = 0x3c | RawPerfEvtSel::USR | RawPerfEvtSel::OS;
    let cycles = RawPerfEvtSel(CYCLES).config(Version::V2);
    let period = |host: &PerfHost, counter| {
        let slot = &host.slots[Counter::new(counter).unwrap()];
        match slot.period {
            Period::Set { period, .. } => period,
            other => panic!("{counter}: {other:?}"),
        }
    };
    let all = CounterSet::from_bits(0b111);
    for counter in all {
        assert_eq!(host.create(counter, &cycles), Ok(()));
        host.set_period(counter, NonZeroU64::new(1));
        host.resume(CounterSet::of(counter));
        host.pause(CounterSet::of(counter));
    }
    assert_eq!([0, 1, 2].map(|n| period(&host, n)), [PerfHost::FLOOR; 3]);
    host.resume(all);
    let shared = 3 * PerfHost::FLOOR;
    assert_eq!([0, 1, 2].map(|n| period(&host, n)), [shared; 3]);
    host.pause(all);
    host.resume(Counter::at::<1>().alone());
    assert_eq!(period(&host, 1), PerfHost::FLOOR, "alone again");
}

/// As when a VMM's main thread restores the PMU of a vCPU whose thread has made the host.
#[test]
fn a_counter_of_one_ring_is_of_the_hosts_thread_whoever_makes_it() {
    let Ok(mut host) = PerfHost::new(by_the_clock()) else {
        eprintln!("skipped: no perf events");
        return;
    };
    let kernel = RawPerfEvtSel(0x3c | RawPerfEvtSel::OS).config(Version::V2);
    let counter = Counter::at::<0>();
    let mut host = thread::spawn(move || {
        assert_eq!(host.create(counter, &kernel), Ok(()));
        host.resume(counter.alone());
        host
    })
    .join()
    .unwrap();
    // This thread runs no guest, and so many samples of it say that the machine does not tell where a guest is.
    let begun = Instant::now();
    while host.deficit(counter).is_none() {
        assert!(begun.elapsed().as_secs() < 60, "nobody samples this thread");
        host.read(counter);
    }
    assert_eq!(host.deficit(counter), Some(Lost::Unsupported));
}

#[test]
fn a_clock_of_one_ring_is_quiet_while_nobody_waits_for_it() {
    let kernel = Fake::new(Machine::default());
    let mut host = PerfHost::counting(kernel, by_the_clock(), true).unwrap();
    let user = RawPerfEvtSel(0x3c | RawPerfEvtSel::USR).config(Version::V2);
    let counter = Counter::at::<0>();
    assert_eq!(host.create(counter, &user), Ok(()));
    host.set_period(counter, NonZeroU64::new(100_000));
    host.resume(counter.alone());
    // As after a report, until the guest has written the counter.
    host.set_period(counter, None);
    let (mut left, mut kicks) = (10_000_000, 0);
    while left > 0 {
        left -= kernel.run(left).max(1).min(left);
        kicks += u32::from(left > 0);
        assert_eq!(host.take_overflows().count(), 0);
    }
    assert_eq!(kicks, 1);
}

#[test]
fn a_counter_of_cycles_that_stands_still_while_its_event_runs_is_told() {
    const MS: u64 = 1_000_000;
    let kernel = Fake::new(Machine::default());
    let counter = Counter::at::<0>();
    let both = RawPerfEvtSel::USR | RawPerfEvtSel::OS;
    for (backing, rings) in [
        (Backing::Hardware, both),
        (Backing::Hardware, RawPerfEvtSel::USR),
        // This kernel samples no guest, so that nobody knows which time is user space's.
        (Backing::Clock, RawPerfEvtSel::USR),
    ] {
        let options = PerfOptions {
            backing: Some(backing),
            ..by_the_clock()
        };
        let mut host = PerfHost::counting(kernel, options, true).unwrap();
        let cycles = RawPerfEvtSel(0x3c | rings).config(Version::V2);
        assert_eq!(host.create(counter, &cycles), Ok(()));
        host.resume(counter.alone());
        kernel.run(5 * MS);
        let (counted, stuck) = (host.read(counter) > 0, host.longest_stuck_ns());
        assert_eq!(stuck, if counted { 0 } else { 5 * MS }, "{backing:?}");
        // The thread runs, and its guest does not: a hardware event does not count.
        kernel.pass(7 * MS);
        host.read(counter);
        let stuck = match (backing, rings == both) {
            (Backing::Hardware, true) => 7 * MS,
            // The guest may have been in its kernel.
            (Backing::Hardware, false) => 0,
            (Backing::Clock, _) => 5 * MS,
        };
        assert_eq!(host.longest_stuck_ns(), stuck, "{backing:?} {rings:#x}");
        kernel.run(MS);
        host.read(counter);
        host.release(counter);
        assert!(host.longest_stuck_ns() >= stuck, "still the longest");
    }
}

/// A counter of one ring divides the time since its last total, and took a total that fell for nearly 2^64 ns.
#[test]
fn a_total_that_falls_takes_no_counter_back_and_stops_none() {
    let kernel = Fake::new(Machine::default());
    let mut host = PerfHost::counting(kernel, by_the_clock(), true).unwrap();
    for rings in [RawPerfEvtSel::USR | RawPerfEvtSel::OS, RawPerfEvtSel::USR] {
        let cycles = RawPerfEvtSel(0x3c | rings).config(Version::V2);
        let counter = Counter::at::<0>();
        assert_eq!(host.create(counter, &cycles), Ok(()));
        host.resume(counter.alone());
        // As where half of the samples are of the other ring.
        if let Some(time) = &mut host.slots[counter].portion {
            time.note(crate::rings::RingSamples {
                user: 1,
                kernel: 1,
                host: 0,
            });
        }
        kernel.run(1_000_000);
        let before = host.read(counter);
        assert!(before >= 500_000, "{before}");
        kernel.set_back(1000);
        assert_eq!(host.read(counter), before);
        kernel.run(1_000_000);
        let after = host.read(counter);
        assert!(
            (before + 400_000..=before + 1_000_000).contains(&after),
            "{before} {after}"
        );
        host.release(counter);
    }
}

/// Four counters of the processor's: two count, and two sample. A third that is to count takes one of a sampler, whose user
/// hears of it. Otherwise each counter would have a part of the time.
#[test]
fn a_sampler_gives_its_counter_to_one_that_counts() {
    use vpmu::x86::pebs::Host as _;
    let kernel = Fake::new(Machine {
        counters: 4,
        tsc: true,
        ..Machine::default()
    });
    let options = PerfOptions {
        backing: Some(Backing::Hardware),
        sampling: true,
        repeating: true,
        ..by_the_clock()
    };
    let mut host = PerfHost::counting(kernel, options, true).unwrap();
    let cycles = RawPerfEvtSel(0x3c | RawPerfEvtSel::USR | RawPerfEvtSel::OS).config(Version::V2);
    let period = NonZeroU64::new(100_000).unwrap();
    let [first, second, third] = [0, 1, 2].map(|n| Counter::new(n).unwrap());
    for counter in [first, second] {
        assert_eq!(host.create(counter, &cycles), Ok(()));
        host.resume(counter.alone());
    }
    assert!(
        [first, second]
            .iter()
            .all(|&n| host.begin_sampling(n, period) > 16)
    );
    assert!(!host.has_overflows());
    assert_eq!(host.create(third, &cycles), Ok(()));
    host.resume(third.alone());
    assert!(host.has_overflows());
    let reports: Vec<_> = host.take_overflows().collect();
    assert_eq!(reports, [(first, Report::Unsure)]);
    assert!(host.take_samples(first, &mut []).ended);
    assert!(!host.take_samples(second, &mut []).ended);
    assert_eq!(host.begin_sampling(first, period), 0, "all are taken");
    kernel.run(10_000_000);
    for counter in [first, second, third] {
        host.read(counter);
        assert_eq!(host.deficit(counter), None, "{counter}");
    }
}
