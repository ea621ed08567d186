//! The engine and a [`Reference`] side by side: one step on both, then a comparison.
//!
//! Invariants, each checked after every step:
//!
//! - **same registers**: every MSR reads the same in the engine and in the reference.
//! - **PMI on time**: once the host's reports are delivered, the engine has a PMI due if and only
//!   if the reference has.
//! - **PMI never early**: before that, the engine has one due only if the reference has.
//! - **comparing disturbs nothing**: these are checked on copies, so work that the engine puts off
//!   stays put off.
//! - **put stops**: after a put no host event runs.
//! - **put settles**: after a put the PMI needs no report to be due.
//! - **orderly**: the host is called in the order `CounterHost` promises (the fake host checks it).
//! - **same records**: the guest's memory is the same, and so is the outcome of each overflow.
//! - **quiet**: a report is asked for only for a counter that asks for an interrupt.
//! - **honest loss**: a counter is lost only if the host refused it or nobody could count it, and
//!   refusals are counted.

use crate::guest::FakeGuest;
use crate::pebs_reference::Pebs;
use crate::support::{Call, FakeHost, Happening, nth};
use vpmu::counter::{Counter, CounterSet, CounterState, Lost, Report};
use vpmu::x86::{ArchEvent, Capability, CounterConfig, EventFilter, Outcome, Pmu, PmuConfig, Ring};

/// A vendor's PMU as naive as its manual's text. It numbers counters as the engine does.
pub(crate) trait Reference: Clone {
    fn of(capability: Capability) -> Self;
    fn read(&self, address: u32) -> Outcome;
    fn write(&mut self, address: u32, value: u64) -> Outcome;
    fn rdpmc(&self, ecx: u32, ring: Ring, pce: bool) -> Outcome;
    /// Counts `what` `times` times, all at once, whether or not the guest runs.
    fn emulate(&mut self, what: Happening, ring: Ring, times: u64);
    /// Returns the meaning of `event` to a guest of this vendor's.
    fn happening(event: ArchEvent) -> Option<Happening>;
    /// Returns whether a PMI has been requested that nobody has taken.
    fn pmi(&mut self) -> &mut bool;
    /// Makes these counters count nothing, because the host has nothing for them.
    fn lose(&mut self, lost: CounterSet);
    /// Makes some events count nothing, or makes all events count, and returns the engine's filter for that.
    fn deny(&mut self, deny: bool) -> EventFilter;
    /// Returns whether a PMI request stops the counters.
    fn freezes(&self) -> bool;
    /// Returns the writer of records, with the guest's memory.
    fn pebs(&mut self) -> Option<&mut Pebs> {
        None
    }
    /// Returns whether the host is not even asked to back an enabled `n`.
    fn unsupported(&self, n: u8) -> bool;
    fn interrupts(&self, n: u8) -> bool;
    /// Returns every MSR of the PMU, and some others.
    fn addresses() -> Vec<u32>;
}

/// A counter that is further from its overflow than this is read by the end of a slice at the
/// latest. This many events take longer than a slice.
const MORE_THAN_A_SLICE: u64 = 1 << 32;

/// Number of overflows, of counters that ask for records, that are noticed one by one.
const MOST_OVERFLOWS: u32 = 40;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// RDMSR.
    Read(u32),
    /// WRMSR.
    Write(u32, u64),
    /// RDPMC at a ring, with CR4.PCE or without.
    Rdpmc(u32, Ring, bool),
    /// The guest does this so many times.
    Happen(Happening, Ring, u64),
    /// The embedder emulates this so many times.
    Emulate(ArchEvent, Ring, u64),
    /// The host's reports arrive, as far as they are in this mask.
    Deliver(u32, Report),
    /// A report comes too early, or for nothing. The report that was asked for will not come.
    Early(u8),
    /// The guest writes this value to its memory.
    Store(u64, u64),
    /// From now on the host cannot, or can again, read the guest's registers.
    Mute(bool),
    Put,
    Load,
    EndSlice,
    Filter(bool),
    Refuse(Option<Lost>),
    /// The local APIC takes the PMI that is due, if one is.
    TakePmi,
    /// Saves, and restores into a new PMU on a new host.
    Migrate,
}

/// The engine and its host.
#[derive(Clone)]
struct Guest {
    pmu: Pmu,
    host: FakeHost<CounterConfig>,
}

impl Guest {
    fn new(config: &PmuConfig) -> Self {
        Self {
            pmu: Pmu::new(config.clone()).expect("a possible configuration"),
            host: FakeHost::new(config.policy),
        }
    }

    /// Delivers the host's reports, and returns whether a PMI is due.
    fn interrupt(&mut self) -> bool {
        for (n, report) in self.host.take_reports(u32::MAX, Report::Due) {
            let _ = self.pmu.overflow(n, report, &mut self.host);
        }
        self.pmu.pmi_due()
    }

    fn lost(&self) -> CounterSet {
        let lost = |n: &u8| matches!(self.pmu.counter_state(nth(*n)), Some(CounterState::Lost(_)));
        (0..32)
            .filter(lost)
            .fold(CounterSet::EMPTY, |set, n| set | CounterSet::of(nth(n)))
    }
}

/// The engine and the reference, side by side.
pub(crate) struct Pair<R> {
    config: PmuConfig,
    guest: Guest,
    reference: R,
    loaded: bool,
}

impl<R: Reference> Pair<R> {
    /// Creates the pair. With `atomic`, the host pauses and reads in one operation; with `repeats`, its reports go on.
    /// With `prompt`, its reports arrive before every step.
    pub(crate) fn new(config: PmuConfig, atomic: bool, prompt: bool, repeats: bool) -> Self {
        let mut guest = Guest::new(&config);
        guest.host.atomic = atomic;
        guest.host.prompt = prompt;
        guest.host.repeats = repeats;
        guest.host.guest = Some(FakeGuest::new());
        Self {
            guest,
            reference: R::of(config.capability),
            loaded: true,
            config,
        }
    }

    /// Performs `step` on both.
    ///
    /// # Panics
    ///
    /// When an invariant breaks.
    pub(crate) fn step(&mut self, step: &Step) {
        self.perform(step);
        self.check(step);
    }

    fn perform(&mut self, step: &Step) {
        if self.guest.host.prompt {
            self.guest.interrupt();
            // The step may withdraw the wish for an interrupt.
            self.check_quiet(step);
        }
        self.reference.lose(self.guest.lost());
        let Self {
            guest: Guest { pmu, host },
            reference,
            loaded,
            ..
        } = self;
        match *step {
            Step::Read(address) => {
                let read = pmu.rdmsr(address, host);
                assert_eq!(read, reference.read(address), "{step:?}");
            }
            Step::Write(address, value) => {
                let written = pmu.wrmsr(address, value, host);
                assert_eq!(written, reference.write(address, value), "{step:?}");
            }
            Step::Rdpmc(ecx, ring, pce) => {
                let read = pmu.rdpmc(ecx, ring, pce, host);
                assert_eq!(read, reference.rdpmc(ecx, ring, pce), "{step:?}");
            }
            Step::Happen(what, ring, times) => self.happen(what, ring, times),
            Step::Store(address, value) => self.both(|guest| guest.store(address, value)),
            Step::Mute(mute) => self.both(|guest| guest.is_mute = mute),
            Step::Emulate(event, ring, times) => {
                let Some(what) = R::happening(event) else {
                    return;
                };
                let due = pmu.emulated(event, times, ring, host);
                reference.emulate(what, ring, times);
                assert!(!due || *reference.pmi(), "PMI never early: {step:?}");
            }
            Step::Deliver(mask, wished) => {
                for (n, report) in host.take_reports(mask, wished) {
                    let _ = pmu.overflow(n, report, host);
                }
            }
            Step::Early(n) => {
                // A host that repeats goes on.
                if !host.prompt && !host.repeats {
                    host.forget(n);
                }
                // A host has no counters of other numbers to report.
                if let Some(counter) = Counter::new(n) {
                    host.lose_report(counter);
                    let _ = pmu.overflow(counter, Report::Unsure, host);
                }
            }
            Step::Put => {
                pmu.put(host);
                *loaded = false;
                assert!(host.running().is_empty(), "put stops");
                assert_eq!(pmu.pmi_due(), *reference.pmi(), "put settles");
            }
            Step::Load => {
                pmu.load(host);
                *loaded = true;
            }
            Step::EndSlice => pmu.end_slice(host),
            Step::Filter(deny) => {
                self.config.filter = reference.deny(deny);
                pmu.set_filter(self.config.filter, host);
            }
            Step::Refuse(refuse) => host.refuse = refuse,
            Step::TakePmi => {
                self.guest.interrupt();
                let taken = self.guest.pmu.take_pmi();
                let reference = std::mem::take(self.reference.pmi());
                assert_eq!(taken, reference, "one PMI each: {step:?}");
            }
            Step::Migrate => self.migrate(),
        }
    }

    fn happen(&mut self, what: Happening, ring: Ring, times: u64) {
        self.both(|guest| guest.go_on(ring, times));
        let counts = |config: &CounterConfig| what.is_counted_by(config, ring);
        if self.records() {
            // A record describes a moment, so overflows are delivered one by one as long as they are few. Overflows
            // that the host was not asked for are too far away.
            let mut left = times.min(MORE_THAN_A_SLICE - 1);
            for _ in 0..MOST_OVERFLOWS {
                let due = self.guest.host.soonest(counts);
                let Some(due) = due.filter(|&due| due < left) else {
                    break;
                };
                self.count(what, ring, due);
                self.deliver(Report::Due);
                left -= due;
            }
            self.count(what, ring, left);
            // A counter that has counted several periods by now is read, and has one record for them.
            self.deliver(Report::Unsure);
        } else {
            self.count(what, ring, times);
        }
        let freezes = self.reference.freezes();
        if times >= MORE_THAN_A_SLICE {
            // No report is late by a slice. A counter that passes its end several times in so many
            // events has reported, and is read, before anything else happens.
            self.guest.interrupt();
            let Guest { pmu, host } = &mut self.guest;
            pmu.end_slice(host);
        }
        if freezes {
            // Counters stop with the interrupt, not before it, so the interrupt arrives at once.
            self.guest.interrupt();
        }
    }

    fn count(&mut self, what: Happening, ring: Ring, times: u64) {
        self.reference.lose(self.guest.lost());
        if self.loaded {
            self.reference.emulate(what, ring, times);
        }
        let host = &mut self.guest.host;
        host.count(times, |config| what.is_counted_by(config, ring));
    }

    fn deliver(&mut self, wished: Report) {
        let Guest { pmu, host } = &mut self.guest;
        for (n, report) in host.take_reports(u32::MAX, wished) {
            let _ = pmu.overflow(n, report, host);
        }
    }

    /// Returns whether a counter asks for records.
    fn records(&mut self) -> bool {
        self.reference.pebs().is_some_and(|pebs| pebs.enable != 0)
    }

    /// Applies `change` to the engine's guest and to the reference's.
    fn both(&mut self, change: impl Fn(&mut FakeGuest)) {
        let engines = self.guest.host.guest.as_mut();
        let references = self.reference.pebs().map(|pebs| &mut pebs.guest);
        engines.into_iter().chain(references).for_each(change);
    }

    /// Goes on from a saved state on another host.
    fn migrate(&mut self) {
        let Guest { pmu, host } = &mut self.guest;
        let state = pmu.save(host);
        let mut next = Guest::new(&self.config);
        next.host.refuse = host.refuse;
        next.host.atomic = host.atomic;
        next.host.prompt = host.prompt;
        next.host.repeats = host.repeats;
        next.host.guest = host.guest.take();
        if let Some(pebs) = self.reference.pebs() {
            pebs.statistics = Default::default();
        }
        if !self.loaded {
            next.pmu.put(&mut next.host);
        }
        next.pmu
            .restore(&state, &mut next.host)
            .expect("the same kind of PMU");
        assert_eq!(next.pmu.save(&mut next.host), state);
        self.guest = next;
    }

    fn check(&mut self, step: &Step) {
        let mut copy = self.guest.clone();
        let due = *self.reference.pmi();
        assert!(!copy.pmu.pmi_due() || due, "PMI never early: {step:?}");
        assert_eq!(copy.interrupt(), due, "PMI on time: {step:?}");

        // Reading one register settles things for the next, so registers are read in both orders.
        let mut addresses = R::addresses();
        for _ in 0..2 {
            let mut copy = self.guest.clone();
            if copy.host.prompt {
                copy.interrupt();
            }
            for &address in &addresses {
                let engine = copy.pmu.rdmsr(address, &mut copy.host);
                let reference = self.reference.read(address);
                assert_eq!(
                    engine, reference,
                    "same registers: {address:#x} after {step:?}"
                );
            }
            addresses.reverse();
        }

        if let Some(pebs) = self.reference.pebs() {
            let same = copy.host.guest.as_ref() == Some(&pebs.guest);
            assert!(same, "same records: memory after {step:?}");
            let statistics = copy.pmu.pebs_statistics();
            assert_eq!(statistics, pebs.statistics, "same records after {step:?}");
        }
        self.check_quiet(step);
        assert_eq!(
            self.guest.pmu.statistics().lost,
            self.guest.host.refused,
            "honest loss"
        );
        for n in self.guest.lost() {
            assert!(
                self.guest.host.refused > 0 || self.reference.unsupported(n.number()),
                "honest loss: {n} after {step:?}"
            );
        }
    }

    /// Checks the calls since the last time, made under the registers as they are.
    fn check_quiet(&mut self, step: &Step) {
        for call in self.guest.host.calls() {
            if let Call::SetPeriod(n, Some(_)) = call {
                assert!(self.reference.interrupts(n), "quiet: {n} after {step:?}");
            }
        }
    }
}
