//! Mistakes that published PMU implementations made and reviewers found, each shown absent here.
//! Those of the partitioned design are in `tests/partition.rs`.

use crate::support::{Guest, INST_RETIRED};
use vpmu::arm::ExceptionLevel::{El0, El1};
use vpmu::arm::Register::*;
use vpmu::arm::{
    CHAIN, CounterConfig, EventKind, Outcome, PmuVersion, RawPmevtyper, SW_INCR, pmcr,
};

const CYCLES_BIT: u64 = 1 << 31;

fn guest() -> Guest {
    Guest::new(PmuVersion::V3p5)
}

#[test]
fn the_cycle_filter_goes_to_pmccfiltr_and_nowhere_else() {
    let mut guest = guest();
    guest.write(Pmselr, 31);
    guest.write(Pmxevtyper, RawPmevtyper::U | 0x7fff);
    assert_eq!(
        guest.read(Pmccfiltr),
        RawPmevtyper::U,
        "no event number in it"
    );
    assert_eq!(guest.read(Pmxevtyper), RawPmevtyper::U);
    for n in 0..6 {
        assert_eq!(guest.read(Pmevtyper(n)), 0);
    }
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    guest.host.happen(vpmu::arm::CPU_CYCLES, El0, 5);
    guest.host.happen(vpmu::arm::CPU_CYCLES, El1, 7);
    assert_eq!(guest.read(Pmccntr), 7);
}

#[test]
fn index_31_through_pmxevcntr_is_undefined_and_touches_nothing() {
    let mut guest = guest();
    guest.write(Pmccntr, 99);
    guest.write(Pmselr, 31);
    for level in [El0, El1] {
        guest.write(Pmuserenr, 1);
        assert_eq!(
            guest.pmu.read(Pmxevcntr, level, &mut guest.host),
            Outcome::Undefined
        );
        assert_eq!(
            guest.pmu.write(Pmxevcntr, level, 1, &mut guest.host),
            Outcome::Undefined
        );
    }
    assert_eq!(guest.read(Pmccntr), 99);
}

#[test]
fn pmselr_is_the_guests_own_after_a_load_and_after_a_restore() {
    let mut guest = guest();
    guest.write(Pmselr, 3);
    guest.pmu.put(&mut guest.host);
    let mut other = self::guest();
    other.write(Pmselr, 5);
    other.write(Pmxevcntr, 0x55);
    guest.pmu.load(&mut guest.host);
    guest.write(Pmxevcntr, 0x33);
    assert_eq!(
        (guest.read(Pmevcntr(3)), guest.read(Pmevcntr(5))),
        (0x33, 0)
    );

    let state = guest.pmu.save(&mut guest.host);
    other
        .pmu
        .restore(&state, &mut other.host)
        .expect("the same kind of PMU");
    other.write(Pmxevcntr, 0x34);
    assert_eq!((other.read(Pmselr), other.read(Pmevcntr(3))), (3, 0x34));
}

#[test]
fn an_overflow_between_reading_and_clearing_pmovs_is_not_lost() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.sample(1, INST_RETIRED, 0xffff_fffe);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    assert!(guest.interrupt());
    let seen = guest.read(PmovsClr);
    assert_eq!(seen, 1);
    guest.execute(1);
    guest.write(PmovsClr, seen);
    assert!(guest.interrupt());
    assert_eq!(guest.read(PmovsClr), 2);
}

#[test]
fn an_overflow_found_by_a_read_raises_the_line_before_its_report_arrives() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    assert_eq!(guest.read(Pmevcntr(0)), 1 << 32);
    assert!(guest.pmu.line());
    assert!(guest.interrupt(), "and the report changes nothing");
}

#[test]
fn pmovsset_by_the_guest_interrupts_like_an_overflow() {
    let mut guest = guest();
    guest.write(PmintenSet, 4);
    guest.write(Pmcr, pmcr::E);
    guest.write(PmovsSet, 4);
    assert!(guest.pmu.line());
    guest.pmu.put(&mut guest.host);
    assert!(guest.pmu.line(), "and stays through a switch");
}

#[test]
fn no_counter_runs_after_a_put() {
    let mut guest = guest();
    for n in 0..6 {
        guest.sample(n, INST_RETIRED, 0);
    }
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    assert_eq!(guest.host.running().len(), 7);
    guest.pmu.put(&mut guest.host);
    assert!(guest.host.running().is_empty());
    // The counter does not count another guest's work meanwhile.
    guest.execute(1000);
    guest.cycles(1000);
    guest.pmu.load(&mut guest.host);
    assert_eq!((guest.read(Pmevcntr(0)), guest.read(Pmccntr)), (0, 0));
    assert_eq!(guest.host.running().len(), 7);
}

#[test]
fn a_report_after_the_put_still_raises_the_line_to_wake_the_vcpu() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    guest.pmu.put(&mut guest.host);
    assert!(guest.pmu.line(), "a put leaves nothing uncounted");
    assert!(guest.interrupt());
}

#[test]
fn software_increments_of_counters_that_do_not_exist_are_ignored() {
    let mut guest = guest();
    for n in 0..6 {
        guest.sample(n, SW_INCR, 0);
    }
    guest.write(Pmcr, pmcr::E);
    guest.write(Pmswinc, 0xffff_ffff_ffff_ffc0);
    assert_eq!([0, 1, 2, 3, 4, 5].map(|n| guest.read(Pmevcntr(n))), [0; 6]);
    assert_eq!(guest.read(PmovsSet), 0);
}

#[test]
fn the_last_even_counter_has_no_chain_above_it() {
    let mut config = crate::support::config(PmuVersion::V3p4);
    config.counters = 31;
    let mut guest = Guest::with(config);
    guest.sample(30, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmccfiltr, CHAIN.into());
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    assert_eq!((guest.read(Pmevcntr(30)), guest.read(Pmccntr)), (0, 0));
    assert_eq!(guest.read(PmovsSet), 1 << 30);
}

#[test]
fn a_guest_cannot_make_the_host_count_outside_it() {
    let mut config = crate::support::config(PmuVersion::V3p5);
    config.el3 = true;
    let mut guest = Guest::with(config);
    let outside = RawPmevtyper::NSH | RawPmevtyper::M | RawPmevtyper::MT | RawPmevtyper::SH;
    guest.write(
        Pmevtyper(0),
        u64::MAX << 32 | outside | u64::from(INST_RETIRED),
    );
    guest.write(Pmccfiltr, u64::MAX << 32 | outside);
    assert_eq!(guest.read(Pmevtyper(0)), INST_RETIRED.into());
    assert_eq!(guest.read(Pmccfiltr), 0);
    let twins = RawPmevtyper::P | RawPmevtyper::NSK | RawPmevtyper::NSU;
    guest.write(Pmevtyper(0), twins | u64::from(INST_RETIRED));
    guest.write(PmcntenSet, 1);
    guest.write(Pmcr, pmcr::E);
    let event = EventKind::Event(INST_RETIRED);
    let wanted = CounterConfig {
        event,
        el0: false,
        el1: true,
    };
    assert_eq!(
        guest.host.calls.first(),
        Some(&crate::support::Call::Create(0, wanted))
    );
}
