//! Tests of the registers' contents, and of the levels that may access them.

use crate::support::{FakeHost, Guest, INST_RETIRED, config};
use vpmu::arm::ExceptionLevel::{El0, El1};
use vpmu::arm::Register::*;
use vpmu::arm::emulated::{ConfigError, EmulatedPmu};
use vpmu::arm::{CHAIN, CPU_CYCLES, EventFilter, Outcome, PmuVersion, SW_INCR, pmcr, pmuserenr};

fn guest() -> Guest {
    Guest::new(PmuVersion::V3p5)
}

#[test]
fn pmcr_keeps_what_is_writable_and_shows_the_machine() {
    let mut guest = guest();
    guest.write(Pmcr, u64::MAX);
    assert_eq!(
        guest.read(Pmcr),
        0x410b_30f9,
        "IMP, IDCODE, N = 6; P and C read as zero"
    );
    guest.write(Pmcr, 0);
    assert_eq!(guest.read(Pmcr), 0x410b_3000);
    let mut older = Guest::new(PmuVersion::V3p4);
    older.write(Pmcr, u64::MAX);
    assert_eq!(older.read(Pmcr) & pmcr::LP, 0, "no LP before PMUv3p5");
}

#[test]
fn set_and_clear_registers_have_a_bit_for_each_counter_there_is() {
    for (to_set, to_clear) in [
        (PmcntenSet, PmcntenClr),
        (PmintenSet, PmintenClr),
        (PmovsSet, PmovsClr),
    ] {
        let mut guest = guest();
        guest.write(to_set, u64::MAX);
        assert_eq!(guest.read(to_set), 0x8000_003f, "{}", to_set.name());
        guest.write(to_clear, 0xffff_ffff_0000_0005);
        assert_eq!(guest.read(to_clear), 0x8000_003a, "{}", to_clear.name());
        assert_eq!(guest.read(to_set), 0x8000_003a);
    }
}

#[test]
fn counters_are_64_bits_wide_from_v3p5_on() {
    let mut guest = guest();
    guest.write(Pmevcntr(0), u64::MAX);
    assert_eq!(guest.read(Pmevcntr(0)), u64::MAX);
    let mut older = Guest::new(PmuVersion::V3p4);
    older.write(Pmevcntr(0), u64::MAX);
    assert_eq!(older.read(Pmevcntr(0)), 0xffff_ffff);
    older.write(Pmccntr, u64::MAX);
    assert_eq!(older.read(Pmccntr), u64::MAX);
}

#[test]
fn event_types_keep_event_and_filters_of_the_guest() {
    let mut guest = guest();
    guest.write(Pmevtyper(1), u64::MAX);
    assert_eq!(guest.read(Pmevtyper(1)), 0xc000_ffff);
    guest.write(Pmccfiltr, u64::MAX);
    assert_eq!(guest.read(Pmccfiltr), 0xc000_0000);
    let mut first = Guest::new(PmuVersion::V3);
    first.write(Pmevtyper(1), u64::MAX);
    assert_eq!(
        first.read(Pmevtyper(1)),
        0xc000_03ff,
        "event numbers of 10 bits"
    );
}

#[test]
fn pmceid_tells_what_is_counted_what_the_engine_does_and_nothing_denied() {
    let mut guest = guest();
    let own = 1 << SW_INCR | 1 << CHAIN;
    assert_eq!(
        guest.read(Pmceid0),
        own | 1 << CPU_CYCLES | 1 << INST_RETIRED
    );
    let filter = EventFilter::default()
        .deny(INST_RETIRED..=INST_RETIRED)
        .expect("one rule fits");
    guest.pmu.set_filter(filter, &mut guest.host);
    assert_eq!(guest.read(Pmceid0), own | 1 << CPU_CYCLES);

    let mut everything = config(PmuVersion::V3);
    everything.events = [u64::MAX; 2];
    let mut pmu = EmulatedPmu::new(everything).expect("six counters are possible");
    let value = pmu.read(Pmceid1, El1, &mut FakeHost::default());
    assert_eq!(
        value,
        Outcome::Value(0xffff_ffff),
        "no events above 0x4000 in PMUv3"
    );
}

#[test]
fn pmmir_exists_from_v3p4_on() {
    assert_eq!(guest().read(Pmmir), 0x1234);
    let mut older = Guest::new(PmuVersion::V3p1);
    assert_eq!(
        older.pmu.read(Pmmir, El1, &mut older.host),
        Outcome::Undefined
    );
}

#[test]
fn impossible_configurations_are_refused() {
    let mut many = config(PmuVersion::V3p5);
    many.counters = 32;
    assert_eq!(
        EmulatedPmu::new(many).err(),
        Some(ConfigError::Counters(32))
    );
}

#[test]
fn unimplemented_counters_are_undefined_at_both_levels() {
    let mut guest = guest();
    guest.write(Pmuserenr, pmuserenr::MASK);
    for level in [El0, El1] {
        for n in [6, 30, 31, 255] {
            for register in [Pmevcntr(n), Pmevtyper(n)] {
                assert_eq!(
                    guest.pmu.read(register, level, &mut guest.host),
                    Outcome::Undefined
                );
                assert_eq!(
                    guest.pmu.write(register, level, 1, &mut guest.host),
                    Outcome::Undefined
                );
            }
        }
        guest.write(Pmselr, 6);
        for register in [Pmxevcntr, Pmxevtyper] {
            assert_eq!(
                guest.pmu.read(register, level, &mut guest.host),
                Outcome::Undefined
            );
        }
    }
}

#[test]
fn el0_is_trapped_to_el1_until_pmuserenr_opens() {
    let mut guest = guest();
    assert_eq!(
        guest.pmu.read(Pmccntr, El0, &mut guest.host),
        Outcome::TrapToEl1
    );
    guest.write(Pmuserenr, pmuserenr::CR);
    assert_eq!(
        guest.pmu.read(Pmccntr, El0, &mut guest.host),
        Outcome::Value(0)
    );
    assert_eq!(
        guest.pmu.write(Pmccntr, El0, 0, &mut guest.host),
        Outcome::TrapToEl1
    );
    assert_eq!(
        guest.pmu.read(Pmuserenr, El0, &mut guest.host),
        Outcome::Value(pmuserenr::CR)
    );
    assert_eq!(
        guest.pmu.write(Pmuserenr, El0, 0, &mut guest.host),
        Outcome::Undefined
    );
}
