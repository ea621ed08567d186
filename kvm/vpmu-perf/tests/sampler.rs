//! Tests of samplers on real perf events of this machine.
#![cfg(target_os = "linux")]

use std::time::{Duration, Instant};

use vpmu_perf::{CpuMode, PerfError, PerfRecord, PerfSample, Sampler};

/// Ends a test that hangs: thousands of times what any takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// 0.2 ms: far below any limit of the kernel's.
const PERIOD: u64 = 200_000;

/// Returns a sampler, or says that this machine has no perf events and returns `None`.
fn sampler() -> Option<Sampler> {
    match Sampler::of_time(100) {
        Ok(sampler) => Some(sampler),
        Err(error @ (PerfError::Forbidden(_) | PerfError::NoPerf)) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Uses the CPU until there are so many samples.
fn samples(sampler: &mut Sampler, number: usize) -> Vec<PerfSample> {
    let (start, mut samples) = (Instant::now(), Vec::new());
    while samples.len() < number {
        if let Some(PerfRecord::Sample(sample)) = sampler.next_record() {
            samples.push(sample);
        }
        assert!(start.elapsed() < PATIENCE, "no sample");
    }
    samples
}

#[test]
fn a_thread_is_sampled_while_the_sampler_is_enabled() {
    let Some(mut sampler) = sampler() else { return };
    assert!(sampler.capacity() >= 100);
    assert!(sampler.set_period(PERIOD));
    assert_eq!(sampler.next_record(), None);
    assert!(sampler.enable());
    let taken = samples(&mut sampler, 20);
    assert!(sampler.disable());
    for pair in taken.windows(2) {
        assert!(pair[0].time < pair[1].time, "{pair:?}");
    }
    // A test runs no guest.
    assert!(taken.iter().all(|sample| sample.mode == CpuMode::Host));
    let tscs: Option<Vec<u64>> = taken
        .iter()
        .map(|sample| sampler.tsc(sample.time))
        .collect();
    if let Some(tscs) = tscs {
        assert!(tscs.is_sorted(), "{tscs:?}");
    }
    while sampler.next_record().is_some() {}
    std::thread::sleep(Duration::from_millis(2));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(5) {}
    assert_eq!(sampler.next_record(), None, "it is stopped");
    assert!(sampler.enable());
    samples(&mut sampler, 3);
}

#[test]
fn records_that_find_no_room_are_counted() {
    let Some(mut sampler) = sampler() else { return };
    let room = sampler.capacity();
    assert!(sampler.set_period(PERIOD));
    assert!(sampler.enable());
    // As much time on the CPU as three rings take.
    let enough = time_on_cpu() + Duration::from_nanos(3 * room * PERIOD);
    while time_on_cpu() < enough {}
    let (start, mut taken, mut lost) = (Instant::now(), 0, 0);
    // The kernel tells a loss with the first record that finds room again.
    while lost == 0 {
        match sampler.next_record() {
            Some(PerfRecord::Sample(_)) => taken += 1,
            Some(PerfRecord::Lost(records)) => lost += records,
            Some(PerfRecord::Throttle | PerfRecord::Unthrottle) | None => {}
        }
        assert!(start.elapsed() < PATIENCE, "no loss: {taken} of {room}");
    }
    assert!(taken <= room + 1, "{taken} of {room}");
}

fn time_on_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
