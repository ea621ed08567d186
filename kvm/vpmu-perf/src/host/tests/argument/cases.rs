//! Single guests and machines, each for one rule.

use vpmu::x86::intel::RawPerfEvtSel;

use super::*;

#[test]
fn each_sample_of_a_rare_event_is_had_without_a_longer_period() {
    for repeating in [false, true] {
        let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, repeating);
        vcpu.pmu.load(&mut vcpu.host);
        vcpu.program(0, LLC_MISSES, 1000);
        vcpu.start();
        // 20,000 events a second, and a sample for each thousandth.
        vcpu.run(5_000_000_000, [1000; 4]);
        assert_eq!(
            vcpu.pmis, 99,
            "the handler takes some of an event each time"
        );
    }
}

#[test]
fn a_storm_takes_no_more_of_the_host_than_its_bound() {
    for repeating in [false, true] {
        let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, repeating);
        vcpu.pmu.load(&mut vcpu.host);
        for n in 0..GENERAL {
            vcpu.program(n, CYCLES, 1);
        }
        vcpu.start();
        let before = vcpu.kernel.host();
        vcpu.run(2_000_000_000, [1; 4]);
        let after = vcpu.kernel.host();
        let (time, interrupts) = (after.0 - before.0, after.1 - before.1);
        eprintln!("{} of 1000 in overflows", interrupts * 1000 / time);
        // An interrupt takes 1000 ns, so one each FLOOR ns is a fiftieth of the time.
        assert!(interrupts * 1000 / time <= 22, "{interrupts} of {time} ns");
    }
}

#[test]
fn a_full_queue_of_signals_costs_no_interrupt() {
    for backing in [Backing::Hardware, Backing::Clock] {
        let machine = Machine {
            full_each: 1,
            latency: 0,
            ..Machine::default()
        };
        let mut vcpu = Vcpu::backed(backing, machine, Policy::ReusePaused, false);
        vcpu.pmu.load(&mut vcpu.host);
        vcpu.program(0, CLOCK, 1_000_000);
        vcpu.ideal = [None; 4];
        let mut pmis = 0;
        vcpu.start();
        for _ in 0..100 {
            vcpu.kernel.run(1_000_000);
            for (counter, report) in vcpu.host.take_overflows() {
                assert_eq!(report, Report::Unsure, "nobody vouches for it");
                vcpu.pmu.overflow(counter, report, &mut vcpu.host);
            }
            if vcpu.pmu.take_pmi() {
                pmis += 1;
                vcpu.write(PMC0, MASK + 1 - 1_000_000);
            }
        }
        // The hardware's cycles are three times as many.
        assert!(pmis >= 99, "{backing:?}: {pmis}");
    }
}

#[test]
fn a_report_of_a_longer_period_vouches_for_nothing() {
    let mut vcpu = Vcpu::new(Machine::default(), Policy::ReusePaused, true);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 10);
    vcpu.start();
    for _ in 0..10 {
        vcpu.kernel.run(TICK);
        for (counter, report) in vcpu.host.take_overflows() {
            assert_eq!(report, Report::Unsure);
            vcpu.pmu.overflow(counter, report, &mut vcpu.host);
        }
    }
}

#[test]
fn there_are_as_many_counters_as_others_have_left() {
    for (counters, pinned, free) in [(8, 0, 8), (4, 0, 4), (4, 2, 2), (2, 1, 1), (3, 3, 0)] {
        let kernel = Fake::new(Machine {
            counters,
            pinned,
            ..Machine::default()
        });
        let chooser = Chooser::new(kernel, &PerfOptions::default(), true).unwrap();
        match free {
            0 => assert_eq!(chooser.backing, Backing::Clock, "{pinned} of {counters}"),
            free => assert_eq!(
                chooser.free_counters(),
                Some(free),
                "{pinned} of {counters}"
            ),
        }
        assert_eq!(kernel.open_events(), 0, "nothing stays open");
    }
}

#[test]
fn as_many_counters_as_are_free_count_to_the_last_event() {
    for (pinned, free) in [(4, 4), (6, 2), (7, 1), (8, 0)] {
        let machine = Machine {
            pinned,
            ..Machine::default()
        };
        let chooser = Chooser::new(Fake::new(machine), &PerfOptions::default(), true).unwrap();
        let (event, counters) = match chooser.backing {
            Backing::Hardware => (CYCLES, chooser.free_counters().unwrap()),
            // It counts for as many as there are.
            Backing::Clock => (CLOCK, GENERAL),
        };
        assert_eq!(counters, if free == 0 { GENERAL } else { free });
        let mut vcpu = Vcpu::backed(chooser.backing, machine, Policy::ReusePaused, false);
        vcpu.pmu.load(&mut vcpu.host);
        for n in 0..counters {
            vcpu.program(n, event, 1 << 40);
        }
        vcpu.start();
        vcpu.run(100 * TICK, [1 << 40; 4]);
        vcpu.stop();
        for n in 0..counters {
            let state = vcpu.state(n).unwrap();
            assert!(!matches!(state, CounterState::Lost(_)), "{free}: {state:?}");
        }
        vcpu.check();
    }
}

#[test]
fn a_counter_that_shares_says_for_how_long_it_has_counted() {
    let machine = Machine {
        counters: 1,
        ..Machine::default()
    };
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, false);
    vcpu.pmu.load(&mut vcpu.host);
    for n in 0..2 {
        vcpu.program(n, BRANCH_MISSES, 1 << 40);
    }
    vcpu.start();
    vcpu.run(100 * TICK, [1 << 40; 4]);
    vcpu.stop();
    for n in 0..2 {
        let lost = CounterState::Lost(Lost::Multiplexed);
        assert_eq!(vcpu.state(n), Some(lost));
        let (counted, of) = vcpu.host.times(Counter::new(n).unwrap()).unwrap();
        assert!(
            (45..=55).contains(&(100 * counted / of)),
            "{counted} of {of}"
        );
    }
}

#[test]
fn a_throttled_counter_is_lost_and_goes_on() {
    let machine = Machine {
        per_tick: 5,
        ..Machine::default()
    };
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, true);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 30_000);
    vcpu.start();
    vcpu.run(10 * TICK, [30_000; 4]);
    vcpu.stop();
    let lost = CounterState::Lost(Lost::Throttled);
    assert_eq!(vcpu.state(0), Some(lost));
    // Five overflows and then nothing until the tick would be 51. It goes on as soon as that is seen.
    assert!(vcpu.pmis > 100, "{}", vcpu.pmis);
}

/// Nothing starts a member of a group again but a new period.
#[test]
fn a_throttled_clock_goes_on() {
    const PERIOD: u64 = 100_000;
    let kernel = Fake::new(Machine {
        per_tick: 5,
        ..Machine::default()
    });
    let mut host = PerfHost::counting(kernel, options(Backing::Clock, true), true).unwrap();
    let cycles = RawPerfEvtSel(CLOCK.0).config(Version::V2);
    let all = CounterSet::first(2);
    for counter in all {
        assert_eq!(host.create(counter, &cycles), Ok(()));
    }
    let counter = Counter::at::<0>();
    host.set_period(counter, NonZeroU64::new(PERIOD));
    host.resume(all);
    let (mut ran, mut reports) = (0, 0);
    while ran < 10 * TICK {
        ran += kernel.run(10 * TICK - ran);
        reports += host.take_overflows().count() as u64;
    }
    assert!(reports * PERIOD > 9 * TICK, "{reports}");
    assert_eq!(host.deficit(counter), None);
}

#[test]
fn another_vms_mediated_pmu_is_waited_for() {
    let machine = Machine {
        mediated: true,
        ..Machine::default()
    };
    // Without a choice the host has hardware, too: a clock would be something else, and silently so.
    let chooser = Chooser::new(Fake::new(machine), &PerfOptions::default(), true).unwrap();
    assert_eq!(chooser.backing, Backing::Hardware);
    assert!(chooser.is_mediated() && chooser.counts(ArchEvent::CoreCycles));
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, false);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 1 << 40);
    vcpu.start();
    assert_eq!(vcpu.state(0), Some(CounterState::Lost(Lost::Busy)));
    vcpu.kernel.change(|machine| machine.mediated = false);
    vcpu.pmu.put(&mut vcpu.host);
    vcpu.pmu.load(&mut vcpu.host);
    assert_eq!(vcpu.state(0), Some(CounterState::Counting));
}

#[test]
fn time_on_a_core_of_another_kind_is_lost_and_said() {
    let machine = Machine {
        e_core_each: 4,
        ..Machine::default()
    };
    let mut vcpu = Vcpu::new(machine, Policy::ReusePaused, false);
    vcpu.pmu.load(&mut vcpu.host);
    vcpu.program(0, CYCLES, 1 << 40);
    vcpu.start();
    vcpu.run(100 * TICK, [1 << 40; 4]);
    vcpu.stop();
    let lost = CounterState::Lost(Lost::Multiplexed);
    assert_eq!(vcpu.state(0), Some(lost));
    let (counted, of) = vcpu.host.times(Counter::at::<0>()).unwrap();
    assert!(
        (70..=80).contains(&(100 * counted / of)),
        "{counted} of {of}"
    );
}
