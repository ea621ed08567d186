//! The engine and the [`Reference`] side by side: one step on both, then a comparison.
//!
//! Invariants, each checked after every step:
//!
//! - **same registers**: every register reads the same at EL1 in the engine and in the reference;
//!   at EL0, those that a step reads.
//! - **line on time**: once the host's reports are delivered, the engine's line is the reference's.
//! - **line never early**: before that, the engine's line is high only if the reference's is.
//! - **comparing disturbs nothing**: these are checked on copies, so work that the engine puts off
//!   stays put off.
//! - **put stops**: after a put no host counter runs.
//! - **put settles**: after a put the line needs no report to be right.
//! - **orderly**: the host is called in the order `CounterHost` promises (the fake host checks it).
//! - **quiet**: a report is asked for only while some interrupt is enabled.
//! - **honest loss**: a counter is lost only if the host refused, and refusals are counted.

use crate::reference::Reference;
use crate::support::{Call, Guest, config, nth};
use vpmu::arm::emulated::EmulatedConfig;
use vpmu::arm::{CPU_CYCLES, EventFilter, ExceptionLevel, Outcome, PmuVersion, Register};
use vpmu::counter::{Counter, CounterState, Lost, Policy, Report};

#[derive(Clone, Debug)]
pub(crate) enum Step {
    Read(Register, ExceptionLevel),
    Write(Register, ExceptionLevel, u64),
    /// This event happens at this level, so many times.
    Happen(u16, ExceptionLevel, u64),
    /// The host's reports arrive, as far as they are in this mask.
    Deliver(u32),
    /// A report comes too early, or for nothing. The report that was asked for will not come.
    Early(u8),
    Put,
    Load,
    Filter(bool),
    Refuse(bool),
    /// Saves, and restores into a new PMU on a new host.
    Migrate,
}

/// The engine and the reference, side by side.
pub(crate) struct Pair {
    config: EmulatedConfig,
    guest: Guest,
    reference: Reference,
}

impl Pair {
    pub(crate) fn new(
        version: PmuVersion,
        counters: u8,
        [el3, aarch32]: [bool; 2],
        policy: Policy,
    ) -> Self {
        let config = EmulatedConfig {
            counters,
            el3,
            aarch32,
            policy,
            ..config(version)
        };
        let minor = match version {
            PmuVersion::V3 => 0,
            PmuVersion::V3p1 => 1,
            PmuVersion::V3p4 => 4,
            PmuVersion::V3p5 => 5,
        };
        let mut reference = Reference::new(counters, minor, el3, aarch32);
        reference.fixed_pmcr = 0x410b_0000;
        reference.pmceid = config.events;
        // THWIDTH, EDGE and SME are 0 where there are no such extensions, and the rest is RES0.
        reference.pmmir = config.pmmir & 0xf_ffff;
        Self {
            guest: Guest::with(config.clone()),
            config,
            reference,
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
        let Self {
            guest: Guest { pmu, host },
            reference,
            ..
        } = self;
        match *step {
            Step::Read(register, level) => {
                let read = pmu.read(register, level, host);
                assert_eq!(read, reference.read(register, level), "{step:?}");
            }
            Step::Write(register, level, value) => {
                let written = pmu.write(register, level, value, host);
                assert_eq!(written, reference.write(register, level, value), "{step:?}");
            }
            Step::Happen(event, level, times) => {
                reference.lost = lost(&self.guest);
                self.guest.host.happen(event, level, times);
                reference.happen(event, level, times);
            }
            Step::Deliver(mask) => {
                for n in host.take_reports() {
                    if mask & 1 << n.number() == 0 {
                        host.reports.insert(n);
                    } else {
                        let _ = pmu.overflow(n, Report::Unsure, host);
                    }
                }
            }
            Step::Early(n) => {
                host.forget(n);
                // A host has no counters of other numbers to report.
                if let Some(counter) = Counter::new(n) {
                    let _ = pmu.overflow(counter, Report::Unsure, host);
                }
            }
            Step::Put => {
                pmu.put(host);
                reference.loaded = false;
                assert!(host.running().is_empty(), "put stops");
                assert_eq!(pmu.line(), reference.line(), "put settles");
            }
            Step::Load => {
                pmu.load(host);
                reference.loaded = true;
            }
            Step::Filter(deny) => {
                let all = EventFilter::default();
                let some = all.deny(CPU_CYCLES..=CPU_CYCLES).expect("one rule fits");
                pmu.set_filter(if deny { some } else { all }, host);
                self.config.filter = if deny { some } else { all };
                reference.denied = if deny { vec![CPU_CYCLES] } else { Vec::new() };
            }
            Step::Refuse(refuse) => host.refuse = refuse.then_some(Lost::Busy),
            Step::Migrate => {
                let state = pmu.save(host);
                let mut next = Guest::with(self.config.clone());
                next.host.refuse = host.refuse;
                if !reference.loaded {
                    next.pmu.put(&mut next.host);
                }
                next.pmu
                    .restore(&state, &mut next.host)
                    .expect("the same kind of PMU");
                self.guest = next;
                reference.migrate();
            }
        }
    }

    fn check(&mut self, step: &Step) {
        let mut copy = self.guest.clone();
        let high = self.reference.line();
        assert!(!copy.pmu.line() || high, "line never early: {step:?}");
        assert_eq!(copy.interrupt(), high, "line on time: {step:?}");

        for register in Register::all() {
            // Each read is on a copy of its own: reading one register settles things for the next.
            let mut copy = self.guest.clone();
            let engine = copy.pmu.read(register, ExceptionLevel::El1, &mut copy.host);
            let reference = self.reference.read(register, ExceptionLevel::El1);
            assert_eq!(
                engine, reference,
                "same registers: {register:?} after {step:?}"
            );
        }

        let interrupting = self
            .reference
            .read(Register::PmintenSet, ExceptionLevel::El1);
        for call in self.guest.host.calls() {
            if let Call::SetPeriod(n, Some(_)) = call {
                let nobody = Outcome::Value(0);
                assert_ne!(interrupting, nobody, "quiet: counter {n} after {step:?}");
            }
        }
        assert_eq!(
            self.guest.pmu.statistics().lost,
            self.guest.host.refused,
            "honest loss"
        );
        assert!(
            self.guest.host.refused > 0 || lost(&self.guest) == 0,
            "honest loss"
        );
    }
}

fn lost(guest: &Guest) -> u32 {
    (0..32_u8)
        .filter(|&n| matches!(guest.pmu.counter_state(nth(n)), Some(CounterState::Lost(_))))
        .fold(0, |bits, n| bits | 1 << n)
}
