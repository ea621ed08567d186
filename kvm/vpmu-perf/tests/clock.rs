//! Tests of the engine on real perf events of this machine: the clock, which is there everywhere.
#![cfg(target_os = "linux")]

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use vpmu::counter::{Counter, CounterHost, CounterSet, CounterState, Lost, Policy, Report};
use vpmu::x86::intel::{Capability, RawPerfEvtSel, Version};
use vpmu::x86::{ArchEvent, Outcome, Pmu, PmuConfig};
use vpmu_perf::{Backing, Freeze, Kick, PerfError, PerfHost, PerfOptions};

const HZ: u64 = 1_000_000_000;
const GLOBAL_CTRL: u32 = 0x38f;
const GLOBAL_STATUS: u32 = 0x38e;
const OVF_CTRL: u32 = 0x390;
const PMC0: u32 = 0x4c1;
const EVTSEL0: u32 = 0x186;
/// Cycles, in both rings, with an interrupt, enabled.
const CYCLES: u64 = 0x3c | 1 << 16 | 1 << 17 | 1 << 20 | 1 << 22;
const MASK: u64 = (1 << 48) - 1;
/// Ends a test that hangs: thousands of times what any takes on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);

const OPTIONS: PerfOptions = PerfOptions {
    tsc_hz: HZ,
    backing: Some(Backing::Clock),
    approximate_instructions: false,
    signal: None,
    kick: Kick::Nothing,
    repeating: false,
    sampling: false,
    freeze: Freeze::Vm,
};

/// Returns a host, or says that this machine has no perf events and returns `None`.
fn host() -> Option<PerfHost> {
    match PerfHost::new(OPTIONS) {
        Ok(host) => Some(host),
        Err(error @ (PerfError::Forbidden(_) | PerfError::NoPerf)) => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn pmu(policy: Policy) -> Pmu {
    Pmu::new(PmuConfig {
        policy,
        ..PmuConfig::new(Capability::new(Version::V2))
    })
    .unwrap()
}

fn write(pmu: &mut Pmu, host: &mut PerfHost, msr: u32, value: u64) {
    assert_eq!(pmu.wrmsr(msr, value, host), Outcome::Done, "{msr:#x}");
}

fn read(pmu: &mut Pmu, host: &mut PerfHost, msr: u32) -> u64 {
    match pmu.rdmsr(msr, host) {
        Outcome::Value(value) => value,
        other => panic!("{other:?}"),
    }
}

/// Starts the counters, and uses the CPU until an overflow is reported. Returns the time until then: no less than the
/// counter counted, because time in which the thread does not run is not counted.
fn overflow(pmu: &mut Pmu, host: &mut PerfHost) -> Duration {
    let start = Instant::now();
    write(pmu, host, GLOBAL_CTRL, 1);
    loop {
        for (counter, report) in host.take_overflows() {
            pmu.overflow(counter, report, host);
        }
        if pmu.take_pmi() {
            return start.elapsed();
        }
        assert!(start.elapsed() < PATIENCE, "no overflow");
    }
}

#[test]
fn a_counter_overflows_again_and_again_under_each_policy() {
    for policy in Policy::ALL {
        let Some(mut host) = host() else { return };
        let mut pmu = pmu(policy);
        let period = HZ / 200;
        write(&mut pmu, &mut host, EVTSEL0, CYCLES);
        write(&mut pmu, &mut host, PMC0, MASK + 1 - period);
        for _ in 0..5 {
            let took = overflow(&mut pmu, &mut host);
            assert!(took >= Duration::from_millis(4), "early: {took:?}");
            // Linux's handler does this, too.
            write(&mut pmu, &mut host, GLOBAL_CTRL, 0);
            assert_eq!(read(&mut pmu, &mut host, GLOBAL_STATUS), 1);
            let beyond = read(&mut pmu, &mut host, PMC0);
            assert!(beyond < MASK / 2, "it has not wrapped: {beyond}");
            write(&mut pmu, &mut host, PMC0, MASK + 1 - period);
            write(&mut pmu, &mut host, OVF_CTRL, 1);
            assert!(!pmu.pmi_due());
        }
        assert_eq!(pmu.statistics().lost, 0);
    }
}

#[test]
fn a_stopped_counter_stands_still_and_a_running_one_keeps_time() {
    let Some(mut host) = host() else { return };
    let mut pmu = pmu(Policy::ReusePaused);
    write(&mut pmu, &mut host, EVTSEL0, CYCLES);
    let start = Instant::now();
    write(&mut pmu, &mut host, GLOBAL_CTRL, 1);
    while start.elapsed() < Duration::from_millis(50) {}
    write(&mut pmu, &mut host, GLOBAL_CTRL, 0);
    let most = start.elapsed().as_nanos() as u64;
    let counted = read(&mut pmu, &mut host, PMC0);
    // Time on the CPU is never more than elapsed time. On a busy machine it may be much less.
    assert!(counted > 0 && counted <= most, "{counted} of {most}");
    while start.elapsed() < Duration::from_millis(60) {}
    assert_eq!(read(&mut pmu, &mut host, PMC0), counted);
}

#[test]
fn what_a_clock_cannot_tell_is_lost_and_said() {
    let Some(mut host) = host() else { return };
    assert!(host.counts(ArchEvent::CoreCycles) && host.counts(ArchEvent::TscCycles));
    assert!(!host.counts(ArchEvent::Instructions) && !host.counts(ArchEvent::LlcMisses));
    let mut pmu = pmu(Policy::ReusePaused);
    for event in [CYCLES & !0xff | 0xc0, CYCLES & !0xff | 0xc4] {
        write(&mut pmu, &mut host, EVTSEL0, event);
        write(&mut pmu, &mut host, GLOBAL_CTRL, 1);
        let state = pmu.counter_state(Counter::at::<0>());
        assert_eq!(state, Some(CounterState::Lost(Lost::Unsupported)));
        assert_eq!(read(&mut pmu, &mut host, PMC0), 0);
        write(&mut pmu, &mut host, GLOBAL_CTRL, 0);
    }
}

/// A thread without a guest is never seen in one. Its counter of user space stands still, and says so.
#[test]
fn a_ring_that_nothing_tells_is_lost() {
    let Some(mut host) = host() else { return };
    let mut pmu = pmu(Policy::ReusePaused);
    write(&mut pmu, &mut host, EVTSEL0, CYCLES & !RawPerfEvtSel::OS);
    write(&mut pmu, &mut host, GLOBAL_CTRL, 1);
    let start = Instant::now();
    while pmu.counter_state(Counter::at::<0>()) == Some(CounterState::Counting) {
        assert!(start.elapsed() < PATIENCE);
        assert_eq!(read(&mut pmu, &mut host, PMC0), 0);
    }
    let state = pmu.counter_state(Counter::at::<0>());
    assert_eq!(state, Some(CounterState::Lost(Lost::Unsupported)));
    write(&mut pmu, &mut host, GLOBAL_CTRL, 0);
}

/// Returns whether `test`, which changes a limit of its process, has a process of its own. If not, it is run in one.
fn is_alone(test: &str) -> bool {
    const ALONE: &str = "VPMU_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    let status = std::process::Command::new(own)
        .args(["--exact", test])
        .env(ALONE, "1")
        .status()
        .unwrap();
    assert!(status.success());
    false
}

#[test]
fn no_descriptor_left_is_a_loss_and_not_the_end() {
    if !is_alone("no_descriptor_left_is_a_loss_and_not_the_end") {
        return;
    }
    let Some(mut host) = host() else { return };
    let mut pmu = pmu(Policy::ReusePaused);
    write(&mut pmu, &mut host, GLOBAL_CTRL, 0);
    write(&mut pmu, &mut host, EVTSEL0, CYCLES);
    let before = getrlimit(Resource::Nofile);
    let none = Rlimit {
        current: Some(0),
        ..before
    };
    setrlimit(Resource::Nofile, none).unwrap();
    write(&mut pmu, &mut host, GLOBAL_CTRL, 1);
    assert_eq!(
        pmu.counter_state(Counter::at::<0>()),
        Some(CounterState::Lost(Lost::Busy))
    );
    setrlimit(Resource::Nofile, before).unwrap();
    pmu.end_slice(&mut host);
    assert_eq!(
        pmu.counter_state(Counter::at::<0>()),
        Some(CounterState::Counting),
        "asked again"
    );
}

#[test]
fn a_period_of_one_is_a_storm_for_nobody_but_the_guest() {
    storm(1);
}

/// Checks that the limit is the thread's, not each counter's.
#[test]
fn nor_is_it_on_every_counter() {
    storm(4);
}

fn storm(counters: u32) {
    let Some(mut host) = host() else { return };
    let mut pmu = pmu(Policy::ReusePaused);
    let all = (1 << counters) - 1;
    for n in 0..counters {
        write(&mut pmu, &mut host, EVTSEL0 + n, CYCLES);
        write(&mut pmu, &mut host, PMC0 + n, MASK);
    }
    let (start, mut reports) = (Instant::now(), 0);
    write(&mut pmu, &mut host, GLOBAL_CTRL, all);
    while reports < 1000 {
        assert!(start.elapsed() < PATIENCE, "{reports} reports");
        for (counter, report) in host.take_overflows() {
            pmu.overflow(counter, report, &mut host);
            reports += 1;
        }
        let status = read(&mut pmu, &mut host, GLOBAL_STATUS);
        for n in (0..counters).filter(|n| status >> n & 1 != 0) {
            // The order matters: the other way round, the next overflow may be acknowledged too.
            write(&mut pmu, &mut host, OVF_CTRL, 1 << n);
            write(&mut pmu, &mut host, PMC0 + n, MASK);
        }
    }
    // The kernel's timer may make up for one that came late.
    let most = start.elapsed().as_nanos() as u64 / PerfHost::FLOOR * 11 / 10 + u64::from(counters);
    assert!(reports <= most, "{reports} of {most}");
}

#[test]
fn a_full_queue_of_signals_loses_no_overflow() {
    if !is_alone("a_full_queue_of_signals_loses_no_overflow") {
        return;
    }
    let none = Rlimit {
        current: Some(0),
        ..getrlimit(Resource::Sigpending)
    };
    setrlimit(Resource::Sigpending, none).unwrap();
    let Some(mut host) = host() else { return };
    let mut pmu = pmu(Policy::ReusePaused);
    write(&mut pmu, &mut host, EVTSEL0, CYCLES);
    write(&mut pmu, &mut host, PMC0, MASK + 1 - HZ / 200);
    assert!(overflow(&mut pmu, &mut host) >= Duration::from_millis(4));
    assert_eq!(read(&mut pmu, &mut host, GLOBAL_STATUS), 1);
    assert!(
        pmu.statistics().reads > 0,
        "nobody vouches for such a report"
    );
}

#[test]
fn a_thread_has_one_host() {
    let Some(first) = host() else { return };
    assert!(matches!(PerfHost::new(OPTIONS), Err(PerfError::Taken)));
    drop(first);
    assert!(PerfHost::new(OPTIONS).is_ok());
}

#[test]
fn a_storm_of_several_counters_is_as_many_times_slower() {
    let Some(mut host) = host() else { return };
    let cycles = RawPerfEvtSel(CYCLES).config(Version::V2);
    let counters = CounterSet::from_bits(0b1111);
    for counter in counters {
        assert_eq!(host.create(counter, &cycles), Ok(()));
        // The first counter is included, which was alone then.
        host.set_period(counter, NonZeroU64::new(1));
    }
    host.resume(counters);
    let start = Instant::now();
    let mut overflows = 0;
    while overflows < 4 {
        for (counter, report) in host.take_overflows() {
            assert_eq!(report, Report::Due);
            let counted = host.read(counter);
            assert!(counted >= 4 * PerfHost::FLOOR, "{counter}: {counted}");
            overflows += 1;
        }
        assert!(start.elapsed() < PATIENCE, "{overflows} overflows");
    }
}
