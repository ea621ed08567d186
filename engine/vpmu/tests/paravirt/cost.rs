//! Tests of the device's cost: the figures that justify it.

use vpmu::counter::{CounterHost, CounterSet};
use vpmu::paravirt::{command, word};

use crate::support::{Host, Vcpu, counting, nth, repeating, sampling};

#[test]
fn a_fixed_period_asks_nothing_of_the_host() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 1000);
    let before = vcpu.operations();
    for n in 1..=100 {
        vcpu.run(1000);
        assert_eq!(vcpu.handle(), CounterSet::of(nth(0)));
        assert_eq!(vcpu.count_of(0), n * 1000);
        assert_eq!(vcpu.word(word::overflows(nth(0))), n);
    }
    assert_eq!(vcpu.nmis, 100);
    assert_eq!(vcpu.operations(), before);
}

#[test]
fn a_new_period_asks_twice_and_rings_nothing() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 1000);
    let before = vcpu.operations();
    vcpu.guest_period(0, 700);
    vcpu.run(1000);
    assert_eq!(vcpu.word(word::next(nth(0))), 1700);
    assert_eq!(vcpu.operations(), before + 2, "read, set the period");
    vcpu.run(1400);
    assert_eq!(vcpu.word(word::overflows(nth(0))), 3);
    assert_eq!(vcpu.operations(), before + 2);
}

/// Checks a task that comes back in the middle of a period, on a host that reports late.
#[test]
fn the_rest_of_a_period_asks_three_times_and_no_more() {
    let mut vcpu = Vcpu::new(Host {
        latency: 20,
        ..repeating()
    });
    vcpu.sample(0, 300, 1000);
    vcpu.want(1);
    vcpu.ring(command::APPLY);
    let before = vcpu.operations();
    vcpu.run(300);
    assert_eq!(vcpu.operations(), before + 2, "read, set what is left");
    vcpu.run(1000);
    assert_eq!(vcpu.operations(), before + 3, "set the period");
    vcpu.run(98_000);
    assert_eq!(vcpu.word(word::overflows(nth(0))), 100);
    assert_eq!(vcpu.operations(), before + 3);
    vcpu.ring(command::READ);
    let counted = vcpu.host.read(nth(0));
    assert_eq!(vcpu.count_of(0), counted, "no event is lost");
}

/// Checks a host whose timer gains on its count, as a clock that adjtimex(2) has made fast. A guest that has its samples for
/// a day, and then counts, would have nothing counted for long.
#[test]
fn a_timer_that_gains_on_the_count_takes_the_count_ahead_by_less_than_a_period() {
    const PERIOD: u64 = 1000;
    let mut vcpu = Vcpu::new(Host {
        timer_gains_in: 73,
        ..repeating()
    });
    sampling(&mut vcpu, PERIOD);
    let before = vcpu.operations();
    for _ in 0..1000 {
        vcpu.run(PERIOD);
        vcpu.handle();
        vcpu.ring(command::READ);
        let ahead = vcpu.count_of(0).saturating_sub(vcpu.host.read(nth(0)));
        assert!(ahead < PERIOD, "{ahead} events that have not been");
    }
    let asked = vcpu.operations() - before - 1000;
    assert!(asked < 100, "{asked} beside the reads of the doorbells");
}

/// Checks a driver's work at a context switch: all events go away, then all events of the next task
/// come.
#[test]
fn a_context_switch_is_two_doorbells_and_makes_no_event() {
    for counters in [1, 4] {
        let mut vcpu = Vcpu::new(repeating());
        counting(&mut vcpu, counters);
        let creates = vcpu.device.statistics().creates;
        let before = vcpu.operations();
        for n in 1..=10 {
            vcpu.run(50);
            vcpu.ring(command::FREEZE);
            vcpu.run(1000);
            for counter in 0..counters {
                assert_eq!(vcpu.count_of(counter), 50, "switch {n}");
            }
            counting(&mut vcpu, counters);
        }
        assert_eq!(vcpu.device.statistics().creates, creates);
        assert_eq!(
            (vcpu.operations() - before) / 10,
            2 + u64::from(counters),
            "pause, read each, resume"
        );
    }
}

#[test]
fn a_guest_that_wants_nothing_costs_nothing() {
    let mut vcpu = Vcpu::new(repeating());
    vcpu.run(1000);
    vcpu.device.put(&mut vcpu.host, Some(&vcpu.page));
    vcpu.device.load(&mut vcpu.host, Some(&vcpu.page));
    vcpu.device.end_slice(&mut vcpu.host, Some(&vcpu.page));
    vcpu.ring(command::READ);
    assert_eq!(vcpu.operations(), 0);
}

/// Checks that a preempted vCPU that samples is not programmed anew.
#[test]
fn a_put_and_load_sets_no_period() {
    let mut vcpu = Vcpu::new(repeating());
    sampling(&mut vcpu, 1000);
    vcpu.run(300);
    let before = vcpu.device.statistics().set_periods;
    vcpu.device.put(&mut vcpu.host, Some(&vcpu.page));
    vcpu.device.load(&mut vcpu.host, Some(&vcpu.page));
    vcpu.run(1700);
    assert_eq!(vcpu.word(word::overflows(nth(0))), 2);
    assert_eq!(vcpu.device.statistics().set_periods, before);
}
