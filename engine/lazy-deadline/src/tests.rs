//! Both halves under loom: every interleaving of a guest's writes with the host's expiries, and
//! every value that the memory model lets a load return.
//!
//! Each script is an armed deadline of 100, up to three writes of the guest, and the TSC passing
//! some of the marks 100, 200, 300, with the host's timer expiring at each. What fired in the end is
//! compared with a plain IA32_TSC_DEADLINE: it must be what that would have fired, had the TSC
//! passed the marks at *some* points between the writes. That is the three promises at once:
//! a lost, an early or a repeated interrupt is in none of these lists.

extern crate std;

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::string::String;
use std::sync::Arc as StdArc;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering::Relaxed};
use std::vec::Vec;
use std::{eprintln, panic, vec};

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::sync::Fence;
use super::sync::mutation::without;
use super::*;

/// A guest's request: a deadline, or `CANCEL` without an exit, or `DISABLE` with one.
type Ask = u64;
const CANCEL: Ask = u64::MAX;
const DISABLE: Ask = 0;

/// What a guest may ask for around the marks: past, due with the armed one, between two marks, and
/// due later.
const ASKS: [Ask; 6] = [90, 100, 150, 200, 300, CANCEL];
/// One of each kind.
const FEW_ASKS: [Ask; 4] = [90, 150, 200, CANCEL];
/// The same with 0.
const DISABLING_ASKS: [Ask; 4] = [90, 200, CANCEL, DISABLE];
const ARMED: u64 = 100;
const START: u64 = 95;
const END: u64 = 1_000;

#[derive(Default)]
struct Clock {
    tsc: u64,
    armed: Option<u64>,
}

impl HostTimer for Clock {
    fn now(&mut self) -> u64 {
        self.tsc
    }
    fn host_clock(&mut self) -> u64 {
        self.tsc
    }
    fn arm(&mut self, deadline: u64) {
        self.armed = Some(deadline);
    }
    fn disarm(&mut self) {
        self.armed = None;
    }
}

/// A protocol with something left out, to show that the check would notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    None,
    Omit(Fence),
    /// The host forgets what it fired.
    Forget,
}

impl Mutation {
    fn omitted(self) -> Option<Fence> {
        match self {
            Self::Omit(fence) => Some(fence),
            Self::None | Self::Forget => None,
        }
    }
}

/// What is behind the local APIC's lock, and what came out.
struct Host {
    timer: DeadlineTimer,
    clock: Clock,
    fired: Vec<u64>,
    mutation: Mutation,
}

impl Host {
    fn act(&mut self, verdict: Verdict) {
        if let Verdict::Inject(deadline) = verdict {
            assert!(deadline <= self.clock.tsc, "fired before its time");
            self.fired.push(deadline);
        }
    }

    /// The host's timer expires, if the TSC has got there.
    fn expire(&mut self, slot: SlotRef<'_>) {
        if self.clock.armed.is_some_and(|at| at <= self.clock.tsc) {
            self.clock.armed = None;
            let verdict = self.timer.expire(Some(slot), &mut self.clock);
            self.act(verdict);
            if self.mutation == Mutation::Forget && verdict != Verdict::Quiet {
                // Sharing anew forgets what fired; with nothing armed it does nothing else.
                self.timer.attach(slot).expect("a prepared slot");
            }
        }
    }
}

struct Machine {
    slot: Slot,
    host: Mutex<Host>,
}

struct Cpu<'a>(&'a Machine);

impl GuestCpu for Cpu<'_> {
    fn tsc(&mut self) -> u64 {
        self.0.host.lock().expect("no panic elsewhere").clock.tsc
    }
    fn write_deadline(&mut self, deadline: u64) {
        let mut host = self.0.host.lock().expect("no panic elsewhere");
        let Host { timer, clock, .. } = &mut *host;
        let verdict = timer.write(deadline, Some(self.0.slot.words()), clock);
        host.act(verdict);
    }
}

impl Machine {
    fn new(mutation: Mutation) -> Self {
        let slot = Slot::default();
        let mut clock = Clock {
            tsc: START,
            armed: None,
        };
        let mut timer = DeadlineTimer::new();
        timer.set_lvt(LvtTimer::decode(0x4_00ec), None, &mut clock);
        ParavirtualTimer::new().prepare(slot.words());
        timer.attach(slot.words()).expect("a prepared slot");
        Self {
            slot,
            host: Mutex::new(Host {
                timer,
                clock,
                fired: Vec::new(),
                mutation,
            }),
        }
    }

    fn ask(&self, guest: &mut ParavirtualTimer, ask: Ask) {
        match ask {
            CANCEL => guest.cancel(self.slot.words()),
            deadline => {
                let _ = guest.set(deadline, self.slot.words(), &mut Cpu(self));
            }
        }
    }
}

/// One interleaving: returns what fired.
fn run(asks: &[Ask], marks: &'static [u64], mutation: Mutation) -> Vec<u64> {
    let machine = Arc::new(Machine::new(mutation));
    let mut guest = ParavirtualTimer::new();
    machine.ask(&mut guest, ARMED);
    let host = {
        let machine = Arc::clone(&machine);
        thread::spawn(move || {
            for &mark in marks {
                // The clock goes on whether or not the host has taken notice.
                machine.host.lock().expect("no panic elsewhere").clock.tsc = mark;
                let mut host = machine.host.lock().expect("no panic elsewhere");
                host.expire(machine.slot.words());
            }
        })
    };
    for &ask in asks {
        machine.ask(&mut guest, ask);
        if ask == DISABLE {
            let fired = |machine: &Machine| machine.host.lock().expect("no panic").fired.len();
            let before = fired(&machine);
            thread::yield_now();
            assert_eq!(fired(&machine), before, "fired after it was disabled");
        }
    }
    host.join().expect("no panic elsewhere");
    let mut host = machine.host.lock().expect("no panic elsewhere");
    // Two more expiries: one may find a later deadline, and that one must be due at the end.
    host.clock.tsc = END;
    for _ in 0..2 {
        host.expire(machine.slot.words());
    }
    assert_eq!(host.clock.armed, None, "still armed at the end");
    host.fired.clone()
}

/// What a plain timer fires, for every way in which the marks may fall between the asks.
fn allowed(asks: &[Ask], marks: &[u64]) -> BTreeSet<Vec<u64>> {
    fn go(
        asks: &[Ask],
        marks: &[u64],
        now: u64,
        armed: u64,
        fired: &[u64],
        all: &mut BTreeSet<Vec<u64>>,
    ) {
        let mut fired = fired.to_vec();
        let mut armed = armed;
        if armed != 0 && armed <= now {
            fired.push(armed);
            armed = 0;
        }
        if let [mark, rest @ ..] = marks {
            go(asks, rest, *mark, armed, &fired, all);
        }
        match asks {
            [ask, rest @ ..] => {
                let armed = if *ask == CANCEL { 0 } else { *ask };
                go(rest, marks, now, armed, &fired, all);
            }
            [] if marks.is_empty() => {
                if armed != 0 {
                    fired.push(armed);
                }
                all.insert(fired);
            }
            [] => {}
        }
    }
    let mut all = BTreeSet::new();
    go(asks, marks, START, ARMED, &[], &mut all);
    all
}

/// Every interleaving of one script; panics at the first that a plain timer would not have.
/// Returns how many there were.
fn check(asks: &[Ask], marks: &'static [u64], mutation: Mutation) -> u64 {
    let allowed = allowed(asks, marks);
    let asks = asks.to_vec();
    let count = StdArc::new(StdAtomicU64::new(0));
    let counter = StdArc::clone(&count);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = None;
    without(mutation.omitted(), || {
        builder.check(move || {
            counter.fetch_add(1, Relaxed);
            let fired = run(&asks, marks, mutation);
            assert!(
                allowed.contains(&fired),
                "{asks:?} fired {fired:?}, a plain timer {allowed:?}"
            );
        });
    });
    count.load(Relaxed)
}

fn scripts(asks: &[Ask], writes: usize) -> Vec<Vec<Ask>> {
    (0..writes).fold(vec![Vec::new()], |scripts, _| {
        scripts
            .iter()
            .flat_map(|script| {
                asks.iter().map(move |&ask| {
                    let mut longer = script.clone();
                    longer.push(ask);
                    longer
                })
            })
            .collect()
    })
}

fn check_all(name: &str, asks: &[Ask], writes: usize, marks: &'static [u64]) {
    let scripts = scripts(asks, writes);
    let begin = std::time::Instant::now();
    let interleavings: u64 = scripts
        .iter()
        .map(|script| check(script, marks, Mutation::None))
        .sum();
    eprintln!(
        "{name}: {} scripts, {interleavings} interleavings, {:.1?}",
        scripts.len(),
        begin.elapsed()
    );
}

#[test]
fn one_write() {
    check_all("one write, one expiry", &ASKS, 1, &[100]);
}

#[test]
fn two_writes() {
    check_all("two writes, one expiry", &ASKS, 2, &[100]);
}

#[test]
fn three_writes() {
    check_all("three writes, one expiry", &ASKS, 3, &[100]);
}

/// What one expiry has moved, the next finds: also a deadline that fires between the guest's read
/// and its write.
#[test]
fn two_writes_two_expiries() {
    check_all("two writes, two expiries", &ASKS, 2, &[100, 200]);
}

#[test]
fn three_writes_two_expiries() {
    check_all("three writes, two expiries", &FEW_ASKS, 3, &[100, 200]);
}

#[test]
#[ignore = "takes minutes; the tests beside it have each pair of asks in it"]
fn three_writes_two_expiries_all() {
    check_all("three writes, two expiries, all", &ASKS, 3, &[100, 200]);
}

/// A write of 0 is final.
#[test]
fn disabled() {
    check_all("writes of 0, two expiries", &DISABLING_ASKS, 2, &[100, 200]);
}

/// The scripts that notice `mutation`, and what the first of them says.
fn bites(mutation: Mutation, marks: &'static [u64]) -> (usize, String) {
    let mut said = String::new();
    let mut failed = 0;
    for script in scripts(&ASKS, 1).iter().chain(&scripts(&ASKS, 2)) {
        let checked = panic::catch_unwind(AssertUnwindSafe(|| check(script, marks, mutation)));
        if let Err(payload) = checked {
            failed += 1;
            if let (true, Some(text)) = (said.is_empty(), payload.downcast_ref::<String>()) {
                said.clone_from(text);
            }
        }
    }
    eprintln!("{mutation:?}: {failed} of 42 scripts fail, the first: {said}");
    (failed, said)
}

/// The check would notice: without the guest's barrier, a deadline is lost.
#[test]
fn without_the_guests_fence_a_deadline_is_lost() {
    let (failed, said) = bites(Mutation::Omit(Fence::Guest), &[100]);
    assert!(failed > 0);
    assert!(
        said.contains("[150] fired [100], a plain timer {[100, 150], [150]}"),
        "{said}"
    );
}

#[test]
fn without_the_hosts_fence_a_deadline_is_lost() {
    let (failed, said) = bites(Mutation::Omit(Fence::Host), &[100]);
    assert!(failed > 0);
    assert!(
        said.contains("[150] fired [100], a plain timer {[100, 150], [150]}"),
        "{said}"
    );
}

#[test]
fn without_remembering_what_fired_it_fires_twice() {
    let (failed, said) = bites(Mutation::Forget, &[100, 200]);
    assert!(failed > 0);
    assert!(said.contains("[90] fired [90, 90]"), "{said}");
}
