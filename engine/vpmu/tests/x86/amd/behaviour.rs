//! Tests of the behaviour of AMD's counters, and of the calls that they make to the host.

use crate::support::{Call, END, FakeHost, Happening, SAMPLE, nth, set};
use vpmu::counter::{CounterState, Lost, Policy, Report, Statistics};
use vpmu::x86::amd::{self, Capability, Interface, Msr};
use vpmu::x86::{
    ArchEvent, CounterConfig, EventFilter, EventKind, MaskedEvent, Outcome, Pmu, PmuConfig,
    PmuState, RestoreError, Ring,
};

const CYCLES: u64 = 0x76;
const INSTRUCTIONS: u64 = 0xc0;
/// Bits 35:32 and 7:0, and EN. No ring is selected.
const MERGE: u64 = 0xf_0040_00ff;

/// A PMU, its host, and the guest's side of both.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) pmu: Pmu,
    pub(super) host: FakeHost<CounterConfig>,
}

impl Guest {
    pub(super) fn new(interface: Interface) -> Self {
        Self::with(PmuConfig::new(Capability::new(interface)))
    }

    pub(super) fn with(config: PmuConfig) -> Self {
        let host = FakeHost::new(config.policy);
        let pmu = Pmu::new(config).expect("possible");
        Self { pmu, host }
    }

    pub(super) fn rdmsr(&mut self, address: u32) -> Outcome {
        self.pmu.rdmsr(address, &mut self.host)
    }

    pub(super) fn wrmsr(&mut self, address: u32, value: u64) -> Outcome {
        self.pmu.wrmsr(address, value, &mut self.host)
    }

    pub(super) fn rdpmc(&mut self, ecx: u32, ring: Ring, pce: bool) -> Outcome {
        self.pmu.rdpmc(ecx, ring, pce, &mut self.host)
    }

    pub(super) fn read(&mut self, msr: Msr) -> u64 {
        match self.pmu.rdmsr(msr.address(), &mut self.host) {
            Outcome::Value(value) => value,
            other => panic!("read of {msr} ended {other:?}"),
        }
    }

    pub(super) fn write(&mut self, msr: Msr, value: u64) {
        let outcome = self.pmu.wrmsr(msr.address(), value, &mut self.host);
        assert_eq!(outcome, Outcome::Done, "write of {value:#x} to {msr}");
    }

    pub(super) fn save(&mut self) -> amd::PmuState {
        match self.pmu.save(&mut self.host) {
            PmuState::Amd(state) => state,
            PmuState::Intel(state) => panic!("saved {state:?}"),
        }
    }

    pub(super) fn restore(&mut self, state: &amd::PmuState) -> Result<(), RestoreError> {
        self.pmu
            .restore(&PmuState::Amd(state.clone()), &mut self.host)
    }

    pub(super) fn execute(&mut self, times: u64) {
        let what = Happening::Instructions;
        self.host
            .count(times, |config| what.is_counted_by(config, Ring::User));
    }

    /// Delivers the host's reports, and takes the PMI if one is due.
    pub(super) fn take_pmi(&mut self) -> bool {
        for (n, report) in self.host.take_reports(u32::MAX, Report::Due) {
            let _ = self.pmu.overflow(n, report, &mut self.host);
        }
        self.pmu.take_pmi()
    }

    fn sample(&mut self, n: u8, event: u64, period: u64) {
        self.write(Msr::Ctr(n), END - period);
        self.write(Msr::Ctl(n), SAMPLE | event);
    }

    fn counted_event(&mut self) -> Option<CounterConfig> {
        self.host.calls().into_iter().find_map(|call| match call {
            Call::Create(_, config) => Some(config),
            _ => None,
        })
    }
}

#[test]
fn a_control_register_names_its_event() {
    let mut guest = Guest::new(Interface::Core);
    // Bits 35:32 and 7:0 are the event select, INV, CMASK 5, EDGE, kernel only.
    guest.write(Msr::Ctl(5), 0x1_05c6_0120);
    let config = guest.counted_event().expect("it counts");
    let event = EventKind::Amd {
        select: 0x120,
        umask: 1,
    };
    assert_eq!(config.event, event);
    assert!(config.kernel && !config.user && config.edge && config.invert && !config.only_c0);
    assert_eq!(config.threshold, 5);
    assert_eq!(config.raw(), Some(0x1_0584_0120));
    assert_eq!(config.architectural(), None, "a condition is on it");
    assert_eq!(event.architectural(), Some(ArchEvent::ReferenceCycles));
}

#[test]
fn nothing_gates_the_counters_before_version_2() {
    let mut guest = Guest::new(Interface::Core);
    guest.sample(0, INSTRUCTIONS, 1000);
    guest.execute(10);
    assert_eq!(guest.read(Msr::Ctr(0)), END - 990);

    let mut guest = Guest::new(Interface::V2);
    guest.sample(0, INSTRUCTIONS, 1000);
    assert_eq!(guest.host.running(), set([0]), "out of reset all are open");
    guest.write(Msr::GlobalCtl, 0x3e);
    assert_eq!(guest.host.running(), set([]));
    guest.execute(10);
    guest.write(Msr::GlobalCtl, 0x3f);
    guest.execute(5);
    assert_eq!(guest.read(Msr::Ctr(0)), END - 995);
}

#[test]
fn an_overflow_is_one_interrupt_even_when_the_counter_is_stopped_first() {
    for interface in [Interface::Core, Interface::V2] {
        let mut guest = Guest::new(interface);
        guest.sample(0, INSTRUCTIONS, 1000);
        guest.execute(1001);
        guest.write(Msr::Ctl(0), (SAMPLE | INSTRUCTIONS) & !(1 << 22));
        assert!(guest.take_pmi(), "the guest waits for it");
        assert!(!guest.take_pmi());
        assert_eq!(guest.read(Msr::Ctr(0)), 1);
    }
}

#[test]
fn version_2_tells_who_has_overflowed_until_it_is_cleared() {
    let mut guest = Guest::new(Interface::V2);
    guest.sample(2, INSTRUCTIONS, 100);
    // Counter 3 asks for no interrupt, yet its bit is set.
    guest.write(Msr::Ctr(3), END - 100);
    guest.write(Msr::Ctl(3), 0x0043_00c0);
    guest.execute(100);
    assert_eq!(guest.read(Msr::GlobalStatus), 0b1100);
    guest.write(Msr::Ctr(2), END - 100);
    guest.write(Msr::GlobalStatus, 0);
    assert_eq!(guest.read(Msr::GlobalStatus), 0b1100);
    // Linux does this: it writes all bits but those that it leaves.
    guest.write(Msr::GlobalStatusClr, !0b1000);
    assert_eq!(guest.read(Msr::GlobalStatus), 0b1000);
    guest.write(Msr::GlobalStatusSet, u64::MAX);
    assert_eq!(guest.read(Msr::GlobalStatus), 0x3f);
    assert!(guest.take_pmi());
    assert!(!guest.take_pmi(), "setting a bit is no overflow");
}

#[test]
fn host_and_guest_bits_count_nothing_without_svm() {
    for bits in [1 << 40, 1 << 41, 3 << 40] {
        let mut guest = Guest::new(Interface::Core);
        guest.sample(0, INSTRUCTIONS | bits, 1000);
        guest.execute(1000);
        assert_eq!(guest.read(Msr::Ctr(0)), END - 1000);
        assert_eq!(guest.pmu.counter_state(nth(0)), Some(CounterState::Paused));
        guest.write(Msr::Ctl(0), SAMPLE | INSTRUCTIONS);
        guest.execute(1);
        assert_eq!(guest.read(Msr::Ctr(0)), END - 999);
    }
}

#[test]
fn a_merged_pair_is_lost_and_comes_back() {
    let lost = Some(CounterState::Lost(Lost::Unsupported));
    let mut guest = Guest::new(Interface::Core);
    guest.sample(2, INSTRUCTIONS, 1000);
    guest.execute(10);
    guest.write(Msr::Ctl(3), MERGE);
    guest.execute(100);
    assert_eq!(guest.read(Msr::Ctr(2)), END - 990, "it stands still");
    assert_eq!(
        [2, 3].map(|n| guest.pmu.counter_state(nth(n))),
        [lost, lost]
    );
    assert_eq!(guest.pmu.counter_state(nth(1)), Some(CounterState::Paused));

    // Linux disables the pair in this order.
    guest.write(Msr::Ctl(2), (SAMPLE | INSTRUCTIONS) & !(1 << 22));
    guest.write(Msr::Ctl(3), 0);
    guest.write(Msr::Ctl(2), SAMPLE | INSTRUCTIONS);
    guest.execute(1);
    assert_eq!(guest.read(Msr::Ctr(2)), END - 989);
    assert_eq!(guest.pmu.counter_state(nth(3)), Some(CounterState::Paused));
}

#[test]
fn an_event_that_is_not_backed_is_lost_without_asking() {
    let capability = Capability {
        events: 1,
        ..Capability::new(Interface::Core)
    };
    let mut guest = Guest::with(PmuConfig::new(capability));
    guest.write(Msr::Ctl(0), SAMPLE | INSTRUCTIONS);
    let lost = Some(CounterState::Lost(Lost::Unsupported));
    assert_eq!(guest.pmu.counter_state(nth(0)), lost);
    assert_eq!(guest.host.calls(), []);
    assert_eq!(guest.pmu.statistics().unsupported, 1, "no loss is silent");
    guest.write(Msr::Ctl(0), SAMPLE | CYCLES);
    assert_eq!(
        guest.pmu.counter_state(nth(0)),
        Some(CounterState::Counting)
    );
}

#[test]
fn a_filter_knows_wide_event_selects() {
    let filter = EventFilter::deny_listed()
        .with(MaskedEvent::one(0x120, 1))
        .expect("one fits");
    let mut guest = Guest::with(PmuConfig {
        filter,
        ..PmuConfig::new(Capability::new(Interface::Core))
    });
    guest.write(Msr::Ctl(0), SAMPLE | 0x1_0000_0120);
    assert_eq!(guest.host.calls(), []);
    guest.write(Msr::Ctl(1), SAMPLE | 0x0120);
    assert_eq!(guest.host.running(), set([1]));
}

#[test]
fn a_guest_that_never_enables_a_counter_costs_no_call() {
    for policy in Policy::ALL {
        let mut guest = Guest::with(PmuConfig {
            policy,
            ..PmuConfig::new(Capability::new(Interface::V2))
        });
        for msr in Msr::all() {
            let _ = guest.pmu.rdmsr(msr.address(), &mut guest.host);
            let _ = guest.pmu.wrmsr(msr.address(), 0, &mut guest.host);
        }
        guest.write(Msr::Ctr(0), 0xabcd);
        guest.pmu.put(&mut guest.host);
        guest.pmu.load(&mut guest.host);
        guest.pmu.end_slice(&mut guest.host);
        assert_eq!(guest.host.calls(), []);
    }
}

/// Runs Linux's handler for one sample of counter 0 (amd_pmu_handle_irq of arch/x86/events/amd), which stops nothing.
fn core_handler(guest: &mut Guest) {
    let count = guest.rdpmc(0, Ring::Kernel, false);
    assert!(matches!(count, Outcome::Value(0..100)), "{count:?}");
    guest.write(Msr::Ctr(0), END - 1000);
}

/// Runs Linux's handler for the global registers (amd_pmu_v2_handle_irq).
fn v2_handler(guest: &mut Guest) {
    guest.write(Msr::GlobalCtl, 0);
    let status = guest.read(Msr::GlobalStatus);
    assert_eq!(status, 1);
    core_handler(guest);
    guest.write(Msr::GlobalStatusClr, status);
    guest.write(Msr::GlobalCtl, 0x3f);
}

fn operations_per_pmi(interface: Interface, policy: Policy, handler: fn(&mut Guest)) -> Statistics {
    let mut guest = Guest::with(PmuConfig {
        policy,
        ..PmuConfig::new(Capability::new(interface))
    });
    guest.host.atomic = true;
    guest.host.prompt = true;
    guest.sample(0, INSTRUCTIONS, 1000);
    let mut each = Statistics::default();
    for _ in 0..3 {
        let before = guest.pmu.statistics();
        guest.execute(1000);
        assert!(guest.take_pmi());
        handler(&mut guest);
        let now = guest.pmu.statistics();
        each = Statistics {
            creates: now.creates - before.creates,
            set_periods: now.set_periods - before.set_periods,
            resumes: now.resumes - before.resumes,
            pauses: now.pauses - before.pauses,
            reads: now.reads - before.reads,
            releases: now.releases - before.releases,
            ..Statistics::default()
        };
    }
    each
}

#[test]
fn a_sample_asks_three_operations_of_the_host() {
    let paused = operations_per_pmi(Interface::Core, Policy::ReusePaused, core_handler);
    assert_eq!(
        paused,
        Statistics {
            // RDPMC reads, and so does the write, which takes the count since then.
            reads: 2,
            set_periods: 1,
            ..Statistics::default()
        }
    );
    let paused = operations_per_pmi(Interface::V2, Policy::ReusePaused, v2_handler);
    assert_eq!(
        paused,
        Statistics {
            pauses: 1,
            set_periods: 1,
            resumes: 1,
            ..Statistics::default()
        }
    );
}

#[test]
fn recreating_costs_more() {
    for (interface, handler) in [
        (Interface::Core, core_handler as fn(&mut Guest)),
        (Interface::V2, v2_handler),
    ] {
        let operations = |policy| operations_per_pmi(interface, policy, handler).host_operations();
        let [recreate, reuse, paused] = Policy::ALL.map(operations);
        assert!(
            recreate > reuse && reuse >= paused,
            "{recreate} {reuse} {paused}"
        );
    }
}
