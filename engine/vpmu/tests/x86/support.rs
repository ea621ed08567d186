//! A host of plain numbers. It counts when a test says that the guest did something, writes down
//! every call, and fails the test when the engine breaks the order of calls that
//! [`CounterHost`] promises.

// Fuzz targets take this file from elsewhere.
#[path = "happening.rs"]
mod happening;

use std::num::NonZeroU64;

use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Policy, Report, Slots};
use vpmu::x86::intel::{Capability, Msr, Version};
use vpmu::x86::pebs::{Sample, TakenSamples};
use vpmu::x86::{
    CounterConfig, Outcome, Pmu, PmuConfig, PmuState, RestoreError, Ring, intel, pebs,
};

use crate::guest::FakeGuest;
use crate::samples::Samples;
pub(crate) use happening::Happening;

/// One call of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call<E> {
    Create(u8, E),
    SetPeriod(u8, Option<u64>),
    Resume(CounterSet),
    Pause(CounterSet),
    Read(u8),
    Release(u8),
}

#[derive(Clone, Debug)]
struct Backing<E> {
    event: E,
    running: bool,
    total: u64,
    due: Option<u64>,
    /// The period, which `due` begins anew where the host repeats.
    period: Option<u64>,
    deficit: Option<Lost>,
    samples: Samples,
}

#[derive(Clone, Debug)]
pub(crate) struct FakeHost<E> {
    counters: [Option<Backing<E>>; 32],
    /// Overflow reports that nobody has taken yet.
    pub(crate) reports: CounterSet,
    /// The reports that are for the period last asked for.
    current: CounterSet,
    /// Every call since the last [`calls`](Self::calls).
    pub(crate) calls: Vec<Call<E>>,
    /// The host's answer to every create.
    pub(crate) refuse: Option<Lost>,
    pub(crate) refused: u64,
    /// Whether pausing and reading is one operation.
    pub(crate) atomic: bool,
    /// Whether reports are delivered before each access.
    pub(crate) prompt: bool,
    /// Whether a report is followed by others.
    pub(crate) repeats: bool,
    /// Whether pausing a paused counter is no mistake.
    pub(crate) pauses_twice: bool,
    /// The number of calls from here to the one that fails.
    pub(crate) fail_in: Option<u32>,
    /// Whether that call has failed.
    pub(crate) failed: bool,
    /// The guest that PEBS records describe, and whose memory they go to.
    pub(crate) guest: Option<FakeGuest>,
    /// How many samples the host keeps of a counter; 0: it takes none.
    pub(crate) keeps: u64,
    /// Whether the vCPU's thread is outside its guest.
    pub(crate) outside: u64,
    /// Whether branches are handed over only while a PMI waits for them.
    pub(crate) follows: bool,
}

impl<E> Default for FakeHost<E> {
    fn default() -> Self {
        Self {
            counters: [const { None }; 32],
            reports: CounterSet::EMPTY,
            current: CounterSet::EMPTY,
            calls: Vec::new(),
            refuse: None,
            refused: 0,
            atomic: false,
            prompt: false,
            repeats: false,
            pauses_twice: false,
            fail_in: None,
            failed: false,
            guest: None,
            keeps: 0,
            outside: 0,
            follows: false,
        }
    }
}

impl<E: Copy + std::fmt::Debug> FakeHost<E> {
    /// Returns a host for an engine with this policy.
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            pauses_twice: policy == Policy::Reuse,
            ..Self::default()
        }
    }

    /// Lets an event that `counts` accepts happen `times` times.
    pub(crate) fn count(&mut self, times: u64, counts: impl Fn(&E) -> bool) {
        for (n, counter) in (0..).zip(&mut self.counters) {
            let Some(counter) = counter else { continue };
            if counter.running && counts(&counter.event) {
                let place = self.guest.as_ref().map(|guest| guest.sample);
                if let Some(place) = place {
                    counter.samples.sample(times, place, self.keeps);
                }
                counter.total = counter.total.wrapping_add(times);
                match counter.due {
                    Some(due) if due <= times => {
                        let beyond = times - due;
                        counter.due = None;
                        self.current.insert(nth(n));
                        if let Some(period) = counter.period.filter(|_| self.repeats) {
                            counter.due = Some(period - beyond % period);
                            // A report tells of one period.
                            if beyond >= period || self.reports.contains(nth(n)) {
                                self.current.remove(nth(n));
                            }
                        }
                        self.reports.insert(nth(n));
                    }
                    due => counter.due = due.map(|due| due - times),
                }
            }
        }
    }

    /// Takes no more samples of `n`, as a kernel that throttles.
    pub(crate) fn throttle(&mut self, n: u8) {
        self.counter(n).samples.end();
    }

    /// Returns the period with which `n` is sampled.
    pub(crate) fn sampled(&self, n: u8) -> Option<u64> {
        let counter = self.counters.get(usize::from(n))?.as_ref()?;
        counter.samples.period()
    }

    /// Cancels the report that `n` was asked for.
    pub(crate) fn forget(&mut self, n: u8) {
        if let Some(Some(counter)) = self.counters.get_mut(usize::from(n)) {
            (counter.due, counter.period) = (None, None);
        }
    }

    /// Drops the report of `n` that has not been taken.
    pub(crate) fn lose_report(&mut self, n: Counter) {
        self.reports -= n.alone();
    }

    /// Returns how many events that `counts` accepts are left until the next report of such a
    /// counter.
    pub(crate) fn soonest(&self, counts: impl Fn(&E) -> bool) -> Option<u64> {
        let concerned = |it: &&Backing<E>| it.running && counts(&it.event);
        let counters = self.counters.iter().flatten().filter(concerned);
        counters.filter_map(|counter| counter.due).min()
    }

    /// Returns the number of events until the report for `n`.
    pub(crate) fn due(&self, n: u8) -> Option<u64> {
        let counter = self.counters.get(usize::from(n))?.as_ref()?;
        counter.due
    }

    /// Makes `n` share its counter.
    pub(crate) fn multiplex(&mut self, n: u8) {
        self.counter(n).deficit = Some(Lost::Multiplexed);
    }

    /// Returns the calls since the last time.
    pub(crate) fn calls(&mut self) -> Vec<Call<E>> {
        std::mem::take(&mut self.calls)
    }

    /// Returns the reports that are there, each as `wished` if the host can honestly say that.
    pub(crate) fn take_reports(&mut self, mask: u32, wished: Report) -> Vec<(Counter, Report)> {
        let taken = self.reports & CounterSet::from_bits(mask);
        self.reports -= taken;
        let honest = |n| {
            if self.current.contains(n) {
                wished
            } else {
                Report::Unsure
            }
        };
        taken.iter().map(|n| (n, honest(n))).collect()
    }

    pub(crate) fn running(&self) -> CounterSet {
        self.which(|counter| counter.running)
    }

    pub(crate) fn created(&self) -> CounterSet {
        self.which(|_| true)
    }

    fn which(&self, wanted: impl Fn(&Backing<E>) -> bool) -> CounterSet {
        let mut set = CounterSet::EMPTY;
        for (n, counter) in (0..).zip(&self.counters) {
            if counter.as_ref().is_some_and(&wanted) {
                set.insert(nth(n));
            }
        }
        set
    }

    fn counter(&mut self, n: u8) -> &mut Backing<E> {
        self.counters[usize::from(n)]
            .as_mut()
            .expect("the counter was created before")
    }

    /// Writes `call` down, and returns whether it is the call that fails.
    fn note(&mut self, call: Call<E>) -> bool {
        self.calls.push(call);
        let fails = self.fail_in == Some(0);
        self.fail_in = self.fail_in.and_then(|calls| calls.checked_sub(1));
        self.failed |= fails;
        fails
    }
}

impl<E: Copy + std::fmt::Debug> CounterHost<E> for FakeHost<E> {
    fn create(&mut self, counter: Counter, event: &E) -> Result<(), Lost> {
        let fails = self.note(Call::Create(counter.number(), *event));
        let place = &mut self.counters[counter.index()];
        assert!(place.is_none(), "counter {counter} created twice");
        if let Some(reason) = self.refuse.or(fails.then_some(Lost::Failed)) {
            self.refused += 1;
            return Err(reason);
        }
        *place = Some(Backing {
            event: *event,
            running: false,
            total: 0,
            due: None,
            period: None,
            deficit: None,
            samples: Samples::every(None),
        });
        self.current.remove(counter);
        Ok(())
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        let events = events.map(NonZeroU64::get);
        let fails = self.note(Call::SetPeriod(counter.number(), events));
        self.current.remove(counter);
        // Where the call fails, the report never comes.
        let counter = self.counter(counter.number());
        counter.due = events.filter(|_| !fails);
        counter.period = counter.due;
    }

    fn resume(&mut self, counters: CounterSet) {
        let fails = self.note(Call::Resume(counters));
        assert!(!counters.is_empty());
        for n in counters {
            let counter = self.counter(n.number());
            assert!(!counter.running, "counter {n} resumed twice");
            counter.running = true;
            counter.deficit = counter.deficit.or(fails.then_some(Lost::Multiplexed));
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        self.note(Call::Pause(counters));
        assert!(!counters.is_empty());
        let again = self.pauses_twice;
        for n in counters {
            let counter = self.counter(n.number());
            assert!(counter.running || again, "counter {n} paused twice");
            counter.running = false;
        }
    }

    fn read(&mut self, counter: Counter) -> u64 {
        let fails = self.note(Call::Read(counter.number()));
        let counter = self.counter(counter.number());
        counter.deficit = counter.deficit.or(fails.then_some(Lost::Multiplexed));
        counter.total
    }

    fn release(&mut self, counter: Counter) {
        self.note(Call::Release(counter.number()));
        assert!(
            !self.counter(counter.number()).running,
            "counter {counter} released while it runs"
        );
        self.counters[counter.index()] = None;
        self.current.remove(counter);
    }

    fn pause_and_read(&mut self, counters: CounterSet, totals: &mut Slots<u64>) -> bool {
        if self.atomic {
            self.pause(counters);
            for n in counters {
                totals[n] = self.counter(n.number()).total;
            }
        }
        self.atomic
    }

    fn support_pebs(&mut self) -> Option<&mut dyn pebs::Host> {
        Some(self)
    }

    fn reports_promptly(&self) -> bool {
        self.prompt
    }

    fn repeats(&self) -> bool {
        self.repeats
    }

    fn follows_branches(&self) -> bool {
        self.follows
    }

    fn deficit(&self, counter: Counter) -> Option<Lost> {
        let counter = self.counters[counter.index()].as_ref()?;
        counter.deficit
    }
}

impl<E: Copy + std::fmt::Debug> pebs::Host for FakeHost<E> {
    fn guest(&mut self) -> Option<&mut dyn pebs::Guest> {
        Some(self.guest.as_mut()?)
    }

    fn begin_sampling(&mut self, counter: Counter, events: NonZeroU64) -> u64 {
        let keeps = self.keeps;
        let period = (keeps > 0).then_some(events.get());
        self.counter(counter.number()).samples = Samples::every(period);
        keeps
    }

    fn end_sampling(&mut self, counter: Counter) {
        self.counter(counter.number()).samples = Samples::every(None);
    }

    fn take_samples(&mut self, counter: Counter, samples: &mut [Sample]) -> TakenSamples {
        let outside = std::mem::take(&mut self.outside);
        let counter = self.counters.get_mut(counter.index());
        let taken = counter.and_then(|counter| Some(counter.as_mut()?.samples.take(samples)));
        taken.map_or(TakenSamples::NONE, |taken| TakenSamples {
            outside,
            ..taken
        })
    }
}

/// EN, INT, OS, USR.
pub(crate) const SAMPLE: u64 = 0x0053_0000;
pub(crate) const INSTRUCTIONS: u64 = 0xc0;
pub(crate) const CYCLES: u64 = 0x3c;
/// One above the largest value of a counter of 48 bits.
pub(crate) const END: u64 = 1 << 48;

/// A PMU, its host, and the guest's side of both.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) pmu: Pmu,
    pub(crate) host: FakeHost<CounterConfig>,
}

impl Guest {
    pub(crate) fn new(version: Version) -> Self {
        Self::with(PmuConfig::new(Capability::new(version)))
    }

    pub(crate) fn with_policy(policy: Policy) -> Self {
        Self::with(PmuConfig {
            policy,
            ..PmuConfig::new(Capability::new(Version::V2))
        })
    }

    pub(crate) fn with(config: PmuConfig) -> Self {
        let host = FakeHost::new(config.policy);
        let pmu = Pmu::new(config).expect("a possible configuration");
        Self { pmu, host }
    }

    pub(crate) fn read(&mut self, msr: Msr) -> u64 {
        match self.pmu.rdmsr(msr.address(), &mut self.host) {
            Outcome::Value(value) => value,
            other => panic!("read of {msr} ended {other:?}"),
        }
    }

    pub(crate) fn write(&mut self, msr: Msr, value: u64) {
        let outcome = self.pmu.wrmsr(msr.address(), value, &mut self.host);
        assert_eq!(outcome, Outcome::Done, "write of {value:#x} to {msr}");
    }

    pub(crate) fn save(&mut self) -> intel::PmuState {
        match self.pmu.save(&mut self.host) {
            PmuState::Intel(state) => state,
            PmuState::Amd(state) => panic!("saved {state:?}"),
        }
    }

    pub(crate) fn restore(&mut self, state: &intel::PmuState) -> Result<(), RestoreError> {
        self.pmu
            .restore(&PmuState::Intel(state.clone()), &mut self.host)
    }

    /// Lets the guest do `what` `times` times at `ring`. Reports wait for
    /// [`interrupt`](Self::interrupt).
    pub(crate) fn happen(&mut self, what: Happening, ring: Ring, times: u64) {
        self.host
            .count(times, |config| what.is_counted_by(config, ring));
    }

    pub(crate) fn execute(&mut self, times: u64) {
        self.happen(Happening::Instructions, Ring::User, times);
    }

    /// Delivers the host's reports, and returns whether a PMI is due.
    pub(crate) fn interrupt(&mut self) -> bool {
        for (n, report) in self.host.take_reports(u32::MAX, Report::Due) {
            let _ = self.pmu.overflow(n, report, &mut self.host);
        }
        self.pmu.pmi_due()
    }

    /// Delivers the host's reports, and takes the PMI if one is due.
    pub(crate) fn take_pmi(&mut self) -> bool {
        self.interrupt();
        self.pmu.take_pmi()
    }

    /// Makes general counter `n` sample `event` every `period` times, once the counter is enabled
    /// globally.
    pub(crate) fn sample(&mut self, n: u8, event: u64, period: u64) {
        self.write(Msr::FullWidthPmc(n), END - period);
        self.write(Msr::PerfEvtSel(n), SAMPLE | event);
    }
}

pub(crate) fn set<const N: usize>(counters: [u8; N]) -> CounterSet {
    counters
        .into_iter()
        .fold(CounterSet::EMPTY, |set, n| set | CounterSet::of(nth(n)))
}

/// Returns the counter of a number that a test knows to be one.
pub(crate) const fn nth(number: u8) -> Counter {
    Counter::new(number).expect("a counter's number")
}
