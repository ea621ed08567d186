//! Calls to the host: the cost of an emulated PMU.

use crate::support::{Call, Guest, INST_RETIRED, nth};
use vpmu::arm::ExceptionLevel::El1;
use vpmu::arm::Register::*;
use vpmu::arm::{CounterConfig, EventKind, PmuVersion, RawPmevtyper, Register, pmcr};
use vpmu::counter::{CounterSet, CounterState, Report};

fn guest() -> Guest {
    Guest::new(PmuVersion::V3p5)
}

fn set<const N: usize>(counters: [u8; N]) -> CounterSet {
    counters
        .into_iter()
        .fold(CounterSet::EMPTY, |set, n| set | CounterSet::of(nth(n)))
}

fn instructions() -> CounterConfig {
    CounterConfig {
        event: EventKind::Event(INST_RETIRED),
        el0: true,
        el1: true,
    }
}

#[test]
fn a_guest_that_never_enables_a_counter_costs_no_call() {
    let mut guest = guest();
    for register in Register::all() {
        let _ = guest.pmu.read(register, El1, &mut guest.host);
        if register != PmcntenSet {
            let _ = guest.pmu.write(register, El1, 0x55, &mut guest.host);
        }
    }
    guest.pmu.put(&mut guest.host);
    guest.pmu.load(&mut guest.host);
    assert_eq!(guest.host.calls(), []);
    assert_eq!(guest.pmu.statistics().host_operations(), 0);
}

#[test]
fn only_what_changed_is_touched() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_0000);
    guest.sample(1, 0x13, 0);
    assert_eq!(guest.host.calls(), [], "created when first needed");
    guest.write(Pmcr, pmcr::E);
    let other = CounterConfig {
        event: EventKind::Event(0x13),
        ..instructions()
    };
    assert_eq!(
        guest.host.calls(),
        [
            Call::Create(0, instructions()),
            Call::SetPeriod(0, Some(0x1_0000)),
            Call::Create(1, other),
            Call::SetPeriod(1, Some(1 << 32)),
            Call::Resume(set([0, 1])),
        ]
    );
    guest.write(Pmevtyper(0), INST_RETIRED.into());
    guest.write(PmcntenSet, 3);
    guest.write(PmintenSet, 3);
    guest.write(Pmcr, pmcr::E);
    assert_eq!(guest.host.calls(), [], "the same again is nothing");

    guest.write(Pmcr, 0);
    assert_eq!(guest.host.calls(), [Call::Pause(set([0, 1]))]);
    assert_eq!(
        (guest.read(Pmevcntr(0)), guest.read(Pmevcntr(0))),
        (0xffff_0000, 0xffff_0000)
    );
    assert_eq!(guest.host.calls(), [Call::Read(0)], "nothing is read twice");
    guest.write(Pmevcntr(0), 0xffff_8000);
    assert_eq!(guest.host.calls(), []);
    guest.write(Pmcr, pmcr::E);
    assert_eq!(
        guest.host.calls(),
        [Call::SetPeriod(0, Some(0x8000)), Call::Resume(set([0, 1]))]
    );

    guest.write(Pmevtyper(0), RawPmevtyper::P | u64::from(INST_RETIRED));
    assert_eq!(
        guest.host.calls(),
        [
            Call::Pause(set([0])),
            Call::Read(0),
            Call::Release(0),
            Call::Create(
                0,
                CounterConfig {
                    el1: false,
                    ..instructions()
                }
            ),
            Call::SetPeriod(0, Some(0x8000)),
            Call::Resume(set([0])),
        ]
    );
}

#[test]
fn an_event_that_comes_back_while_disabled_finds_its_host_counter() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0);
    guest.write(Pmcr, pmcr::E);
    guest.write(PmcntenClr, 1);
    guest.host.calls();
    guest.write(Pmevtyper(0), 0x13);
    guest.write(Pmevtyper(0), INST_RETIRED.into());
    guest.write(PmcntenSet, 1);
    assert_eq!(guest.host.calls(), [Call::Read(0), Call::Resume(set([0]))]);
}

#[test]
fn early_stray_and_repeated_reports_do_no_harm() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_fff0);
    guest.write(Pmcr, pmcr::E);
    guest.execute(4);
    guest.host.calls();
    assert!(!guest.pmu.overflow(nth(0), Report::Unsure, &mut guest.host));
    assert_eq!(
        guest.host.calls(),
        [Call::Read(0), Call::SetPeriod(0, Some(12))]
    );
    for stray in [1, 5, 6, 31] {
        assert!(
            !guest
                .pmu
                .overflow(nth(stray), Report::Unsure, &mut guest.host)
        );
    }
    guest.execute(12);
    assert!(guest.interrupt());
    assert!(
        guest.pmu.overflow(nth(0), Report::Unsure, &mut guest.host),
        "still high, still one overflow"
    );
    assert_eq!(guest.pmu.statistics().reports, 7);
    assert_eq!(guest.pmu.statistics().spurious_reports, 6);
}

#[test]
fn put_stops_everything_and_load_goes_on() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ff00);
    guest.write(Pmcr, pmcr::E);
    guest.execute(0x10);
    guest.host.calls();
    guest.pmu.put(&mut guest.host);
    guest.pmu.put(&mut guest.host);
    assert_eq!(guest.host.calls(), [Call::Pause(set([0])), Call::Read(0)]);
    assert_eq!(guest.pmu.counter_state(nth(0)), Some(CounterState::Paused));
    guest.pmu.load(&mut guest.host);
    guest.pmu.load(&mut guest.host);
    assert_eq!(
        guest.host.calls(),
        [Call::Resume(set([0]))],
        "the period stands"
    );
    guest.execute(0xf0);
    assert!(guest.interrupt());
}

#[test]
fn a_slice_without_use_releases_the_host_counter() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0);
    guest.write(Pmcr, pmcr::E);
    guest.write(Pmcr, 0);
    guest.pmu.put(&mut guest.host);
    assert_eq!(guest.host.created(), set([0]), "it ran in this slice");
    guest.pmu.load(&mut guest.host);
    guest.host.calls();
    guest.pmu.put(&mut guest.host);
    assert_eq!(guest.host.calls(), [Call::Release(0)]);
    guest.pmu.load(&mut guest.host);
    guest.pmu.put(&mut guest.host);
    assert_eq!(guest.host.calls(), []);
    guest.pmu.load(&mut guest.host);
    guest.write(Pmcr, pmcr::E);
    guest.execute(3);
    assert_eq!(guest.read(Pmevcntr(0)), 3);
}
