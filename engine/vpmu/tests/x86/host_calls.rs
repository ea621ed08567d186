//! Calls to the host: the cost of a virtual PMU, policy by policy.

use crate::support::{CYCLES, Call, END, Guest, INSTRUCTIONS, SAMPLE, nth, set};
use vpmu::counter::{CounterSet, Policy, Report, Statistics};
use vpmu::x86::intel::Msr::*;
use vpmu::x86::intel::{Capability, Msr, Version};
use vpmu::x86::{Outcome, PmuConfig, Ring};

#[test]
fn a_guest_that_never_enables_a_counter_costs_no_call() {
    for policy in Policy::ALL {
        let mut guest = Guest::with_policy(policy);
        for msr in Msr::all() {
            let _ = guest.pmu.rdmsr(msr.address(), &mut guest.host);
            // Linux writes this while it searches for its PMU.
            let _ = guest.pmu.wrmsr(msr.address(), 0, &mut guest.host);
        }
        guest.write(Pmc(0), 0xabcd);
        guest.pmu.put(&mut guest.host);
        guest.pmu.load(&mut guest.host);
        guest.pmu.end_slice(&mut guest.host);
        assert_eq!(guest.host.calls(), []);
        assert_eq!(guest.pmu.statistics().host_operations(), 0);
    }
}

/// Runs Linux's handler for one sample of counter 0 (intel_pmu_handle_irq of
/// arch/x86/events/intel).
fn linux_handler(guest: &mut Guest, period: u64) {
    guest.write(GlobalCtrl, 0);
    let status = guest.read(GlobalStatus);
    assert_eq!(status, 1);
    guest.write(GlobalOvfCtrl, status);
    let Guest { pmu, host } = guest;
    let count = pmu.rdpmc(0, Ring::Kernel, false, host);
    assert!(matches!(count, Outcome::Value(0..100)), "{count:?}");
    guest.write(FullWidthPmc(0), END - period);
    assert_eq!(guest.read(GlobalStatus), 0);
    guest.write(GlobalCtrl, 0x7_0000_000f);
}

/// A host event that repeats may go on only for a counter whose overflow is awaited: no other overflow is reported.
#[test]
fn an_overflow_that_nobody_waits_for_is_in_the_status_all_the_same() {
    for clears in [false, true] {
        let mut guest = Guest::new(Version::V2);
        (guest.host.prompt, guest.host.atomic) = (true, true);
        guest.host.repeats = true;
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.write(GlobalCtrl, 1);
        guest.execute(1000);
        assert!(guest.take_pmi());
        // Without INT.
        guest.write(PerfEvtSel(0), 0x0043_0000 | INSTRUCTIONS);
        guest.write(GlobalOvfCtrl, 1);
        guest.write(FullWidthPmc(0), END - 10);
        guest.execute(100);
        guest.interrupt();
        if clears {
            guest.write(GlobalOvfCtrl, 1);
            assert_eq!(guest.read(FullWidthPmc(0)), 90);
        }
        assert_eq!(guest.read(GlobalStatus), u64::from(!clears));
        assert!(!guest.take_pmi());
    }
}

fn since(now: Statistics, before: Statistics) -> [u64; 6] {
    [
        now.creates - before.creates,
        now.set_periods - before.set_periods,
        now.resumes - before.resumes,
        now.pauses - before.pauses,
        now.reads - before.reads,
        now.releases - before.releases,
    ]
}

/// Returns the host operations for one sample: create, set period, resume, pause, read, release.
fn operations_per_pmi(policy: Policy, atomic: bool) -> [u64; 6] {
    let mut guest = Guest::with_policy(policy);
    guest.host.atomic = atomic;
    guest.write(GlobalCtrl, 0);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.write(GlobalCtrl, 0x7_0000_000f);
    let mut operations = Vec::new();
    for _ in 0..3 {
        let before = guest.pmu.statistics();
        guest.execute(1000);
        assert!(guest.interrupt());
        guest.execute(20);
        linux_handler(&mut guest, 1000);
        operations.push(since(guest.pmu.statistics(), before));
    }
    assert!(operations.iter().all(|each| *each == operations[0]));
    operations[0]
}

#[test]
fn one_sample_costs_so_many_operations() {
    let recreate = operations_per_pmi(Policy::Recreate, false);
    let reuse = operations_per_pmi(Policy::Reuse, false);
    let paused = operations_per_pmi(Policy::ReusePaused, false);
    // create, set period, resume, pause, read, release
    assert_eq!(recreate, [2, 1, 2, 2, 2, 2]);
    assert_eq!(reuse, [0, 2, 1, 2, 3, 0]);
    assert_eq!(paused, [0, 1, 1, 1, 1, 0]);
    // A host may pause and read in one operation, as perf_event_pause does. Then each remaining
    // kind of operation is done once.
    assert_eq!(
        operations_per_pmi(Policy::ReusePaused, true),
        [0, 1, 1, 1, 0, 0]
    );
    assert_eq!(operations_per_pmi(Policy::Reuse, true), [0, 2, 1, 2, 2, 0]);
}

#[test]
fn many_counters_cost_no_more_than_the_one_that_overflowed() {
    let mut guest = Guest::new(Version::V2);
    guest.host.prompt = true;
    guest.write(GlobalCtrl, 0);
    for n in 0..4 {
        guest.sample(n, INSTRUCTIONS, 1000 + 5000 * u64::from(n));
    }
    guest.write(FixedCtrCtrl, 0xbbb);
    guest.write(GlobalCtrl, 0x7_0000_000f);
    guest.execute(1000);
    guest.host.calls();
    assert!(guest.interrupt());
    linux_handler(&mut guest, 1000);
    let all = set([0, 1, 2, 3, 16, 17, 18]);
    assert_eq!(
        guest.host.calls(),
        [
            Call::Pause(all),
            Call::Read(0),
            Call::SetPeriod(0, Some(1000)),
            Call::Resume(all),
        ]
    );
    assert_eq!(guest.read(FixedCtr(0)), 1000, "and nothing is lost");
    guest.execute(1000);
    assert!(guest.interrupt());
}

#[test]
fn an_overflow_on_the_cpu_of_its_event_is_free() {
    let calls = |policy, report| {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.execute(1000);
        guest.host.calls();
        assert!(guest.pmu.overflow(nth(0), report, &mut guest.host));
        guest.host.calls()
    };
    for policy in [Policy::Reuse, Policy::ReusePaused] {
        assert_eq!(calls(policy, Report::Due), []);
        assert_eq!(calls(policy, Report::Unsure), [Call::Read(0)]);
        let moved = calls(policy, Report::Moved);
        assert!(matches!(
            moved[..],
            [
                Call::Pause(_),
                Call::Read(0),
                Call::Release(0),
                Call::Create(0, _),
                Call::Resume(_)
            ]
        ));
    }
    assert_eq!(calls(Policy::Recreate, Report::Due).len(), 5);
}

/// Where a report is a little early, a host event that repeats has begun its next period: it would be silent at the end of
/// this one.
#[test]
fn a_report_that_is_early_is_asked_for_again() {
    for repeats in [false, true] {
        let mut guest = Guest::new(Version::V2);
        guest.host.repeats = repeats;
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.execute(995);
        guest.host.calls();
        assert!(!guest.pmu.overflow(nth(0), Report::Unsure, &mut guest.host));
        assert_eq!(
            guest.host.calls(),
            [Call::Read(0), Call::SetPeriod(0, Some(5))]
        );
        guest.execute(5);
        assert!(guest.interrupt());
    }
}

#[test]
fn a_running_counter_that_is_rewritten_is_read_and_gets_a_period() {
    let calls = |policy| {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.execute(10);
        guest.host.calls();
        guest.write(FullWidthPmc(0), END - 500);
        guest.host.calls()
    };
    for policy in [Policy::Reuse, Policy::ReusePaused] {
        assert_eq!(
            calls(policy),
            [Call::Read(0), Call::SetPeriod(0, Some(500))]
        );
    }
    assert_eq!(calls(Policy::Recreate).len(), 7);
}

#[test]
fn counters_start_and_stop_as_sets() {
    let mut guest = Guest::new(Version::V2);
    guest.write(GlobalCtrl, 0);
    for n in 0..4 {
        guest.sample(n, CYCLES, 1000);
    }
    assert_eq!(guest.host.calls(), []);
    guest.write(GlobalCtrl, 0xf);
    let resumes: Vec<_> = guest
        .host
        .calls()
        .into_iter()
        .filter(|call| matches!(call, Call::Resume(_)))
        .collect();
    assert_eq!(resumes, [Call::Resume(CounterSet::first(4))]);
    guest.write(GlobalCtrl, 0);
    assert_eq!(guest.host.calls(), [Call::Pause(CounterSet::first(4))]);
}

#[test]
fn a_paused_and_drained_counter_is_left_alone() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.execute(7);
    guest.write(GlobalCtrl, 0);
    let _ = guest.read(Pmc(0));
    guest.host.calls();
    for value in [1, 2, 3] {
        guest.write(FullWidthPmc(0), value);
        assert_eq!(guest.read(Pmc(0)), value);
        guest.write(PerfEvtSel(0), SAMPLE & !(1 << 20) | INSTRUCTIONS);
        guest.write(PerfEvtSel(0), SAMPLE | INSTRUCTIONS);
        let _ = guest.read(GlobalStatus);
    }
    assert_eq!(guest.host.calls(), []);
    guest.write(GlobalCtrl, 1);
    assert_eq!(
        guest.host.calls(),
        [Call::SetPeriod(0, Some(END - 3)), Call::Resume(set([0]))]
    );
}

#[test]
fn an_event_that_comes_back_finds_its_host_event() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.write(PerfEvtSel(0), 0);
    guest.write(PerfEvtSel(0), SAMPLE | INSTRUCTIONS);
    let created = guest
        .host
        .calls()
        .into_iter()
        .filter(|call| matches!(call, Call::Create(..)))
        .count();
    assert_eq!(created, 1);
}

#[test]
fn a_slice_without_use_releases_the_host_event() {
    for policy in [Policy::Reuse, Policy::ReusePaused] {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.write(PerfEvtSel(0), 0);
        guest.pmu.end_slice(&mut guest.host);
        assert_eq!(guest.host.created(), set([0]), "it was used in this slice");
        guest.pmu.end_slice(&mut guest.host);
        assert_eq!(guest.host.created(), CounterSet::EMPTY);
    }
}

#[test]
fn a_running_host_event_outlives_every_slice() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.host.calls();
    for _ in 0..5 {
        guest.pmu.end_slice(&mut guest.host);
    }
    assert_eq!(guest.host.calls(), []);
    guest.execute(1000);
    assert!(guest.interrupt());
}

#[test]
fn put_stops_everything_and_load_goes_on() {
    for policy in Policy::ALL {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.execute(100);
        guest.pmu.put(&mut guest.host);
        guest.pmu.put(&mut guest.host);
        assert!(guest.host.running().is_empty());
        guest.pmu.load(&mut guest.host);
        guest.pmu.load(&mut guest.host);
        guest.execute(899);
        assert!(!guest.interrupt());
        guest.execute(1);
        assert!(guest.interrupt());
    }
}

#[test]
fn hold_stops_everything_and_ends_no_slice() {
    for policy in [Policy::Reuse, Policy::ReusePaused] {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 1000);
        // A counter that the guest has stopped, and will use again before its slice is over.
        guest.sample(1, INSTRUCTIONS, 1000);
        guest.write(PerfEvtSel(1), 0);
        let created = guest.host.created();
        for _ in 0..3 {
            guest.execute(100);
            guest.pmu.hold(&mut guest.host);
            assert!(guest.host.running().is_empty());
            guest.execute(100);
            guest.pmu.load(&mut guest.host);
            assert_eq!(guest.host.created(), created);
        }
        // What was executed meanwhile is not counted.
        guest.execute(699);
        assert!(!guest.interrupt());
        guest.execute(1);
        assert!(guest.interrupt());
    }
}

#[test]
fn reset_gives_everything_back() {
    for policy in Policy::ALL {
        let mut guest = Guest::with(PmuConfig {
            policy,
            ..PmuConfig::new(Capability::new(Version::V5))
        });
        let fresh = guest.pmu.save(&mut guest.host);
        guest.sample(0, INSTRUCTIONS, 10);
        guest.execute(15);
        guest.pmu.reset(&mut guest.host);
        assert_eq!(guest.host.created(), CounterSet::EMPTY);
        assert_eq!(guest.pmu.save(&mut guest.host), fresh);
        guest.pmu.put(&mut guest.host);
        assert_eq!(guest.read(Pmc(0)), 0, "what was owed is forgotten");
    }
}
