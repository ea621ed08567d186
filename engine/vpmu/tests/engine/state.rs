//! Event filter, lost counters, save, restore and reset.

use crate::support::{FakeHost, Guest, INST_RETIRED, config, nth};
use vpmu::arm::ExceptionLevel::{El0, El1};
use vpmu::arm::Register::*;
use vpmu::arm::emulated::EmulatedPmu;
use vpmu::arm::{
    EventFilter, Outcome, PmuState, PmuVersion, RawPmevtyper, RestoreError, pmcr, pmuserenr,
};
use vpmu::counter::{Counter, CounterState, Events, Lost};

const CYCLES_BIT: u64 = 1 << 31;

fn guest() -> Guest {
    Guest::new(PmuVersion::V3p5)
}

#[test]
fn a_filter_changed_while_counting_keeps_what_was_counted() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0);
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    guest.execute(5);
    guest
        .pmu
        .set_filter(EventFilter::deny_all(), &mut guest.host);
    assert!(
        guest.host.running().is_empty(),
        "the cycle counter is event 0x11"
    );
    guest.execute(5);
    assert_eq!(guest.read(Pmevcntr(0)), 5);
    assert_eq!(guest.pmu.counter_state(nth(0)), Some(CounterState::Paused));
    guest
        .pmu
        .set_filter(EventFilter::allow_all(), &mut guest.host);
    guest.execute(5);
    assert_eq!(guest.read(Pmevcntr(0)), 10);
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Log {
    overflowed: Vec<u8>,
    lost: Vec<(u8, Lost)>,
}

impl Events for Log {
    fn overflowed(&mut self, counter: Counter) {
        self.overflowed.push(counter.number());
    }
    fn lost(&mut self, counter: Counter, reason: Lost) {
        self.lost.push((counter.number(), reason));
    }
}

#[test]
fn a_counter_the_host_cannot_back_stands_still_and_says_so() {
    let mut host = FakeHost::default();
    host.refuse = Some(Lost::Busy);
    let mut pmu = EmulatedPmu::with_events(config(PmuVersion::V3p5), Log::default())
        .expect("six counters are possible");
    let write = |pmu: &mut EmulatedPmu<Log>, register, value, host: &mut FakeHost| {
        assert_eq!(pmu.write(register, El1, value, host), Outcome::Done);
    };
    write(&mut pmu, Pmevtyper(0), INST_RETIRED.into(), &mut host);
    write(&mut pmu, Pmevcntr(0), 42, &mut host);
    write(&mut pmu, PmcntenSet, 1, &mut host);
    write(&mut pmu, Pmcr, pmcr::E, &mut host);
    host.happen(INST_RETIRED, El0, 100);
    assert_eq!(pmu.read(Pmevcntr(0), El1, &mut host), Outcome::Value(42));
    assert_eq!(
        pmu.counter_state(nth(0)),
        Some(CounterState::Lost(Lost::Busy))
    );

    host.refuse = None;
    write(&mut pmu, Pmcr, 0, &mut host);
    write(&mut pmu, Pmcr, pmcr::E, &mut host);
    assert_eq!(
        pmu.statistics().lost,
        1,
        "asked again when configured, not at each switch"
    );
    write(&mut pmu, PmcntenClr, 1, &mut host);
    write(&mut pmu, PmcntenSet, 1, &mut host);
    assert_eq!(pmu.counter_state(nth(0)), Some(CounterState::Counting));
    host.happen(INST_RETIRED, El0, 100);
    assert_eq!(pmu.read(Pmevcntr(0), El1, &mut host), Outcome::Value(142));
    write(&mut pmu, Pmevcntr(0), 0xffff_ffff, &mut host);
    host.happen(INST_RETIRED, El0, 1);
    assert_eq!(pmu.read(PmovsSet, El1, &mut host), Outcome::Value(1));
    assert_eq!(
        *pmu.events(),
        Log {
            overflowed: vec![0],
            lost: vec![(0, Lost::Busy)]
        }
    );
}

#[test]
fn counter_states_exist_for_counters_that_exist() {
    let guest = guest();
    assert_eq!(guest.pmu.counter_state(nth(5)), Some(CounterState::Paused));
    assert_eq!(guest.pmu.counter_state(nth(31)), Some(CounterState::Paused));
    assert_eq!([6, 30].map(|n| guest.pmu.counter_state(nth(n))), [None; 2]);
}

#[test]
fn a_save_in_the_middle_of_an_overflow_carries_it_along() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.sample(1, INST_RETIRED, 0xffff_fff0);
    guest.write(Pmselr, 1);
    guest.write(Pmuserenr, pmuserenr::EN);
    guest.write(Pmcr, pmcr::E);
    guest.execute(3);
    assert!(!guest.pmu.line(), "the report is still on its way");
    let state = guest.pmu.save(&mut guest.host);
    assert_eq!((state.pmovs, state.pmevcntr[0]), (1, 0x1_0000_0002));

    let mut other = self::guest();
    other
        .pmu
        .restore(&state, &mut other.host)
        .expect("the same kind of PMU");
    assert!(other.pmu.line());
    assert_eq!(other.pmu.save(&mut other.host), state);
    other.execute(13);
    other.write(PmovsClr, 1);
    assert!(other.interrupt(), "counter 1 goes on with its period");
    assert_eq!(other.read(PmovsSet), 2);

    guest.execute(1);
    assert_eq!(guest.read(Pmevcntr(1)), 0xffff_fff4, "saving stops nothing");
}

#[test]
fn states_that_do_not_fit_are_refused_and_change_nothing() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 7);
    guest.write(Pmcr, pmcr::E);
    let before = guest.pmu.save(&mut guest.host);
    let mut refused = |change: fn(&mut PmuState)| {
        let mut state = before.clone();
        change(&mut state);
        let error = guest
            .pmu
            .restore(&state, &mut guest.host)
            .expect_err("it must not fit");
        assert_eq!(guest.pmu.save(&mut guest.host), before);
        error
    };
    assert_eq!(refused(|s| s.layout = 9), RestoreError::Layout { saved: 9 });
    assert_eq!(
        refused(|s| s.version = PmuVersion::V3),
        RestoreError::Version {
            saved: PmuVersion::V3,
            offered: PmuVersion::V3p5
        }
    );
    assert_eq!(
        refused(|s| s.pmcr = 4 << pmcr::N_SHIFT),
        RestoreError::Counters {
            saved: 4,
            offered: 6
        }
    );
    type Damage = fn(&mut PmuState);
    let damage: [(&str, Damage); 8] = [
        ("PMCR_EL0", |s| s.pmcr |= 1 << 40),
        ("PMCNTENSET_EL0", |s| s.pmcnten |= 1 << 6),
        ("PMINTENSET_EL1", |s| s.pminten |= 1 << 32),
        ("PMOVSSET_EL0", |s| s.pmovs |= 1 << 30),
        ("PMSELR_EL0", |s| s.pmselr = 32),
        ("PMUSERENR_EL0", |s| s.pmuserenr = 1 << 4),
        ("PMEVCNTRn_EL0", |s| s.pmevcntr[6] = 1),
        ("PMEVTYPERn_EL0", |s| s.pmevtyper[0] |= RawPmevtyper::NSH),
    ];
    for (name, change) in damage {
        match refused(change) {
            RestoreError::Reserved { register, .. } => assert_eq!(register, name),
            other => panic!("{name}: {other}"),
        }
    }
}

#[test]
fn reset_forgets_the_guest_and_releases_the_host() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    guest.pmu.reset(&mut guest.host);
    assert!(guest.host.created().is_empty());
    let fresh = self::guest().pmu.save(&mut FakeHost::default());
    assert_eq!(guest.pmu.save(&mut guest.host), fresh);
    assert!(!guest.interrupt());
}
