//! Counting and overflow, CHAIN and SW_INCR included.

use crate::support::{Call, Guest, INST_RETIRED, nth};
use vpmu::arm::ExceptionLevel::{El0, El1};
use vpmu::arm::Register::*;
use vpmu::arm::{CHAIN, CPU_CYCLES, Outcome, PmuVersion, RawPmevtyper, SW_INCR, pmcr, pmuserenr};
use vpmu::counter::CounterState;

const CYCLES_BIT: u64 = 1 << 31;

fn guest() -> Guest {
    Guest::new(PmuVersion::V3p5)
}

#[test]
fn a_counter_at_exactly_zero_overflows_after_2_to_the_32() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0);
    guest.write(Pmcr, pmcr::E);
    guest.execute((1 << 32) - 1);
    assert!(!guest.interrupt());
    assert_eq!(guest.read(PmovsSet), 0);
    guest.execute(1);
    assert!(guest.interrupt());
    assert_eq!(
        guest.read(Pmevcntr(0)),
        1 << 32,
        "64 bits wide, overflows at 32"
    );
}

#[test]
fn a_64_bit_counter_at_exactly_zero_wants_no_second_report_while_it_counts() {
    let mut guest = guest();
    guest.write(Pmcr, pmcr::LP | pmcr::LC);
    guest.sample(0, INST_RETIRED, 0);
    guest.write(Pmcr, pmcr::E | pmcr::LP | pmcr::LC);
    guest.execute(1000);
    guest.host.calls();
    guest.write(PmovsClr, 1);
    guest.write(PmintenSet, 2);
    assert!(
        !guest
            .host
            .calls()
            .iter()
            .any(|call| matches!(call, Call::SetPeriod(0, _)))
    );
    guest.write(Pmevcntr(0), u64::MAX);
    guest.execute(1);
    assert!(guest.interrupt());
    assert_eq!(guest.read(Pmevcntr(0)), 0);
}

#[test]
fn a_second_overflow_without_a_rewrite_interrupts_again() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ff00);
    guest.write(Pmcr, pmcr::E);
    guest.execute(0x100);
    assert!(guest.interrupt());
    guest.write(PmovsClr, 1);
    assert!(!guest.pmu.line());
    guest.execute((1 << 32) - 1);
    assert!(!guest.interrupt());
    guest.execute(1);
    assert!(guest.interrupt());
}

#[test]
fn wraps_between_reads_are_one_overflow_and_every_count_is_kept() {
    let mut guest = Guest::new(PmuVersion::V3p4);
    guest.write(Pmevtyper(0), INST_RETIRED.into());
    guest.write(PmcntenSet, 1);
    guest.write(Pmcr, pmcr::E);
    guest.execute(5 << 32 | 7);
    assert_eq!(guest.read(PmovsSet), 1);
    assert_eq!(guest.read(Pmevcntr(0)), 7);
}

#[test]
fn polling_finds_an_overflow_that_nobody_is_interrupted_for() {
    let mut guest = guest();
    guest.write(Pmevtyper(0), INST_RETIRED.into());
    guest.write(Pmevcntr(0), 0xffff_ffff);
    guest.write(PmcntenSet, 1);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    assert_eq!(guest.read(PmovsClr), 1);
    assert!(
        !guest
            .host
            .calls()
            .iter()
            .any(|call| matches!(call, Call::SetPeriod(..)))
    );
}

#[test]
fn a_wrap_before_pmovsclr_is_cleared_and_one_after_is_not() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    guest.write(PmovsClr, 1);
    assert_eq!(guest.read(PmovsSet), 0);
    assert!(
        !guest.interrupt(),
        "the late report of the cleared overflow is stray"
    );
    guest.write(Pmevcntr(0), 0xffff_ffff);
    guest.execute(1);
    assert_eq!(guest.read(PmovsSet), 1);
}

#[test]
fn the_line_is_computed_from_overflow_enable_and_pmcr_e() {
    let mut guest = guest();
    guest.write(PmovsSet, CYCLES_BIT);
    guest.write(PmintenSet, CYCLES_BIT);
    assert!(!guest.pmu.line());
    guest.write(Pmcr, pmcr::E);
    assert!(guest.pmu.line());
    guest.write(PmintenClr, CYCLES_BIT);
    assert!(!guest.pmu.line());
    guest.write(PmintenSet, CYCLES_BIT);
    assert!(guest.pmu.line());
    guest.write(Pmcr, 0);
    assert!(!guest.pmu.line());
}

#[test]
fn the_cycle_counter_overflows_at_32_bits_and_with_lc_at_64() {
    let mut guest = guest();
    guest.write(Pmccntr, 0x1_ffff_ffff);
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    guest.cycles(1);
    assert_eq!(guest.read(PmovsSet), CYCLES_BIT);
    assert_eq!(guest.read(Pmccntr), 0x2_0000_0000);

    guest.write(Pmcr, pmcr::E | pmcr::LC);
    guest.write(Pmccntr, 0x1_ffff_ffff);
    guest.write(PmovsClr, CYCLES_BIT);
    guest.cycles(1);
    assert_eq!(guest.read(PmovsSet), 0);
    guest.write(Pmccntr, u64::MAX);
    guest.cycles(2);
    assert_eq!(guest.read(PmovsSet), CYCLES_BIT);
    assert_eq!(guest.read(Pmccntr), 1);
}

#[test]
fn what_was_counted_before_a_width_changed_overflowed_at_the_old_width() {
    for (counter, bit) in [(0, pmcr::LP), (31, pmcr::LC)] {
        let mut guest = guest();
        guest.write(Pmevtyper(0), CPU_CYCLES.into());
        guest.write(PmcntenSet, CYCLES_BIT | 1);
        for register in [Pmevcntr(0), Pmccntr] {
            guest.write(register, 0xffff_ffff);
        }
        guest.write(Pmcr, pmcr::E);
        guest.cycles(1);
        guest.write(Pmcr, pmcr::E | bit);
        assert_eq!(guest.read(PmovsSet) >> counter & 1, 1, "counter {counter}");
    }
}

#[test]
fn pmcr_d_divides_cycles_by_64_and_keeps_the_rest() {
    let mut guest = guest();
    guest.write(Pmccntr, 0xffff_fffe);
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E | pmcr::D);
    guest.cycles(63);
    assert_eq!(guest.read(Pmccntr), 0xffff_fffe);
    guest.cycles(1);
    assert_eq!(guest.read(Pmccntr), 0xffff_ffff);
    guest.cycles(10);
    guest.write(PmintenSet, CYCLES_BIT);
    guest.cycles(53);
    assert!(!guest.interrupt());
    guest.cycles(1);
    assert!(
        guest.interrupt(),
        "the period is asked for in cycles, less those of the rest"
    );
    guest.write(Pmcr, pmcr::E | pmcr::D | pmcr::LC);
    guest.write(Pmccntr, 0);
    guest.cycles(3);
    assert_eq!(guest.read(Pmccntr), 3, "LC switches the divider off");
}

#[test]
fn pmcr_p_and_c_reset_values_and_no_overflow_bits() {
    let mut guest = guest();
    guest.sample(2, INST_RETIRED, 0xffff_ffff);
    guest.write(PmcntenSet, CYCLES_BIT);
    guest.write(Pmcr, pmcr::E);
    guest.execute(5);
    guest.cycles(9);
    guest.write(Pmcr, pmcr::E | pmcr::P);
    assert_eq!((guest.read(Pmevcntr(2)), guest.read(Pmccntr)), (0, 9));
    assert_eq!(
        guest.read(PmovsSet),
        4,
        "what wrapped before the reset stays known"
    );
    guest.write(Pmcr, pmcr::E | pmcr::C);
    guest.execute(1);
    assert_eq!((guest.read(Pmevcntr(2)), guest.read(Pmccntr)), (1, 0));
}

#[test]
fn counters_count_at_the_levels_their_filters_leave() {
    let mut guest = guest();
    for (n, filter) in [(0, 0), (1, RawPmevtyper::P), (2, RawPmevtyper::U)] {
        guest.write(Pmevtyper(n), filter | u64::from(INST_RETIRED));
    }
    guest.write(PmcntenSet, 7);
    guest.write(Pmcr, pmcr::E);
    guest.host.happen(INST_RETIRED, El0, 10);
    guest.host.happen(INST_RETIRED, El1, 1);
    assert_eq!([0, 1, 2].map(|n| guest.read(Pmevcntr(n))), [11, 10, 1]);
}

#[test]
fn a_counter_filtered_everywhere_needs_no_host() {
    let mut guest = guest();
    guest.sample(0, INST_RETIRED, 0);
    guest.write(
        Pmevtyper(0),
        RawPmevtyper::P | RawPmevtyper::U | u64::from(INST_RETIRED),
    );
    guest.write(Pmcr, pmcr::E);
    assert_eq!(guest.host.calls(), []);
}

fn chained(version: PmuVersion) -> Guest {
    let mut guest = Guest::new(version);
    guest.write(Pmevtyper(0), INST_RETIRED.into());
    guest.write(Pmevtyper(1), CHAIN.into());
    guest.write(PmcntenSet, 3);
    guest.write(Pmcr, pmcr::E);
    guest
}

#[test]
fn chain_carries_from_zero() {
    for version in [PmuVersion::V3, PmuVersion::V3p5] {
        let mut guest = chained(version);
        guest.execute((1 << 32) - 1);
        assert_eq!(guest.read(Pmevcntr(1)), 0);
        guest.execute(1);
        assert_eq!(guest.read(Pmevcntr(1)), 1, "{version:?}");
        assert_eq!(
            guest.read(PmovsSet),
            1,
            "the even one overflowed, the odd one did not"
        );
        guest.execute(3 << 32);
        assert_eq!(guest.read(Pmevcntr(1)), 4);
    }
}

#[test]
fn chain_interrupts_when_the_pair_overflows_and_not_before() {
    let mut guest = chained(PmuVersion::V3p4);
    guest.write(PmintenSet, 2);
    guest.write(Pmevcntr(1), 0xffff_fffe);
    guest.execute(2 << 32);
    assert!(guest.interrupt());
    assert_eq!(guest.read(PmovsSet), 3);
    assert_eq!((guest.read(Pmevcntr(0)), guest.read(Pmevcntr(1))), (0, 0));
    assert_eq!(guest.pmu.statistics().reports, 1);
}

#[test]
fn a_pair_interrupts_on_time_whatever_happens_to_its_even_half() {
    for silence in [PmintenClr, PmovsSet] {
        let mut guest = chained(PmuVersion::V3p4);
        guest.write(Pmevcntr(1), 0xffff_fffe);
        guest.write(PmintenSet, 3);
        guest.execute(1000);
        guest.write(silence, 1);
        guest.write(PmintenClr, 1);
        guest.execute((2 << 32) - 1001);
        assert!(!guest.interrupt());
        guest.execute(1);
        assert!(guest.interrupt(), "{}", silence.name());
    }
}

#[test]
fn chain_counts_only_while_it_is_enabled() {
    let mut guest = chained(PmuVersion::V3p4);
    guest.execute(1 << 32);
    guest.write(PmcntenClr, 2);
    guest.execute(1 << 32);
    guest.write(PmcntenSet, 2);
    guest.execute(1 << 32);
    guest.write(Pmcr, 0);
    assert_eq!(guest.read(Pmevcntr(1)), 2);
}

#[test]
fn an_event_that_becomes_chain_does_not_count_old_carries() {
    let mut guest = chained(PmuVersion::V3p4);
    guest.write(Pmevtyper(1), 0x13);
    guest.execute(1 << 32);
    guest.write(Pmevtyper(1), CHAIN.into());
    assert_eq!(guest.read(Pmevcntr(1)), 0);
    guest.execute(1 << 32);
    assert_eq!(guest.read(Pmevcntr(1)), 1);
}

#[test]
fn long_counters_do_not_carry() {
    // There is no carry where a counter without LP would overflow, nor at the counters' own end.
    // This holds for counting by the host and by software.
    for (start, passed) in [(0xffff_ffff, 0), (u64::MAX, 1)] {
        for software in [false, true] {
            let mut guest = chained(PmuVersion::V3p5);
            if software {
                guest.write(Pmevtyper(0), SW_INCR.into());
            }
            guest.write(Pmcr, pmcr::E | pmcr::LP);
            guest.write(PmovsClr, 0xffff_ffff);
            guest.write(Pmevcntr(0), start);
            guest.write(Pmevcntr(1), u64::MAX);
            if software {
                guest.write(Pmswinc, 1);
            } else {
                guest.execute(1);
            }
            assert_eq!(guest.read(Pmevcntr(0)), start.wrapping_add(1));
            assert_eq!(guest.read(Pmevcntr(1)), u64::MAX);
            assert_eq!(guest.read(PmovsSet), passed);
        }
    }
}

#[test]
fn chain_on_an_even_counter_counts_nothing() {
    let mut guest = guest();
    guest.sample(2, CHAIN, 0);
    guest.sample(1, INST_RETIRED, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.execute(1);
    assert_eq!(guest.read(Pmevcntr(2)), 0);
}

#[test]
fn software_increments_overflow_carry_and_interrupt_without_a_host() {
    let mut guest = guest();
    guest.sample(0, SW_INCR, 0xffff_ffff);
    guest.sample(1, CHAIN, 0xffff_ffff);
    guest.write(Pmcr, pmcr::E);
    guest.write(Pmswinc, 1);
    assert!(guest.pmu.line());
    assert_eq!(guest.read(PmovsSet), 3);
    assert_eq!(guest.host.calls(), []);
    assert_eq!(
        guest.pmu.counter_state(nth(0)),
        Some(CounterState::Counting)
    );
}

#[test]
fn software_increments_need_event_enable_level_and_a_counter() {
    let mut guest = guest();
    guest.sample(0, SW_INCR, 0);
    guest.sample(1, INST_RETIRED, 0);
    guest.write(Pmevtyper(2), SW_INCR.into());
    guest.write(Pmevtyper(3), RawPmevtyper::P | u64::from(SW_INCR));
    guest.write(PmcntenSet, 8);
    guest.write(Pmswinc, 0xf);
    assert_eq!(guest.read(Pmevcntr(0)), 0, "PMCR_EL0.E is clear");
    guest.write(Pmcr, pmcr::E);
    guest.write(Pmswinc, u64::MAX);
    assert_eq!([0, 1, 2, 3].map(|n| guest.read(Pmevcntr(n))), [1, 0, 0, 0]);
    assert_eq!(guest.read(Pmccntr), 0);
    guest.write(Pmuserenr, pmuserenr::SW);
    assert_eq!(
        guest.pmu.write(Pmswinc, El0, 0xf, &mut guest.host),
        Outcome::Done
    );
    assert_eq!([0, 1, 2, 3].map(|n| guest.read(Pmevcntr(n))), [2, 0, 0, 1]);
}
