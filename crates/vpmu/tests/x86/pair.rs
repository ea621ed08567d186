//! The engine and the [`Reference`] side by side: one step on both, then a comparison.
//!
//! Invariants, each checked after every step:
//!
//! - **same registers**: every MSR reads the same in the engine and in the reference.
//! - **PMI on time**: once the host's reports are delivered, the engine has a PMI due if and only
//!   if the reference has.
//! - **PMI never early**: before that, the engine has one due only if the reference has.
//! - **comparing disturbs nothing**: these are checked on copies, so what the engine puts off stays
//!   put off.
//! - **put stops**: after a put no host event runs.
//! - **put settles**: after a put the PMI needs no report to be due.
//! - **orderly**: the host is called in the order `CounterHost` promises (the fake host checks it).
//! - **quiet**: a report is asked for only for a counter that asks for an interrupt.
//! - **honest loss**: a counter is lost only if the host refused it or nobody could count it, and
//!   refusals are counted.

use crate::reference::{Reference, Told};
use crate::support::{Call, Guest, Happening};
use vpmu::counter::{CounterState, Lost, Report};
use vpmu::x86::intel::{FIXED, Msr, PmuConfig};
use vpmu::x86::{ArchEvent, EventFilter, MaskedEvent, Outcome, Ring};

/// A counter that is further from its overflow than this is looked at by the end of a slice, at the
/// latest: so many events take longer than a slice.
const MORE_THAN_A_SLICE: u64 = 1 << 32;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// RDMSR.
    Read(u32),
    /// WRMSR.
    Write(u32, u64),
    /// RDPMC, by whom, with CR4.PCE.
    Rdpmc(u32, Ring, bool),
    /// The guest does this so often.
    Happen(Happening, Ring, u64),
    /// The embedder emulates this so often.
    Emulate(ArchEvent, Ring, u64),
    /// The host's reports arrive, those of this mask.
    Deliver(u32, Report),
    /// A report too early, or for nothing: the one that was asked for will not come.
    Early(u8),
    Put,
    Load,
    EndSlice,
    Filter(bool),
    Refuse(Option<Lost>),
    /// The local APIC takes the PMI that is due, if one is.
    TakePmi,
    /// Save, and restore into a new PMU on a new host.
    Migrate,
}

/// The engine and the reference, side by side.
pub(crate) struct Pair {
    config: PmuConfig,
    guest: Guest,
    reference: Reference,
}

impl Pair {
    /// `atomic`: the host pauses and reads in one operation. `prompt`: its reports arrive before
    /// every step.
    pub(crate) fn new(config: PmuConfig, atomic: bool, prompt: bool) -> Self {
        let capability = config.capability;
        let told = Told {
            version: capability.version.number().into(),
            general: capability.general.into(),
            general_width: capability.general_width.into(),
            fixed: capability.fixed.into(),
            fixed_width: capability.fixed_width.into(),
            events: capability.events.into(),
            pdcm: capability.pdcm,
            full_width: capability.full_width_writes,
            smm: capability.freeze_while_smm,
            other_debugctl: capability.other_debugctl,
        };
        let mut guest = Guest::with(config.clone());
        guest.host.atomic = atomic;
        guest.host.prompt = prompt;
        Self {
            guest,
            reference: Reference::new(told),
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
            // The step may take back the wish for an interrupt.
            self.check_quiet(step);
        }
        self.reference.lost = lost(&self.guest);
        let Self {
            guest: Guest { pmu, host },
            reference,
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
            Step::Happen(what, ring, times) => {
                reference.happen(what, ring, times);
                self.guest.happen(what, ring, times);
                if times >= MORE_THAN_A_SLICE {
                    // No report is late by a slice: a counter that passes its end several times in so
                    // long a while has reported, and is looked at, before anything else happens.
                    self.guest.interrupt();
                    let Guest { pmu, host } = &mut self.guest;
                    pmu.end_slice(host);
                }
                if reference.freezes() {
                    // Counters stop with the interrupt, not before it: it is here at once.
                    self.guest.interrupt();
                }
            }
            Step::Emulate(event, ring, times) => {
                let what = match event {
                    ArchEvent::Instructions => Happening::Instructions,
                    ArchEvent::CoreCycles => Happening::Cycles,
                    ArchEvent::TscCycles => Happening::TscCycles,
                    ArchEvent::Branches => Happening::Other(0xc4, 0),
                    _ => return,
                };
                let due = pmu.emulated(event, times, ring, host);
                reference.emulate(what, ring, times);
                assert!(!due || reference.pmi, "PMI never early: {step:?}");
            }
            Step::Deliver(mask, wished) => {
                for (n, report) in host.take_reports(mask, wished) {
                    let _ = pmu.overflow(n, report, host);
                }
            }
            Step::Early(n) => {
                if !host.prompt {
                    host.forget(n);
                }
                let _ = pmu.overflow(n, Report::Unsure, host);
            }
            Step::Put => {
                pmu.put(host);
                reference.loaded = false;
                assert!(host.running().is_empty(), "put stops");
                assert_eq!(pmu.pmi_due(), reference.pmi, "put settles");
            }
            Step::Load => {
                pmu.load(host);
                reference.loaded = true;
            }
            Step::EndSlice => pmu.end_slice(host),
            Step::Filter(deny) => {
                let all = EventFilter::default();
                let some = all
                    .with(MaskedEvent::one(0x3c, 0))
                    .expect("one event fits")
                    .with_fixed(0b1);
                self.config.filter = if deny { some } else { all };
                pmu.set_filter(self.config.filter, host);
                reference.denied = if deny {
                    (vec![0x3c], 0b1)
                } else {
                    (Vec::new(), 0)
                };
            }
            Step::Refuse(refuse) => host.refuse = refuse,
            Step::TakePmi => {
                self.guest.interrupt();
                let taken = self.guest.pmu.take_pmi();
                let reference = std::mem::take(&mut self.reference.pmi);
                assert_eq!(taken, reference, "one PMI each: {step:?}");
            }
            Step::Migrate => {
                let state = pmu.save(host);
                let mut next = Guest::with(self.config.clone());
                next.host.refuse = host.refuse;
                next.host.atomic = host.atomic;
                next.host.prompt = host.prompt;
                if !reference.loaded {
                    next.pmu.put(&mut next.host);
                }
                next.pmu
                    .restore(&state, &mut next.host)
                    .expect("the same kind of PMU");
                assert_eq!(next.pmu.save(&mut next.host), state, "{step:?}");
                self.guest = next;
            }
        }
    }

    fn check(&mut self, step: &Step) {
        let mut copy = self.guest.clone();
        let due = self.reference.pmi;
        assert!(!copy.pmu.pmi_due() || due, "PMI never early: {step:?}");
        assert_eq!(copy.interrupt(), due, "PMI on time: {step:?}");

        // Reading one register settles things for the next, so the order is both ways.
        let mut addresses: Vec<u32> = Msr::all().map(Msr::address).collect();
        addresses.extend([0x10, 0x1d8, 0x3f1]);
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

        self.check_quiet(step);
        assert_eq!(
            self.guest.pmu.statistics().lost,
            self.guest.host.refused,
            "honest loss"
        );
        for n in (0..64).filter(|n| lost(&self.guest) >> n & 1 != 0) {
            assert!(
                self.guest.host.refused > 0 || self.reference.unsupported(n),
                "honest loss: {n} after {step:?}"
            );
        }
    }

    /// Checks the calls since the last time, made under the registers as they are.
    fn check_quiet(&mut self, step: &Step) {
        let interrupting = self.interrupting();
        for call in self.guest.host.calls() {
            if let Call::SetPeriod(n, Some(_)) = call {
                assert!(interrupting >> global(n) & 1 != 0, "quiet: after {step:?}");
            }
        }
    }

    /// Counters that ask for an interrupt, from the registers.
    fn interrupting(&self) -> u64 {
        let value = |address| match self.reference.read(address) {
            Outcome::Value(value) => value,
            _ => 0,
        };
        let general = (0..8).map(|n| (value(0x186 + n) >> 20 & 1) << n);
        let fixed = (0..7).map(|n| (value(0x38d) >> (4 * n + 3) & 1) << (32 + n));
        general.chain(fixed).sum()
    }
}

fn global(n: u8) -> u8 {
    if n < FIXED { n } else { n - FIXED + 32 }
}

fn lost(guest: &Guest) -> u64 {
    (0..32_u8)
        .filter(|&n| matches!(guest.pmu.counter_state(n), Some(CounterState::Lost(_))))
        .fold(0, |bits, n| bits | 1 << global(n))
}
