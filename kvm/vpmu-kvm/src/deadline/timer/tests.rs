//! The timer on clocks of the test's own: whatever the TSC is, young, old or about to wrap.

use std::cell::Cell;

use lazy_deadline::{DeadlineTimer, LvtTimer, ParavirtualTimer, Slot, Verdict};

use super::*;

/// A tick is a nanosecond.
const KHZ: u32 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// A host that is as old as the test says. Each read of its TSC takes a tick.
#[derive(Debug, Default)]
struct Fake {
    tsc: Cell<u64>,
    /// In the host's TSC; `None`: not set.
    expiry: Cell<Option<u64>>,
}

impl Clocks for Fake {
    fn tsc(&self) -> u64 {
        self.tsc.set(self.tsc.get().wrapping_add(1));
        self.tsc.get()
    }

    fn set(&self, ns: u64) {
        let expiry = self.tsc.get().saturating_add(ns);
        self.expiry.set((ns != 0).then_some(expiry));
    }

    fn is_set(&self) -> bool {
        self.expiry.get().is_some()
    }
}

impl Fake {
    /// Lets the timer expire, and the thread that waits for it run `late` ticks later.
    fn expire(&self, late: u64) {
        let expiry = self.expiry.take().expect("a timer is set");
        self.tsc.set(expiry.wrapping_add(late));
    }
}

/// A host of some age and a guest whose TSC is `guest` now.
struct Rig {
    fake: Fake,
    clock: Clock,
    alarm: Alarm,
}

impl Rig {
    fn new(host: u64, guest: u64) -> Self {
        let fake = Fake::default();
        fake.tsc.set(host);
        Self {
            fake,
            clock: Clock {
                khz: KHZ,
                offset: guest.wrapping_sub(host),
            },
            alarm: Alarm::default(),
        }
    }

    fn timer(&mut self) -> Timer<'_, Fake> {
        Timer::new(&self.fake, self.clock, &mut self.alarm)
    }

    fn guest(&self) -> u64 {
        self.clock.guest(self.fake.tsc.get())
    }

    /// Arms for `ahead` ticks from now, and returns the deadline.
    fn arm(&mut self, ahead: u64) -> u64 {
        let deadline = self.guest().saturating_add(ahead);
        self.timer().arm(deadline);
        deadline
    }

    fn wait(&mut self) -> Expiry {
        self.timer().wait()
    }
}

/// Returns fresh hosts and old ones, with guests that are as young, much younger, or older. Some
/// guests' TSCs are below 0 in terms of the host's, and some are about to wrap.
fn ages() -> impl Iterator<Item = (u64, u64)> {
    let hosts = [0, SECOND, 1_000 * SECOND, 1 << 60];
    let guests = [
        0,
        SECOND,
        3_000 * SECOND,
        1 << 62,
        u64::MAX / 2 - SECOND,
        u64::MAX / 2 + SECOND,
        u64::MAX - 7_200 * SECOND,
    ];
    hosts
        .into_iter()
        .flat_map(move |host| guests.map(|guest| (host, guest)))
}

#[test]
fn an_expiry_in_time_is_expected_at_any_age() {
    for (host, guest) in ages() {
        for ahead in [1, 500, 20_000, SECOND, 3_600 * SECOND] {
            let mut rig = Rig::new(host, guest);
            let deadline = rig.arm(ahead);
            rig.fake.expire(0);
            assert_eq!(rig.wait(), Expiry::Expected, "{host} {guest} {ahead}");
            assert!(rig.guest() >= deadline, "{host} {guest} {ahead}");
            assert_eq!(rig.alarm.set, None);
        }
    }
}

#[test]
fn a_tsc_that_went_back_is_noticed_at_any_age() {
    for (host, guest) in ages() {
        for slept in [2 * SECOND, 3_600 * SECOND, 1 << 61] {
            let mut rig = Rig::new(host, guest);
            rig.arm(SECOND / 1_000);
            rig.clock.offset = rig.clock.offset.wrapping_sub(slept);
            rig.fake.expire(0);
            assert_eq!(rig.wait(), Expiry::UnknownTsc, "{host} {guest} {slept}");
            assert_eq!(rig.alarm.advance, 0, "it was not late");
            // The next timer is set by the new TSC.
            rig.arm(slept);
            rig.fake.expire(0);
            assert_eq!(rig.wait(), Expiry::Expected, "{host} {guest} {slept}");
        }
    }
}

/// Checks a sleep over which the host's TSC begins anew, and the guest's with it.
#[test]
fn a_host_that_has_slept_is_noticed() {
    for (host, guest) in ages() {
        let mut rig = Rig::new(host + 100 * SECOND, guest);
        rig.arm(10 * SECOND);
        rig.fake.expiry.set(None);
        rig.fake.tsc.set(SECOND);
        assert_eq!(rig.wait(), Expiry::UnknownTsc, "{host} {guest}");
    }
}

#[test]
fn lateness_is_learned_and_bounded() {
    let mut rig = Rig::new(0, 0);
    let longest = rig.clock.ticks(ADVANCE_NS);
    assert_eq!(rig.wait(), Expiry::Expected, "nothing was set");
    assert_eq!(rig.alarm.advance, 0);
    for _ in 0..2 * ADVANCE_STEP {
        rig.arm(SECOND);
        rig.fake.expire(2 * longest);
        assert_eq!(rig.wait(), Expiry::Expected);
    }
    assert_eq!(rig.alarm.advance, longest);
    // The expiry is early by that much, so the thread waits, and the next timer is set less early.
    let deadline = rig.arm(SECOND);
    rig.fake.expire(0);
    assert!(rig.guest() < deadline);
    assert_eq!(rig.wait(), Expiry::Expected);
    assert!(rig.guest() >= deadline);
    assert!(rig.alarm.advance < longest);
    // This expiry is an hour late, as after a stopped VMM. The timer learns no more than the bound.
    rig.arm(SECOND);
    rig.fake.expire(3_600 * SECOND);
    assert_eq!(rig.wait(), Expiry::Expected);
    assert_eq!(rig.alarm.advance, longest);
}

#[test]
fn a_wake_up_waits_for_nothing_and_keeps_the_deadline() {
    for (host, guest) in ages() {
        let mut rig = Rig::new(host, guest);
        rig.arm(1_000 * SECOND);
        let set = rig.alarm.set;
        rig.alarm.wake(&rig.fake);
        rig.fake.expire(0);
        let begin = rig.fake.tsc.get();
        assert_eq!(rig.wait(), Expiry::Expected);
        assert!(rig.fake.tsc.get() - begin < 10, "waited");
        assert_eq!(rig.alarm.set.map(|set| set.ahead), set.map(|set| set.ahead));
    }
}

/// Checks a timer whose clock runs 10 % faster than the TSC, as adjtimex(2) permits.
#[test]
fn a_clock_that_is_fast_changes_no_tsc() {
    let mut rig = Rig::new(5 * SECOND, SECOND);
    let deadline = rig.arm(100 * SECOND);
    rig.fake.expiry.set(Some(95 * SECOND));
    rig.fake.expire(0);
    assert_eq!(rig.wait(), Expiry::Expected);
    assert!(rig.guest() < deadline, "to be armed again");
    assert!(rig.alarm.set.is_some());
}

/// Checks the whole way of a deadline, by the engine: one interrupt, when the TSC has reached the
/// deadline.
#[test]
fn a_deadline_fires_once_at_any_age() {
    for (host, guest) in ages() {
        let mut rig = Rig::new(host, guest);
        let slot = Slot::new();
        let mut deadline = DeadlineTimer::new().with_floor(20_000);
        deadline.set_lvt(LvtTimer::decode(0x4_00ec), None, &mut rig.timer());
        ParavirtualTimer::new().prepare(slot.words());
        deadline.attach(slot.words()).unwrap();
        let words = Some(slot.words());
        let first = rig.guest() + SECOND;
        let second = first + SECOND;
        let order = std::sync::atomic::Ordering::Relaxed;
        slot.words().pending.store(first, order);
        let verdict = deadline.write(first, words, &mut rig.timer());
        assert_eq!(verdict, Verdict::Quiet);
        slot.words().pending.store(second, order);
        rig.fake.expire(0);
        let mut timer = rig.timer();
        assert_eq!(timer.wait(), Expiry::Expected);
        assert_eq!(deadline.expire(words, &mut timer), Verdict::Quiet);
        rig.fake.expire(0);
        let mut timer = rig.timer();
        assert_eq!(timer.wait(), Expiry::Expected);
        assert_eq!(deadline.expire(words, &mut timer), Verdict::Inject(second));
        assert!(rig.guest() >= second);
        assert_eq!(rig.fake.expiry.get(), None);
    }
}

/// Checks a TSC that reaches 2^64 and begins at 0 while the expiry is handled: the deadline has
/// passed.
#[test]
fn a_deadline_just_before_the_wrap_is_not_lost() {
    for before in [0, 1, 2, 5, 5_000] {
        for late in [0, 1, 10, 50_000, SECOND] {
            for lazy in [false, true] {
                let mut rig = Rig::new(77, u64::MAX - SECOND);
                let slot = Slot::new();
                let mut deadline = DeadlineTimer::new();
                deadline.set_lvt(LvtTimer::decode(0x4_00ec), None, &mut rig.timer());
                ParavirtualTimer::new().prepare(slot.words());
                deadline.attach(slot.words()).unwrap();
                let words = Some(slot.words());
                let wanted = u64::MAX - before;
                let order = std::sync::atomic::Ordering::Relaxed;
                slot.words()
                    .pending
                    .store(if lazy { wanted } else { 0 }, order);
                let verdict = deadline.write(wanted, words, &mut rig.timer());
                assert_eq!(verdict, Verdict::Quiet);
                rig.fake.expire(late);
                let mut timer = rig.timer();
                assert_eq!(timer.wait(), Expiry::Expected);
                let verdict = deadline.expire(words, &mut timer);
                assert_eq!(verdict, Verdict::Inject(wanted), "{before} {late} {lazy}");
            }
        }
    }
}

#[test]
fn a_timerfd_is_set_taken_back_and_expires() {
    let timer = TimerFd::new().unwrap();
    assert!(!timer.is_set());
    timer.set(u64::MAX);
    assert!(timer.is_set());
    timer.set(0);
    assert!(!timer.is_set());
    timer.set(1);
    timer.wait().unwrap();
    assert!(!timer.is_set());
}
