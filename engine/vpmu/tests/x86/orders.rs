//! Tries every order of steps around an overflow, up to a depth, against the reference. Each
//! overflow must be exactly one PMI.

use std::mem::take;

use crate::reference::{Numbers, Reference};
use crate::support::{END, Guest, Happening, INSTRUCTIONS, SAMPLE};
use vpmu::counter::{Policy, Report};
use vpmu::x86::intel::{Capability, Version};
use vpmu::x86::{Outcome, PmuConfig, Ring};

const PERFEVTSEL0: u32 = 0x186;
const A_PMC0: u32 = 0x4c1;
const GLOBAL_STATUS: u32 = 0x38e;
const GLOBAL_CTRL: u32 = 0x38f;
const GLOBAL_OVF_CTRL: u32 = 0x390;
const GLOBAL_STATUS_SET: u32 = 0x391;
const DEBUGCTL: u32 = 0x1d9;

/// Distance from the counter's end to which each write of the counter puts it.
const PERIOD: u64 = 2;

#[derive(Clone, Copy, Debug)]
enum Act {
    Write(u32, u64),
    Read(u32),
    /// Executes as many instructions as a period has.
    Execute,
    /// Delivers the reports that are on their way.
    Deliver,
    /// Lets the local APIC take the PMI. Whether LVTPC then is masked makes no difference to the
    /// PMU.
    TakePmi,
}

const ACTS: [Act; 12] = [
    Act::Execute,
    Act::Write(A_PMC0, END - PERIOD),
    Act::Write(GLOBAL_CTRL, 0),
    Act::Write(GLOBAL_CTRL, 1),
    Act::Write(PERFEVTSEL0, 0),
    Act::Write(PERFEVTSEL0, (SAMPLE | INSTRUCTIONS) & !(1 << 20)),
    Act::Write(PERFEVTSEL0, SAMPLE | INSTRUCTIONS),
    Act::Write(GLOBAL_OVF_CTRL, 1 | 1 << 59),
    Act::Write(GLOBAL_STATUS_SET, 1),
    Act::Read(GLOBAL_STATUS),
    Act::Deliver,
    Act::TakePmi,
];

#[derive(Clone)]
struct Both {
    guest: Guest,
    reference: Reference,
}

impl Both {
    fn new(policy: Policy, atomic: bool, version: Version, freeze: bool) -> Self {
        let capability = Capability::new(version);
        let mut guest = Guest::with(PmuConfig {
            policy,
            ..PmuConfig::new(capability)
        });
        guest.host.atomic = atomic;
        let capability = Numbers {
            version: version.number().into(),
            general: capability.general.into(),
            general_width: 48,
            fixed: 0b111,
            fixed_width: 48,
            events: 0x7f,
            pdcm: true,
            full_width: true,
            smm: false,
            other_debugctl: 0,
            pebs: None,
        };
        let mut both = Self {
            guest,
            reference: Reference::new(capability),
        };
        for (address, value) in [
            (DEBUGCTL, u64::from(freeze) << 12),
            (A_PMC0, END - PERIOD),
            (PERFEVTSEL0, SAMPLE | INSTRUCTIONS),
        ] {
            both.act(Act::Write(address, value));
        }
        both
    }

    fn act(&mut self, act: Act) {
        let Self {
            guest: Guest { pmu, host },
            reference,
        } = self;
        match act {
            Act::Write(address, value) => {
                let written = pmu.wrmsr(address, value, host);
                assert_eq!(written, reference.write(address, value), "{act:?}");
            }
            Act::Read(address) => {
                let read = pmu.rdmsr(address, host);
                assert_eq!(read, reference.read(address), "{act:?}");
            }
            Act::Execute => {
                reference.emulate(Happening::Instructions, Ring::User, PERIOD);
                self.guest.execute(PERIOD);
                if self.reference.freezes() {
                    // Counters stop with the PMI's request, so the PMI arrives at once.
                    self.guest.interrupt();
                }
            }
            Act::Deliver => {
                for (n, report) in host.take_reports(u32::MAX, Report::Due) {
                    let _ = pmu.overflow(n, report, host);
                }
            }
            Act::TakePmi => {
                let taken = self.guest.take_pmi();
                assert_eq!(taken, take(&mut self.reference.pmi));
            }
        }
    }

    fn check(&self) {
        let Self {
            mut guest,
            mut reference,
        } = self.clone();
        assert!(!guest.pmu.pmi_due() || reference.pmi, "early");
        assert_eq!(guest.take_pmi(), take(&mut reference.pmi), "on time");
        for address in [GLOBAL_STATUS, GLOBAL_CTRL, A_PMC0] {
            let read = guest.pmu.rdmsr(address, &mut guest.host);
            assert_eq!(read, reference.read(address), "{address:#x}");
        }
        assert!(!guest.take_pmi(), "twice");
    }
}

/// Tries all orders of `depth` more acts, and returns the number of orders.
fn explore(both: &Both, path: &mut Vec<Act>, depth: u32) -> u64 {
    if depth == 0 {
        return 1;
    }
    let mut orders = 0;
    for act in ACTS {
        if matches!(act, Act::Write(GLOBAL_STATUS_SET, _))
            && both.reference.read(GLOBAL_STATUS_SET) == Outcome::GeneralProtection
        {
            continue;
        }
        let mut next = both.clone();
        path.push(act);
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            next.act(act);
            next.check();
        }));
        assert!(held.is_ok(), "after {path:x?}");
        orders += explore(&next, path, depth - 1);
        path.pop();
    }
    orders
}

#[test]
fn each_overflow_is_one_pmi_in_any_order() {
    let depth = std::env::var("VPMU_ORDERS_DEPTH").map_or(4, |depth| depth.parse().unwrap());
    for version in [Version::V2, Version::V4] {
        let acts = if version == Version::V2 { 11_u64 } else { 12 };
        for policy in Policy::ALL {
            for (atomic, freeze) in [(false, false), (true, false), (true, true)] {
                let both = Both::new(policy, atomic, version, freeze);
                let orders = explore(&both, &mut Vec::new(), depth);
                assert_eq!(orders, acts.pow(depth));
            }
        }
    }
}
