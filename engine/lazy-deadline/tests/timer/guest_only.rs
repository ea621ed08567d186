//! What is known to go wrong in the guest-only mode, case by case.

use lazy_deadline::{GuestCpu, GuestOnlyTimer, Interrupt, Request};

/// A CPU with a real IA32_TSC_DEADLINE.
#[derive(Default)]
struct Bare {
    tsc: u64,
    msr: u64,
    writes: u64,
}

impl GuestCpu for Bare {
    fn tsc(&mut self) -> u64 {
        self.tsc
    }
    fn write_deadline(&mut self, deadline: u64) {
        self.msr = deadline;
        self.writes += 1;
    }
}

#[test]
fn guest_only_arms_again_at_the_early_interrupt() {
    let mut cpu = Bare::default();
    let mut timer = GuestOnlyTimer::new();
    assert_eq!(timer.set(100, &mut cpu), Request::Written);
    assert_eq!(timer.set(300, &mut cpu), Request::Avoided);
    assert_eq!(timer.deadline(), 300);
    cpu.tsc = 100;
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Early);
    assert_eq!((cpu.msr, cpu.writes), (300, 2));
    cpu.tsc = 301;
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Run);
    assert_eq!(timer.deadline(), 0);
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Stray);
}

#[test]
fn guest_only_does_not_wait_for_an_interrupt_that_was_lost() {
    let mut cpu = Bare::default();
    let mut timer = GuestOnlyTimer::new();
    let _ = timer.set(100, &mut cpu);
    // The LVT was masked when it came due.
    cpu.tsc = 200;
    assert_eq!(timer.set(300, &mut cpu), Request::Written);
    assert_eq!(cpu.msr, 300);
}

#[test]
fn guest_only_forgets_over_sleep() {
    let mut cpu = Bare::default();
    let mut timer = GuestOnlyTimer::new();
    let _ = timer.set(1_000, &mut cpu);
    timer.forget();
    cpu.tsc = 5;
    assert_eq!(timer.set(2_000, &mut cpu), Request::Written);
}

#[test]
fn guest_only_takes_over_what_is_armed() {
    let mut cpu = Bare {
        msr: 500,
        ..Bare::default()
    };
    let mut timer = GuestOnlyTimer::adopt(500);
    assert_eq!(timer.set(700, &mut cpu), Request::Avoided);
    cpu.tsc = 500;
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Early);
    assert_eq!(cpu.msr, 700);
    let mut timer = GuestOnlyTimer::adopt(500);
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Run);
}

#[test]
fn guest_only_cancels_without_an_exit_and_disarms_with_one() {
    let mut cpu = Bare::default();
    let mut timer = GuestOnlyTimer::new();
    let _ = timer.set(100, &mut cpu);
    timer.cancel();
    cpu.tsc = 100;
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Stray);
    let _ = timer.set(200, &mut cpu);
    assert_eq!(timer.set(0, &mut cpu), Request::Written);
    assert_eq!((cpu.msr, timer.deadline()), (0, 0));
    assert_eq!(timer.statistics().exits(), 3);
}

#[test]
fn an_interrupt_on_its_way_is_one_too_many() {
    let mut cpu = Bare::default();
    let mut timer = GuestOnlyTimer::new();
    let _ = timer.set(100, &mut cpu);
    // It fires with interrupts off, and then the deadline is moved.
    cpu.tsc = 110;
    assert_eq!(timer.set(300, &mut cpu), Request::Written);
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Early);
    assert_eq!(cpu.msr, 300);
    cpu.tsc = 300;
    assert_eq!(timer.interrupt(&mut cpu), Interrupt::Run);
}

/// KVM's timer runs on the host's clock, which is steered: against the TSC it may be early. The
/// register is disarmed then, although its time is still to come.
#[test]
fn guest_only_on_a_host_that_is_early() {
    for wanted in [100, 300] {
        let mut cpu = Bare::default();
        let mut timer = GuestOnlyTimer::new();
        let _ = timer.set(100, &mut cpu);
        if wanted == 300 {
            assert_eq!(timer.set(300, &mut cpu), Request::Avoided);
        }
        cpu.tsc = 99;
        cpu.msr = 0;
        assert_eq!(timer.interrupt(&mut cpu), Interrupt::Early);
        assert_eq!(cpu.msr, wanted, "armed again, not waited for");
        cpu.tsc = wanted;
        assert_eq!(timer.interrupt(&mut cpu), Interrupt::Run);
    }
}
