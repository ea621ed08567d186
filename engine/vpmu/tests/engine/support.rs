//! A host of plain numbers. It counts when a test says that the guest did something, writes down
//! every call, and fails the test when the engine breaks the order of calls that
//! [`CounterHost`] promises.
use std::num::NonZeroU64;

use vpmu::arm::emulated::{EmulatedConfig, EmulatedPmu, Identity};
use vpmu::arm::{
    CPU_CYCLES, CounterConfig, EventFilter, EventKind, ExceptionLevel, Outcome, PmuVersion,
    Register,
};
use vpmu::counter::{Counter, CounterHost, CounterSet, Lost, Policy, Report};

/// One call of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Create(u8, CounterConfig),
    SetPeriod(u8, Option<u64>),
    Resume(CounterSet),
    Pause(CounterSet),
    Read(u8),
    Release(u8),
}

#[derive(Clone, Copy, Debug)]
struct Backing {
    config: CounterConfig,
    running: bool,
    total: u64,
    due: Option<u64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FakeHost {
    counters: [Option<Backing>; 32],
    /// Overflow reports that nobody has taken yet.
    pub(crate) reports: CounterSet,
    /// Every call since the last [`calls`](Self::calls).
    pub(crate) calls: Vec<Call>,
    /// The host's answer to every create.
    pub(crate) refuse: Option<Lost>,
    pub(crate) refused: u64,
    /// Whether pausing a paused counter is no mistake.
    pub(crate) pauses_twice: bool,
}

impl FakeHost {
    /// Lets the guest do something `times` times at `level` that `event` counts.
    pub(crate) fn happen(&mut self, event: u16, level: ExceptionLevel, times: u64) {
        for (n, counter) in (0..).zip(&mut self.counters) {
            let Some(counter) = counter else { continue };
            let counts = match counter.config.event {
                EventKind::Cycles => event == CPU_CYCLES,
                EventKind::Event(own) => event == own,
            };
            let at_level = match level {
                ExceptionLevel::El0 => counter.config.el0,
                ExceptionLevel::El1 => counter.config.el1,
            };
            if counter.running && counts && at_level {
                counter.total = counter.total.wrapping_add(times);
                match counter.due {
                    Some(due) if due <= times => {
                        counter.due = None;
                        self.reports.insert(nth(n));
                    }
                    due => counter.due = due.map(|due| due - times),
                }
            }
        }
    }

    /// Cancels the report that `n` was asked for.
    pub(crate) fn forget(&mut self, n: u8) {
        if let Some(Some(counter)) = self.counters.get_mut(usize::from(n)) {
            counter.due = None;
        }
    }

    /// Returns the calls since the last time.
    pub(crate) fn calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.calls)
    }

    pub(crate) fn take_reports(&mut self) -> CounterSet {
        std::mem::take(&mut self.reports)
    }

    pub(crate) fn running(&self) -> CounterSet {
        self.which(|counter| counter.running)
    }

    pub(crate) fn created(&self) -> CounterSet {
        self.which(|_| true)
    }

    fn which(&self, wanted: impl Fn(&Backing) -> bool) -> CounterSet {
        let mut set = CounterSet::EMPTY;
        for (n, counter) in (0..).zip(&self.counters) {
            if counter.as_ref().is_some_and(&wanted) {
                set.insert(nth(n));
            }
        }
        set
    }

    fn counter(&mut self, n: u8) -> &mut Backing {
        self.counters[usize::from(n)]
            .as_mut()
            .expect("the counter was created before")
    }
}

impl CounterHost<CounterConfig> for FakeHost {
    fn create(&mut self, counter: Counter, config: &CounterConfig) -> Result<(), Lost> {
        self.calls.push(Call::Create(counter.number(), *config));
        let place = &mut self.counters[counter.index()];
        assert!(place.is_none(), "counter {counter} created twice");
        if let Some(reason) = self.refuse {
            self.refused += 1;
            return Err(reason);
        }
        *place = Some(Backing {
            config: *config,
            running: false,
            total: 0,
            due: None,
        });
        Ok(())
    }

    fn set_period(&mut self, counter: Counter, events: Option<NonZeroU64>) {
        let events = events.map(NonZeroU64::get);
        self.calls.push(Call::SetPeriod(counter.number(), events));
        self.counter(counter.number()).due = events;
    }

    fn resume(&mut self, counters: CounterSet) {
        self.calls.push(Call::Resume(counters));
        assert!(!counters.is_empty());
        for n in counters {
            let counter = self.counter(n.number());
            assert!(!counter.running, "counter {n} resumed twice");
            counter.running = true;
        }
    }

    fn pause(&mut self, counters: CounterSet) {
        self.calls.push(Call::Pause(counters));
        assert!(!counters.is_empty());
        let again = self.pauses_twice;
        for n in counters {
            let counter = self.counter(n.number());
            assert!(counter.running || again, "counter {n} paused twice");
            counter.running = false;
        }
    }

    fn read(&mut self, counter: Counter) -> u64 {
        self.calls.push(Call::Read(counter.number()));
        self.counter(counter.number()).total
    }

    fn release(&mut self, counter: Counter) {
        self.calls.push(Call::Release(counter.number()));
        assert!(
            !self.counter(counter.number()).running,
            "counter {counter} released while it runs"
        );
        self.counters[counter.index()] = None;
    }
}

/// Returns a PMU with six event counters and no forbidden events.
pub(crate) fn config(version: PmuVersion) -> EmulatedConfig {
    EmulatedConfig {
        counters: 6,
        version,
        el3: false,
        aarch32: true,
        identity: Identity {
            implementer: 0x41,
            code: 0x0b,
        },
        events: [1 << CPU_CYCLES | 1 << INST_RETIRED, 0],
        // With thresholds, which the emulated PMU has not.
        pmmir: 0x0ff0_1234,
        filter: EventFilter::default(),
        policy: Policy::default(),
    }
}

pub(crate) const INST_RETIRED: u16 = 0x08;

/// A PMU, its host, and the guest's side of both: registers by name at EL1.
#[derive(Clone, Debug)]
pub(crate) struct Guest {
    pub(crate) pmu: EmulatedPmu,
    pub(crate) host: FakeHost,
}

impl Guest {
    pub(crate) fn new(version: PmuVersion) -> Self {
        Self::with(config(version))
    }

    pub(crate) fn with(config: EmulatedConfig) -> Self {
        let host = FakeHost {
            pauses_twice: config.policy == Policy::Reuse,
            ..FakeHost::default()
        };
        let pmu = EmulatedPmu::new(config).expect("a possible configuration");
        Self { pmu, host }
    }

    pub(crate) fn read(&mut self, register: Register) -> u64 {
        match self.pmu.read(register, ExceptionLevel::El1, &mut self.host) {
            Outcome::Value(value) => value,
            other => panic!("read of {} ended {other:?}", register.name()),
        }
    }

    pub(crate) fn write(&mut self, register: Register, value: u64) {
        let outcome = self
            .pmu
            .write(register, ExceptionLevel::El1, value, &mut self.host);
        assert_eq!(
            outcome,
            Outcome::Done,
            "write of {value:#x} to {}",
            register.name()
        );
    }

    /// Executes `times` instructions of user space. Reports wait for
    /// [`interrupt`](Self::interrupt).
    pub(crate) fn execute(&mut self, times: u64) {
        self.host.happen(INST_RETIRED, ExceptionLevel::El0, times);
    }

    pub(crate) fn cycles(&mut self, times: u64) {
        self.host.happen(CPU_CYCLES, ExceptionLevel::El0, times);
    }

    /// Delivers the host's reports, and returns the line.
    pub(crate) fn interrupt(&mut self) -> bool {
        for n in self.host.take_reports() {
            let _ = self.pmu.overflow(n, Report::Unsure, &mut self.host);
        }
        self.pmu.line()
    }

    /// Makes event counter `n` count `event` from `value` on, with its interrupt enabled.
    pub(crate) fn sample(&mut self, n: u8, event: u16, value: u64) {
        self.write(Register::Pmevtyper(n), event.into());
        self.write(Register::Pmevcntr(n), value);
        self.write(Register::PmintenSet, 1 << n);
        self.write(Register::PmcntenSet, 1 << n);
    }
}

/// Returns the counter of a number that a test knows to be one.
pub(crate) const fn nth(number: u8) -> Counter {
    Counter::new(number).expect("a counter's number")
}
