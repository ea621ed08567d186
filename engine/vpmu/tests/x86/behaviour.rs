//! Tests of the counters' behaviour, event by event.

use crate::support::{CYCLES, END, Guest, Happening, INSTRUCTIONS, SAMPLE, nth};
use vpmu::counter::{Counter, CounterState, Events, Lost, Policy, Report};
use vpmu::x86::intel::Msr::*;
use vpmu::x86::intel::{Capability, FIXED, Version, global_status};
use vpmu::x86::{
    ArchEvent, CounterConfig, EventFilter, MaskedEvent, Outcome, Pmu, PmuConfig, Ring,
};

#[test]
fn a_counter_at_zero_overflows_after_all_of_its_width() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, END);
    assert_eq!(guest.read(Pmc(0)), 0);
    guest.execute(END - 1);
    assert!(!guest.interrupt());
    guest.execute(1);
    assert!(guest.interrupt());
    assert_eq!(guest.read(GlobalStatus), 1);
}

#[test]
fn rings_are_told_apart() {
    let mut guest = Guest::new(Version::V2);
    guest.write(PerfEvtSel(0), 0x0041_00c0);
    guest.write(PerfEvtSel(1), 0x0042_00c0);
    guest.write(PerfEvtSel(2), 0x0040_00c0);
    guest.write(FixedCtrCtrl, 0x1);
    guest.write(GlobalCtrl, 0x1_0000_0007);
    guest.happen(Happening::Instructions, Ring::User, 5);
    guest.happen(Happening::Instructions, Ring::Kernel, 7);
    assert_eq!((guest.read(Pmc(0)), guest.read(Pmc(1))), (5, 7));
    assert_eq!((guest.read(Pmc(2)), guest.read(FixedCtr(0))), (0, 7));
}

#[test]
fn each_enable_gates() {
    let mut guest = Guest::new(Version::V4);
    guest.sample(0, INSTRUCTIONS, 1000);
    let value = |guest: &mut Guest| guest.read(Pmc(0)) - (END - 1000);
    guest.execute(1);
    assert_eq!(
        value(&mut guest),
        1,
        "general counters are enabled globally by reset"
    );
    guest.write(GlobalCtrl, 0);
    guest.execute(10);
    assert_eq!(value(&mut guest), 1);
    guest.write(GlobalCtrl, 1);
    guest.write(PerfEvtSel(0), (SAMPLE & !(1 << 22)) | INSTRUCTIONS);
    guest.execute(10);
    assert_eq!(value(&mut guest), 1);
    guest.write(PerfEvtSel(0), SAMPLE | INSTRUCTIONS);
    guest.write(GlobalStatusSet, global_status::CTR_FRZ);
    guest.execute(10);
    assert_eq!(value(&mut guest), 1);
    guest.write(GlobalOvfCtrl, global_status::CTR_FRZ);
    guest.execute(10);
    assert_eq!(value(&mut guest), 11);
}

#[test]
fn a_counter_without_an_interrupt_sets_its_bit_and_asks_for_no_report() {
    let mut guest = Guest::new(Version::V2);
    guest.write(FullWidthPmc(0), END - 10);
    guest.write(PerfEvtSel(0), 0x0043_00c0);
    guest.execute(11);
    assert!(guest.host.reports.is_empty());
    assert_eq!(guest.read(GlobalStatus), 1);
    guest.write(PerfEvtSel(0), 0x0053_00c0);
    assert!(!guest.interrupt(), "an overflow that is over asks nothing");
}

#[test]
fn a_handler_that_does_not_acknowledge_gets_each_pmi() {
    for policy in Policy::ALL {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 10);
        for _ in 0..100 {
            guest.execute(9);
            assert!(!guest.take_pmi());
            guest.execute(1);
            assert!(guest.take_pmi() && !guest.take_pmi());
            assert_eq!(guest.read(GlobalStatus), 1);
            guest.write(FullWidthPmc(0), END - 10);
        }
        // A guest that does not write the counter gets another PMI, too, a whole counter later.
        guest.execute(10);
        assert!(guest.take_pmi());
        guest.execute(END);
        guest.pmu.end_slice(&mut guest.host);
        assert!(guest.take_pmi() && !guest.take_pmi());
    }
}

#[test]
fn overflows_before_one_delivery_are_one_pmi() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, 10);
    guest.sample(1, INSTRUCTIONS, 10);
    guest.execute(10);
    assert!(guest.take_pmi() && !guest.take_pmi());
    assert_eq!(guest.read(GlobalStatus), 0b11);
}

#[test]
fn an_overflow_found_by_the_write_that_stops_its_counter_is_a_pmi() {
    for policy in Policy::ALL {
        for atomic in [false, true] {
            for msr in [GlobalCtrl, PerfEvtSel(0)] {
                let mut guest = Guest::with_policy(policy);
                guest.host.atomic = atomic;
                guest.sample(0, INSTRUCTIONS, 10);
                guest.execute(10);
                guest.write(msr, 0);
                assert_eq!(guest.read(GlobalStatus), 1);
                assert!(guest.pmu.take_pmi(), "{policy:?}: {msr} = 0");
                assert!(!guest.take_pmi(), "the late report is of the same overflow");
            }
        }
    }
}

#[test]
fn a_status_bit_that_is_left_over_makes_no_pmi() {
    let mut guest = Guest::new(Version::V4);
    guest.sample(0, INSTRUCTIONS, 10);
    guest.execute(10);
    assert!(guest.take_pmi());
    for _ in 0..3 {
        guest.write(GlobalCtrl, 0);
        guest.write(GlobalCtrl, 1);
        guest.write(PerfEvtSel(0), 0);
        guest.write(PerfEvtSel(0), SAMPLE | INSTRUCTIONS);
        guest.write(GlobalStatusSet, 1);
        assert!(!guest.take_pmi());
    }
}

#[test]
fn the_acknowledgement_clears_what_overflowed_before_it_noticed_or_not() {
    let mut guest = Guest::new(Version::V2);
    guest.sample(0, INSTRUCTIONS, 10);
    guest.execute(10);
    guest.write(GlobalOvfCtrl, 1);
    assert_eq!(guest.read(GlobalStatus), 0);
    assert!(guest.pmu.take_pmi(), "the acknowledgement was for its bit");
    assert!(!guest.interrupt(), "the late report finds nothing");
    assert_eq!(guest.pmu.statistics().spurious_reports, 1);
    guest.execute(END);
    assert!(guest.interrupt(), "the next one counts");
}

#[test]
fn a_pmi_freezes_by_the_enables_before_version_4() {
    for version in [Version::V2, Version::V3] {
        let mut guest = Guest::new(version);
        guest.write(DebugCtl, 1 << 12);
        guest.sample(0, INSTRUCTIONS, 10);
        guest.write(PerfEvtSel(1), 0x0043_00c0);
        guest.execute(10);
        assert!(guest.take_pmi());
        assert_eq!(guest.read(GlobalCtrl), 0);
        guest.execute(100);
        assert_eq!((guest.read(Pmc(0)), guest.read(Pmc(1))), (0, 10));
        guest.write(GlobalOvfCtrl, 1);
        guest.write(GlobalCtrl, 3);
        guest.execute(1);
        assert_eq!((guest.read(Pmc(0)), guest.read(Pmc(1))), (1, 11));
    }
}

#[test]
fn a_pmi_freezes_by_a_status_bit_from_version_4_on() {
    for version in [Version::V4, Version::V5] {
        let mut guest = Guest::new(version);
        guest.write(DebugCtl, 1 << 12);
        guest.sample(0, INSTRUCTIONS, 10);
        guest.execute(10);
        assert!(guest.take_pmi());
        assert_eq!(guest.read(GlobalStatus), 1 | global_status::CTR_FRZ);
        assert_ne!(guest.read(GlobalCtrl), 0, "the enables stay");
        guest.execute(100);
        assert_eq!(guest.read(Pmc(0)), 0);
        guest.write(GlobalOvfCtrl, 1 | global_status::CTR_FRZ);
        guest.execute(3);
        assert_eq!(guest.read(Pmc(0)), 3);
    }
}

#[test]
fn emulated_instructions_are_counted_and_overflow_on_time() {
    for policy in Policy::ALL {
        let mut guest = Guest::with_policy(policy);
        guest.sample(0, INSTRUCTIONS, 10);
        guest.write(FixedCtrCtrl, 0x3);
        guest.write(GlobalCtrl, 0x1_0000_0001);
        guest.execute(4);
        let Guest { pmu, host } = &mut guest;
        assert!(!pmu.emulated(ArchEvent::Instructions, 1, Ring::Kernel, host));
        assert!(!pmu.emulated(ArchEvent::Branches, 9, Ring::Kernel, host));
        guest.execute(4);
        assert!(!guest.interrupt());
        let Guest { pmu, host } = &mut guest;
        assert!(pmu.emulated(ArchEvent::Instructions, 1, Ring::User, host));
        assert_eq!((guest.read(Pmc(0)), guest.read(FixedCtr(0))), (0, 10));
    }
}

#[test]
fn emulated_instructions_cost_nothing_where_nobody_counts_them() {
    let mut guest = Guest::new(Version::V2);
    guest.write(PerfEvtSel(0), SAMPLE | CYCLES);
    guest.host.calls();
    let Guest { pmu, host } = &mut guest;
    let _ = pmu.emulated(ArchEvent::Instructions, 1, Ring::Kernel, host);
    assert_eq!(guest.host.calls(), []);
    // Nor do they cost anything where nobody waits for an interrupt.
    guest.write(PerfEvtSel(1), 0x0043_00c0);
    guest.host.calls();
    let Guest { pmu, host } = &mut guest;
    let _ = pmu.emulated(ArchEvent::Instructions, 1, Ring::Kernel, host);
    assert_eq!(guest.host.calls(), []);
    assert_eq!(guest.read(Pmc(1)), 1);
}

#[test]
fn a_denied_event_reads_back_and_counts_nothing() {
    let filter = EventFilter::deny_listed()
        .with(MaskedEvent::one(0xc0, 0))
        .expect("one event fits")
        .with_fixed(0b001);
    let mut guest = Guest::with(PmuConfig {
        filter,
        ..PmuConfig::new(Capability::new(Version::V2))
    });
    guest.sample(0, INSTRUCTIONS, 10);
    guest.write(FixedCtrCtrl, 0xb);
    guest.write(GlobalCtrl, 0x1_0000_0001);
    guest.execute(100);
    assert_eq!(guest.read(PerfEvtSel(0)), SAMPLE | INSTRUCTIONS);
    assert_eq!((guest.read(Pmc(0)), guest.read(FixedCtr(0))), (END - 10, 0));
    assert_eq!(guest.host.calls(), []);
    assert_eq!(guest.pmu.counter_state(nth(0)), Some(CounterState::Paused));
    let Guest { pmu, host } = &mut guest;
    pmu.set_filter(EventFilter::default(), host);
    guest.execute(3);
    assert_eq!((guest.read(Pmc(0)), guest.read(FixedCtr(0))), (END - 7, 3));
}

#[test]
fn an_event_that_cpuid_denies_is_lost_and_asks_no_host() {
    let capability = Capability {
        events: 0x7f & !(1 << 1),
        ..Capability::new(Version::V2)
    };
    let mut guest = Guest::with(PmuConfig::new(capability));
    assert_eq!(capability.leaf_0a().ebx, 1 << 1);
    guest.sample(0, INSTRUCTIONS, 10);
    guest.execute(100);
    let lost = CounterState::Lost(Lost::Unsupported);
    assert_eq!(guest.pmu.counter_state(nth(0)), Some(lost));
    assert_eq!(guest.host.calls(), []);
    guest.write(PerfEvtSel(0), SAMPLE | CYCLES);
    assert_eq!(
        guest.pmu.counter_state(nth(0)),
        Some(CounterState::Counting)
    );
}

#[test]
fn any_thread_is_kept_and_counts_nothing_in_versions_3_and_4() {
    for version in [Version::V3, Version::V4] {
        let mut guest = Guest::new(version);
        guest.write(PerfEvtSel(0), SAMPLE | 1 << 21 | INSTRUCTIONS);
        guest.write(FixedCtrCtrl, 0xf);
        guest.write(GlobalCtrl, 0x1_0000_0001);
        guest.execute(100);
        assert_eq!((guest.read(Pmc(0)), guest.read(FixedCtr(0))), (0, 0));
        for n in [0, FIXED] {
            let lost = CounterState::Lost(Lost::Unsupported);
            assert_eq!(guest.pmu.counter_state(nth(n)), Some(lost));
        }
    }
}

#[test]
fn a_host_without_room_is_asked_again_in_the_next_slice() {
    let mut guest = Guest::new(Version::V2);
    guest.host.refuse = Some(Lost::Busy);
    guest.sample(0, INSTRUCTIONS, 1000);
    let busy = CounterState::Lost(Lost::Busy);
    assert_eq!(guest.pmu.counter_state(nth(0)), Some(busy));
    guest.execute(5);
    guest.host.refuse = None;
    guest.pmu.end_slice(&mut guest.host);
    assert_eq!(
        guest.pmu.counter_state(nth(0)),
        Some(CounterState::Counting)
    );
    guest.execute(3);
    assert_eq!(guest.read(Pmc(0)), END - 997);
}

#[test]
fn a_host_that_shares_its_counter_is_found_out() {
    struct Watch(Vec<(u8, Lost)>);
    impl Events for Watch {
        fn lost(&mut self, counter: Counter, reason: Lost) {
            self.0.push((counter.number(), reason));
        }
    }
    let config = PmuConfig::new(Capability::new(Version::V2));
    let mut pmu = Pmu::with_events(config, Watch(Vec::new())).expect("a possible PMU");
    let mut host = crate::support::FakeHost::<CounterConfig>::new(Policy::ReusePaused);
    assert_eq!(
        pmu.wrmsr(PerfEvtSel(2).address(), SAMPLE | CYCLES, &mut host),
        Outcome::Done
    );
    host.multiplex(2);
    for _ in 0..2 {
        let _ = pmu.rdmsr(Pmc(2).address(), &mut host);
    }
    assert_eq!(pmu.events().0, [(2, Lost::Multiplexed)], "reported once");
    assert_eq!(pmu.statistics().part_time, 1);
    let shared = CounterState::Lost(Lost::Multiplexed);
    assert_eq!(pmu.counter_state(nth(2)), Some(shared));
    assert!(
        host.running().contains(nth(2)),
        "and still counting what it can"
    );
    // A counter that is configured anew gets a new chance, and a new host event.
    assert_eq!(
        pmu.wrmsr(PerfEvtSel(2).address(), SAMPLE | INSTRUCTIONS, &mut host),
        Outcome::Done
    );
    assert_eq!(pmu.counter_state(nth(2)), Some(CounterState::Counting));
}

#[test]
fn an_inverted_counter_of_version_5_stays_out_of_sleep() {
    let mut guest = Guest::new(Version::V5);
    guest.write(PerfEvtSel(0), SAMPLE | 1 << 24 | 1 << 23 | INSTRUCTIONS);
    let created = guest.host.calls().into_iter().find_map(|call| match call {
        crate::support::Call::Create(0, config) => Some(config),
        _ => None,
    });
    let config = created.expect("a host event");
    assert!(config.only_c0 && config.invert && config.threshold == 1);
    assert_eq!(config.raw(), Some(0x0180_00c0));
}

#[test]
fn a_report_for_a_counter_that_does_not_exist_does_nothing() {
    let mut guest = Guest::new(Version::V2);
    for n in [4, 15, 19, 31] {
        for report in [Report::Due, Report::Moved, Report::Unsure] {
            assert!(!guest.pmu.overflow(nth(n), report, &mut guest.host));
        }
        assert_eq!(guest.pmu.counter_state(nth(n)), None);
    }
    assert_eq!(guest.host.calls(), []);
}
