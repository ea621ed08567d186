//! The life of a host event, under every policy, after every short sequence of what can happen to
//! it, on a host of which each call goes wrong in turn.
//!
//! A counter here is the simplest PMU there is: six bits wide, one event of two, an interrupt that
//! is always wanted. Invariants, checked after every step:
//!
//! - **orderly**: the host is called in the order `CounterHost` promises (the fake host checks it);
//!   only `Reuse` pauses what is paused.
//! - **exact**: the counter has the value that counting by hand gives.
//! - **stops**: a host event runs when the counter is to count, and only then.
//! - **on time**: while it runs, its report is due at the overflow, or has been made.
//! - **free overflow**: a report that is due costs nothing, unless the policy recreates.
//! - **left alone**: an event that is paused and drained is neither paused, read nor given a period
//!   before it is resumed, under `ReusePaused`.
//! - **a whole slice**: an event that was used since the last schedule-out is kept by the next one,
//!   and one that was not is released; under `Recreate` none is ever kept.
//! - **no leak**: after a release the host has nothing.
//! - **honest loss**: a counter is lost when the host could not back it, and only then; a host that
//!   multiplexed is found out at the next read.
//! - **agreement**: the policies give the same values.
//! - **thrift**: `ReusePaused` never calls the host more often than `Reuse`.

use std::num::NonZeroU64;

use crate::support::{Call, FakeHost, nth};
use vpmu::counter::{CounterSet, HostEvents, Lost, Policy, Report, Statistics};

const LIMIT: u64 = 64;
const N: u8 = 3;
const ONLY: CounterSet = CounterSet::of(nth(N));

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The guest writes the counter: five events before its end.
    Write,
    /// The guest reads it.
    Read,
    /// The guest enables or disables it.
    Toggle,
    /// The guest chooses the other event.
    Retype,
    /// The event that it counts happens three times.
    Happen,
    /// The host reports, if it has something to report.
    Due,
    /// It reports that the vCPU is on another CPU.
    Moved,
    /// A report that may be for nothing.
    Unsure,
    /// The vCPU is scheduled out or in.
    Schedule,
    /// All host events are given back.
    Release,
}

/// A counter on a host, and the same counter kept by hand.
#[derive(Clone, Debug)]
struct Counter {
    events: HostEvents<u8>,
    host: FakeHost<u8>,
    value: u64,
    overflowed: bool,
    lost: Option<Lost>,
    event: u8,
    enabled: bool,
    loaded: bool,

    by_hand: u64,
    overflow_by_hand: bool,
    used: bool,
}

impl Counter {
    fn new(policy: Policy, atomic: bool) -> Self {
        let mut host = FakeHost::new(policy);
        host.atomic = atomic;
        Self {
            events: HostEvents::new(policy),
            host,
            value: 0,
            overflowed: false,
            lost: None,
            event: 0,
            enabled: false,
            loaded: true,
            by_hand: 0,
            overflow_by_hand: false,
            used: false,
        }
    }

    fn wanted(&self) -> bool {
        self.enabled && self.loaded && self.lost.is_none()
    }

    fn due(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(LIMIT - self.value).filter(|_| !self.overflowed)
    }

    fn advance(&mut self, counted: u64) {
        self.overflowed |= self.value + counted >= LIMIT;
        self.value = (self.value + counted) % LIMIT;
    }

    /// Performs the work of every PMU after every access: see `x86/counters.rs`.
    fn apply(&mut self) {
        if !self.wanted() {
            self.events.stop(ONLY, &mut self.host);
        } else if !self.events.running().contains(nth(N)) {
            let owed = self.events.collect(nth(N), &mut self.host);
            self.advance(owed);
            let due = self.due();
            if let Err(reason) = self.events.start(nth(N), self.event, due, &mut self.host) {
                self.lost = Some(reason);
            }
        } else {
            self.rearm();
        }
        self.events.resume_started(&mut self.host);
    }

    fn rearm(&mut self) {
        let due = self.due();
        if let Err(reason) = self.events.rearm(nth(N), due, &mut self.host) {
            self.lost = Some(reason);
        }
    }

    fn report(&mut self, report: Report) {
        let counted = self.events.report(nth(N), report, &mut self.host);
        self.advance(counted);
    }

    /// Performs `step` and checks the invariants.
    fn step(&mut self, step: Step, trail: &[Step]) {
        let before = self.events.statistics();
        let paused = !self.events.unsettled().contains(nth(N));
        let due = self.host.reports.contains(nth(N));
        self.perform(step);
        self.apply();
        self.check(step, trail, before, paused, due);
    }

    fn perform(&mut self, step: Step) {
        match step {
            Step::Write => {
                let seen = self.events.read(nth(N), &mut self.host);
                self.advance(seen);
                self.value = LIMIT - 5;
                self.overflowed = false;
                self.rearm();
                self.by_hand = LIMIT - 5;
                self.overflow_by_hand = false;
                self.used |= self.host.created().contains(nth(N));
            }
            Step::Read => {
                let seen = self.events.read(nth(N), &mut self.host);
                self.advance(seen);
                self.used |= self.host.created().contains(nth(N));
            }
            Step::Toggle => {
                self.events.touch(ONLY, &mut self.host);
                self.enabled = !self.enabled;
                self.lost = None;
                self.used |= self.host.created().contains(nth(N));
            }
            Step::Retype => {
                let seen = self.events.collect(nth(N), &mut self.host);
                self.advance(seen);
                self.events.touch(ONLY, &mut self.host);
                self.events.stop(ONLY, &mut self.host);
                self.event ^= 1;
                self.lost = None;
                self.used |= self.host.created().contains(nth(N));
            }
            Step::Happen => {
                if self.wanted() {
                    self.overflow_by_hand |= self.by_hand + 3 >= LIMIT;
                    self.by_hand = (self.by_hand + 3) % LIMIT;
                }
                let event = self.event;
                self.host.count(3, |&counted| counted == event);
            }
            Step::Due | Step::Moved => {
                let wished = if step == Step::Due {
                    Report::Due
                } else {
                    Report::Moved
                };
                for (_, report) in self.host.take_reports(u32::MAX, wished) {
                    self.report(report);
                }
            }
            Step::Unsure => {
                let _ = self.host.take_reports(u32::MAX, Report::Unsure);
                self.host.forget(N);
                self.report(Report::Unsure);
            }
            Step::Schedule => {
                self.loaded = !self.loaded;
                if !self.loaded {
                    self.used |= self.events.running().contains(nth(N));
                    self.apply();
                    let counted = self.events.collect(nth(N), &mut self.host);
                    self.advance(counted);
                    self.events.end_slice(&mut self.host);
                    let kept = self.host.created().contains(nth(N));
                    let expected = self.used && self.events.policy() != Policy::Recreate;
                    assert!(!kept || expected, "a whole slice");
                    self.used = false;
                }
            }
            Step::Release => {
                self.events.release(ONLY, &mut self.host);
                assert!(self.host.created().is_empty(), "no leak");
                self.lost = None;
                self.used = false;
            }
        }
        self.used |= self.events.running().contains(nth(N));
    }

    fn check(&mut self, step: Step, trail: &[Step], before: Statistics, paused: bool, due: bool) {
        let policy = self.events.policy();
        let context = || format!("{policy:?}: {step:?} after {trail:?}");
        let calls = self.host.calls();

        assert_eq!(
            self.host.running().contains(nth(N)),
            self.wanted(),
            "stops: {}",
            context()
        );
        let mut copy = self.clone();
        let owed = copy.events.collect(nth(N), &mut copy.host);
        copy.advance(owed);
        assert_eq!(copy.value, self.by_hand, "exact: {}", context());
        assert_eq!(
            copy.overflowed,
            self.overflow_by_hand,
            "exact: {}",
            context()
        );
        if self.wanted() && !self.overflow_by_hand && !self.host.failed {
            assert_eq!(
                self.host.due(N),
                Some(LIMIT - self.by_hand),
                "on time: {}",
                context()
            );
        }
        if self.wanted() && self.overflow_by_hand && !self.overflowed && !self.host.failed {
            assert!(self.host.reports.contains(nth(N)), "on time: {}", context());
        }
        if step == Step::Due && due && policy != Policy::Recreate && paused == self.wanted() {
            assert!(calls.is_empty(), "free overflow: {}", context());
        }
        if policy == Policy::ReusePaused && paused && !self.wanted() {
            // An exception is a counter that the guest wanted and the host could not back.
            let quiet = |call: &Call<u8>| matches!(call, Call::Release(_) | Call::Create(..));
            let quiet = calls.iter().all(quiet);
            assert!(quiet, "left alone: {calls:?}, {}", context());
        }
        if policy == Policy::Recreate {
            let backed = self.host.created();
            assert_eq!(
                backed.is_empty(),
                !self.wanted(),
                "a whole slice: {}",
                context()
            );
        }
        let after = self.events.statistics();
        assert_eq!(
            after.lost - before.lost,
            u64::from(self.host.failed && after.lost != before.lost),
            "honest loss: {}",
            context()
        );
        assert_eq!(self.host.refused, after.lost, "honest loss: {}", context());
        if self.lost.is_some() {
            assert!(after.lost > 0, "honest loss: {}", context());
        }
        if copy.events.running().contains(nth(N)) {
            assert_eq!(
                copy.events.deficit(nth(N)).is_some(),
                deficit(&copy.host),
                "honest loss: {}",
                context()
            );
        }
    }
}

fn deficit(host: &FakeHost<u8>) -> bool {
    vpmu::counter::CounterHost::deficit(host, nth(N)).is_some()
}

/// Runs every sequence of `steps` up to `length`, on copies, so that each step is done once.
fn every_sequence(
    counters: &[Counter],
    steps: &[Step],
    length: usize,
    trail: &mut Vec<Step>,
    visit: &mut impl FnMut(&[Counter], &[Step]),
) {
    visit(counters, trail);
    if trail.len() == length {
        return;
    }
    for &step in steps {
        let mut next = counters.to_vec();
        for counter in &mut next {
            counter.step(step, trail);
        }
        trail.push(step);
        every_sequence(&next, steps, length, trail, visit);
        trail.pop();
    }
}

/// Returns a counter for each policy.
fn all(atomic: bool) -> Vec<Counter> {
    Policy::ALL
        .map(|policy| Counter::new(policy, atomic))
        .to_vec()
}

fn agree(counters: &[Counter], trail: &[Step]) {
    let [recreate, reuse, paused] = counters else {
        panic!("three policies");
    };
    for other in [reuse, paused] {
        assert_eq!(recreate.by_hand, other.by_hand, "agreement: {trail:?}");
        assert_eq!(recreate.lost, other.lost, "agreement: {trail:?}");
    }
    let operations = |counter: &Counter| counter.events.statistics().host_operations();
    assert!(operations(paused) <= operations(reuse), "thrift: {trail:?}");
}

#[test]
fn what_the_host_does_and_when_the_vcpu_runs() {
    use Step::*;
    let steps = [Write, Toggle, Happen, Due, Moved, Unsure, Schedule, Release];
    every_sequence(&all(false), &steps, 6, &mut Vec::new(), &mut agree);
    every_sequence(&all(true), &steps, 5, &mut Vec::new(), &mut agree);
}

#[test]
fn what_the_guest_does() {
    use Step::*;
    let steps = [Write, Read, Toggle, Retype, Happen, Due, Schedule];
    every_sequence(&all(false), &steps, 6, &mut Vec::new(), &mut agree);
    every_sequence(&all(true), &steps, 5, &mut Vec::new(), &mut agree);
}

#[test]
fn each_call_of_the_host_fails_in_turn() {
    use Step::*;
    let steps = [Write, Read, Toggle, Retype, Happen, Due, Unsure, Schedule];
    for fail_in in 0..12 {
        for policy in Policy::ALL {
            let mut counter = Counter::new(policy, false);
            counter.host.fail_in = Some(fail_in);
            let mut failed = 0_u32;
            let mut visit = |counters: &[Counter], _: &[Step]| {
                failed += u32::from(counters.iter().any(|counter| counter.host.failed));
            };
            let enabled = {
                counter.step(Toggle, &[]);
                counter
            };
            every_sequence(&[enabled], &steps, 5, &mut vec![Toggle], &mut visit);
            assert!(failed > 0 || fail_in > 8, "call {fail_in} is reached");
        }
    }
}

#[test]
fn a_host_that_vouches_for_what_has_not_happened_only_runs_ahead() {
    let mut events = HostEvents::new(Policy::ReusePaused);
    let mut host = FakeHost::new(Policy::ReusePaused);
    events
        .start(nth(N), 0_u8, NonZeroU64::new(10), &mut host)
        .expect("a host with room");
    events.resume_started(&mut host);
    host.count(4, |_| true);
    assert_eq!(events.report(nth(N), Report::Due, &mut host), 10);
    assert_eq!(events.read(nth(N), &mut host), 0, "6 events ahead");
    host.count(8, |_| true);
    assert_eq!(events.read(nth(N), &mut host), 2);
}

/// As by a timer that gains on the count: each report of a period of 100 comes after 90.
#[test]
fn a_report_after_a_read_that_finds_the_count_too_far_ahead_is_not_believed() {
    let mut events = HostEvents::new(Policy::ReusePaused);
    let mut host = FakeHost::new(Policy::ReusePaused);
    host.repeats = true;
    let period = NonZeroU64::new(100);
    events
        .start(nth(N), 0_u8, period, &mut host)
        .expect("a host with room");
    events.resume_started(&mut host);
    for _ in 0..5 {
        host.count(90, |_| true);
        assert_eq!(events.report(nth(N), Report::Due, &mut host), 100);
    }
    assert_eq!(events.read(nth(N), &mut host), 0, "50 events ahead");
    assert_eq!(events.armed(nth(N)), None);
    host.count(90, |_| true);
    let counted = events.report(nth(N), Report::Due, &mut host);
    assert_eq!(counted, 40, "540, of which 500 were counted before");
    assert_eq!(events.rearm(nth(N), NonZeroU64::new(60), &mut host), Ok(()));
    host.count(60, |_| true);
    assert_eq!(events.report(nth(N), Report::Due, &mut host), 60);
    assert_eq!(events.read(nth(N), &mut host), 0, "as far as the host");
}
