//! Both halves of the paravirtual PMU under loom: every interleaving of overflows that the host reports with a
//! guest's handler and doorbells, and every value that the memory model lets a load return.
//!
//! Invariants, checked at the end of each: an interrupt announced every overflow; every interrupt was the device's own
//! and the only one on its way; whoever sees an overflow sees its count. Each rule that is left out on purpose must
//! break an invariant.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p vpmu --test paravirt_loom`
#![cfg(loom)]

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};

use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Report};
use vpmu::paravirt::{Device, GuestHalf, Offer, Page, command, flag, word};
use vpmu::x86::{CounterConfig, EventFilter};

const PERIOD: u64 = 100;
const COUNTER: Counter = Counter::at::<0>();

/// A guest's action between two NMIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// Takes an NMI if there is one.
    Handle,
    /// Takes an NMI at a moment at which its handler must not run, and asks for it again.
    Defer,
    /// Rings the doorbell to read.
    Read,
    /// Rings the doorbell to apply the same wishes again.
    Apply,
}

const ACTS: [Act; 4] = [Act::Handle, Act::Defer, Act::Read, Act::Apply];

/// The protocol with a rule left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    None,
    /// No full barrier in the host between publishing and its read of `ACK`.
    HostFence,
    /// No full barrier in the guest between its `ACK` and its read of the overflows.
    GuestFence,
    /// The host's stores are not ordered.
    HostStores,
    /// The guest writes `ACK` after that read instead of before.
    LateAck,
}

/// One side's view of the words that counter 0 and the device have.
struct View<'a> {
    words: &'a BTreeMap<usize, AtomicU64>,
    fence: bool,
    store: Ordering,
    /// Whether a store of `ACK` is kept back.
    late_ack: bool,
}

impl Page for View<'_> {
    fn load(&self, word: usize) -> u64 {
        let word = self.words.get(&word);
        word.map_or(0, |word| word.load(Ordering::Acquire))
    }
    fn store(&self, word: usize, value: u64) {
        if self.late_ack && word == word::ACK {
            return;
        }
        if let Some(word) = self.words.get(&word) {
            word.store(value, self.store);
        }
    }
    fn fence(&self) {
        if self.fence {
            fence(Ordering::SeqCst);
        }
    }
}

/// The count of counter 0.
#[derive(Default)]
struct Clock(u64);

impl CounterHost<CounterConfig> for Clock {
    fn create(&mut self, _: Counter, _: &CounterConfig) -> Result<(), Lost> {
        Ok(())
    }
    fn set_period(&mut self, _: Counter, _: Option<std::num::NonZeroU64>) {}
    fn resume(&mut self, _: CounterSet) {}
    fn pause(&mut self, _: CounterSet) {}
    fn read(&mut self, _: Counter) -> u64 {
        self.0
    }
    fn release(&mut self, _: Counter) {}
    fn repeats(&self) -> bool {
        true
    }
}

struct Machine {
    words: BTreeMap<usize, AtomicU64>,
    host: Mutex<(Device, Clock)>,
    nmi: AtomicBool,
    mutation: Mutation,
}

impl Machine {
    fn new(mutation: Mutation) -> Self {
        let used = (0..3).chain(8..11).chain(32..37).chain(40..46);
        Self {
            words: used.map(|word| (word, AtomicU64::new(0))).collect(),
            host: Mutex::new((
                Device::new(Offer {
                    counters: 1,
                    events: 1,
                    rings: true,
                    raw: false,
                    filter: EventFilter::default(),
                })
                .unwrap(),
                Clock::default(),
            )),
            nmi: AtomicBool::new(false),
            mutation,
        }
    }

    fn host_view(&self) -> View<'_> {
        View {
            words: &self.words,
            fence: self.mutation != Mutation::HostFence,
            store: match self.mutation {
                Mutation::HostStores => Ordering::Relaxed,
                _ => Ordering::Release,
            },
            late_ack: false,
        }
    }

    fn guest_view(&self) -> View<'_> {
        View {
            words: &self.words,
            fence: self.mutation != Mutation::GuestFence,
            store: Ordering::Release,
            late_ack: self.mutation == Mutation::LateAck,
        }
    }

    /// Runs `body` on the device, one caller at a time. The device's writes travel to the guest meanwhile.
    fn device(&self, body: impl FnOnce(&mut Device, &mut Clock, &View<'_>)) {
        let mut host = self.host.lock().unwrap();
        let (device, clock) = &mut *host;
        body(device, clock, &self.host_view());
        if device.take_nmi() {
            let before = self.nmi.swap(true, Ordering::AcqRel);
            assert!(!before, "two NMIs on their way");
        }
    }

    fn ring(&self, bits: u64) {
        self.device(|device, clock, view| {
            let _ = device.doorbell(bits, clock, Some(view));
        });
    }

    fn overflow(&self) {
        self.device(|device, clock, view| {
            clock.0 += PERIOD;
            device.overflow(COUNTER, Report::Due, clock, Some(view));
        });
    }

    /// Runs the handler, if an NMI has come.
    fn handle(&self, guest: &mut GuestHalf) {
        if !self.nmi.swap(false, Ordering::AcqRel) {
            return;
        }
        let view = self.guest_view();
        let seen = guest.interrupt(&view);
        assert!(seen.is_some(), "an NMI of nobody's");
        if self.mutation == Mutation::LateAck {
            self.words[&word::ACK].store(view.load(word::SEQ), Ordering::Release);
        }
        let overflows = view.load(word::overflows(COUNTER));
        let count = view.load(word::count(COUNTER));
        assert!(count >= overflows * PERIOD, "an overflow without its count");
    }

    fn guest(&self, acts: &[Act], guest: &mut GuestHalf) {
        for act in acts {
            match act {
                Act::Handle => self.handle(guest),
                Act::Defer => {
                    if self.nmi.swap(false, Ordering::AcqRel) {
                        self.ring(command::INJECT);
                    }
                }
                Act::Read => self.ring(command::READ),
                Act::Apply => self.ring(command::APPLY),
            }
        }
    }
}

fn run(acts: &[Act], overflows: u64, mutation: Mutation) {
    let machine = Arc::new(Machine::new(mutation));
    let mut guest = GuestHalf::new();
    let view = machine.guest_view();
    let flags = flag::USER | flag::KERNEL | flag::INTERRUPT;
    guest.prepare(&view);
    guest.wish(&view, COUNTER, 0x3c, flags, PERIOD, PERIOD);
    guest.want(&view, CounterSet::of(COUNTER));
    machine.device(|device, clock, view| device.attach(clock, view).unwrap());
    machine.ring(command::APPLY);
    let host = Arc::clone(&machine);
    let reports = thread::spawn(move || (0..overflows).for_each(|_| host.overflow()));
    machine.guest(acts, &mut guest);
    reports.join().unwrap();
    // The NMI that is on its way arrives.
    machine.handle(&mut guest);
    machine.handle(&mut guest);
    let published = machine.words[&word::overflows(COUNTER)].load(Ordering::SeqCst);
    assert_eq!(published, overflows, "an overflow was not counted");
    // A further NMI would find only overflows that were announced too late, or never.
    machine.nmi.store(true, Ordering::SeqCst);
    let view = machine.guest_view();
    machine.words[&word::ACK].store(u64::MAX, Ordering::SeqCst);
    let unseen = guest.interrupt(&view).expect("a made-up NMI");
    assert!(unseen.is_empty(), "an overflow that no interrupt announced");
}

fn check(acts: &[Act], overflows: u64, mutation: Mutation) {
    let acts = acts.to_vec();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = None;
    builder.check(move || run(&acts, overflows, mutation));
}

fn scripts(length: u32) -> impl Iterator<Item = Vec<Act>> {
    (0..4_usize.pow(length)).map(move |n| (0..length).map(|i| ACTS[n >> (2 * i) & 3]).collect())
}

#[test]
fn no_overflow_is_lost_and_none_announced_twice() {
    for acts in (0..=2).flat_map(scripts) {
        check(&acts, 2, Mutation::None);
    }
}

#[test]
fn longer_scripts() {
    for acts in scripts(3) {
        check(&acts, 1, Mutation::None);
    }
}

/// Runs scripts until one of them notices `mutation`, and returns that script's message.
fn bites(mutation: Mutation) -> String {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let said = (1..=2).flat_map(scripts).find_map(|acts| {
        let checked = panic::catch_unwind(AssertUnwindSafe(|| check(&acts, 2, mutation)));
        let payload = checked.err()?;
        let text = payload.downcast_ref::<String>().cloned();
        text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
    });
    panic::set_hook(hook);
    eprintln!("{mutation:?}: {said:?}");
    said.unwrap_or_default()
}

/// Checks that the invariants notice each mutation.
#[test]
fn each_rule_is_needed() {
    assert!(bites(Mutation::HostFence).contains("no interrupt announced"));
    assert!(bites(Mutation::GuestFence).contains("no interrupt announced"));
    assert!(bites(Mutation::HostStores).contains("without its count"));
    assert!(bites(Mutation::LateAck).contains("no interrupt announced"));
}
