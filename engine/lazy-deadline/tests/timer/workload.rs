//! How many exits are left, in the patterns that operating systems make. The figures are counts of
//! a model, the same on every machine; `-- --nocapture` prints them.

use std::ops::ControlFlow;

use crate::machine::Vm;
use lazy_deadline::{GuestCpu, GuestOnlyTimer, Interrupt};

/// TSC ticks in a microsecond, and in a tick of a kernel with HZ = 250.
const US: u64 = 2_000;
const TICK: u64 = 4_000 * US;

/// What a clock event driver offers its kernel, whatever is below it.
trait Driver {
    fn now(&self) -> u64;
    fn set(&mut self, deadline: u64);
    /// Lets time pass to `to`, or to the next run of the handler.
    fn run(&mut self, to: u64) -> ControlFlow<()>;
    fn figures(&self) -> Figures;
}

#[derive(Debug, Default, PartialEq)]
struct Figures {
    /// Exits for writing a deadline.
    exits: u64,
    /// Handlers run.
    handlers: u64,
    /// Interrupts, and with them wake-ups, that ran no handler.
    early: u64,
    /// Expiries that the host dealt with on its own.
    moved: u64,
}

#[derive(Default)]
struct Plain {
    now: u64,
    deadline: u64,
    figures: Figures,
}

impl Driver for Plain {
    fn now(&self) -> u64 {
        self.now
    }
    fn set(&mut self, deadline: u64) {
        self.deadline = deadline;
        self.figures.exits += 1;
    }
    fn run(&mut self, to: u64) -> ControlFlow<()> {
        if self.deadline != 0 && self.deadline <= to {
            self.now = self.now.max(self.deadline);
            self.deadline = 0;
            self.figures.handlers += 1;
            return ControlFlow::Break(());
        }
        self.now = to;
        ControlFlow::Continue(())
    }
    fn figures(&self) -> Figures {
        Figures { ..self.figures }
    }
}

impl Driver for Vm {
    fn now(&self) -> u64 {
        Vm::now(self)
    }
    fn set(&mut self, deadline: u64) {
        let _ = Vm::set(self, deadline);
    }
    fn run(&mut self, to: u64) -> ControlFlow<()> {
        let before = self.host.injected.len();
        while self.host.injected.len() == before {
            let next = self.host.clock.armed.unwrap_or(u64::MAX).max(self.now());
            if next > to {
                self.host.advance(to, self.slot.words());
                return ControlFlow::Continue(());
            }
            self.host.advance(next, self.slot.words());
        }
        ControlFlow::Break(())
    }
    fn figures(&self) -> Figures {
        let statistics = self.host.timer.statistics();
        assert_eq!(statistics.writes, self.guest.statistics().exits());
        Figures {
            exits: statistics.writes,
            handlers: statistics.injected,
            early: 0,
            moved: statistics.moved,
        }
    }
}

#[derive(Default)]
struct Register {
    now: u64,
    msr: u64,
}

impl GuestCpu for Register {
    fn tsc(&mut self) -> u64 {
        self.now
    }
    fn write_deadline(&mut self, deadline: u64) {
        self.msr = deadline;
    }
}

#[derive(Default)]
struct GuestOnly {
    cpu: Register,
    timer: GuestOnlyTimer,
    handlers: u64,
}

impl Driver for GuestOnly {
    fn now(&self) -> u64 {
        self.cpu.now
    }
    fn set(&mut self, deadline: u64) {
        let _ = self.timer.set(deadline, &mut self.cpu);
    }
    fn run(&mut self, to: u64) -> ControlFlow<()> {
        while self.cpu.msr != 0 && self.cpu.msr <= to {
            self.cpu.now = self.cpu.now.max(self.cpu.msr);
            self.cpu.msr = 0;
            if self.timer.interrupt(&mut self.cpu) == Interrupt::Run {
                self.handlers += 1;
                return ControlFlow::Break(());
            }
        }
        self.cpu.now = to;
        ControlFlow::Continue(())
    }
    fn figures(&self) -> Figures {
        let statistics = self.timer.statistics();
        Figures {
            exits: statistics.exits(),
            handlers: self.handlers,
            early: statistics.early,
            moved: 0,
        }
    }
}

/// A dynticks kernel: its tick while it runs, its next timer while it is idle.
struct Kernel<'a> {
    driver: &'a mut dyn Driver,
    tick: u64,
    idle: bool,
    random: u64,
}

impl Kernel<'_> {
    fn random(&mut self, range: std::ops::Range<u64>) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        range.start + self.random % (range.end - range.start)
    }

    fn pass(&mut self, ticks: u64) {
        let to = self.driver.now() + ticks;
        while self.driver.run(to).is_break() {
            self.tick = self.tick.max(self.driver.now() / TICK * TICK + TICK);
            let deadline = self.tick + if self.idle { 20 * TICK } else { 0 };
            self.driver.set(deadline);
        }
    }

    fn idle(&mut self, ticks: u64) {
        // The tick is stopped: the next timer is somewhere between one and 250 ticks away.
        self.idle = true;
        let next = self.tick + self.random(1..250) * TICK;
        self.driver.set(next);
        self.pass(ticks);
        self.idle = false;
        self.tick = self.driver.now() / TICK * TICK + TICK;
        self.driver.set(self.tick);
    }
}

/// A request and a response between two vCPUs that go idle in between (netperf TCP_RR).
fn ping_pong(driver: &mut dyn Driver) {
    let mut kernel = Kernel::on(driver);
    for _ in 0..100_000 {
        let work = kernel.random(3 * US..15 * US);
        kernel.pass(work);
        let wait = kernel.random(5 * US..40 * US);
        kernel.idle(wait);
    }
}

/// A CPU that never idles: a tick, and nothing to save.
fn busy(driver: &mut dyn Driver) {
    let mut kernel = Kernel::on(driver);
    for _ in 0..10_000 {
        kernel.pass(TICK / 10);
    }
}

/// Long sleeps, of some milliseconds: the timer expires in most of them.
fn long_idle(driver: &mut dyn Driver) {
    let mut kernel = Kernel::on(driver);
    for _ in 0..10_000 {
        kernel.pass(50 * US);
        let wait = kernel.random(TICK..5 * TICK);
        kernel.idle(wait);
    }
}

impl<'a> Kernel<'a> {
    fn on(driver: &'a mut dyn Driver) -> Self {
        let tick = driver.now() / TICK * TICK + TICK;
        driver.set(tick);
        Self {
            driver,
            tick,
            idle: false,
            random: 0x2545_f491_4f6c_dd1d,
        }
    }
}

fn measure(name: &str, workload: fn(&mut dyn Driver)) -> [Figures; 3] {
    let mut vm = Vm::new();
    vm.host.clock.tsc = 0;
    let mut drivers: [Box<dyn Driver>; 3] = [
        Box::new(Plain::default()),
        Box::new(vm),
        Box::new(GuestOnly::default()),
    ];
    let figures = drivers.each_mut().map(|driver| {
        workload(&mut **driver);
        driver.figures()
    });
    for (mode, f) in ["plain", "paravirtual", "guest-only"].iter().zip(&figures) {
        let gone = 100.0 - 100.0 * f.exits as f64 / figures[0].exits as f64;
        eprintln!(
            "{name:>10} {mode:>11}: {:>7} exits ({gone:5.1}% gone), {:>6} handlers, {:>6} early, \
             {:>6} moved by the host",
            f.exits, f.handlers, f.early, f.moved
        );
    }
    figures
}

#[test]
fn ping_pong_keeps_few_exits() {
    let [plain, paravirtual, guest_only] = measure("ping-pong", ping_pong);
    assert_eq!(plain.exits, 200_000 + 1 + plain.handlers);
    assert_eq!(paravirtual.handlers, plain.handlers);
    assert_eq!(guest_only.handlers, plain.handlers);
    for lazy in [&paravirtual, &guest_only] {
        assert!(lazy.exits * 40 <= plain.exits, "97.5% gone: {lazy:?}");
    }
}

#[test]
fn a_busy_cpu_loses_nothing() {
    let [plain, paravirtual, guest_only] = measure("busy", busy);
    assert_eq!(plain.exits, paravirtual.exits);
    assert_eq!(plain.exits, guest_only.exits);
    assert_eq!((guest_only.early, paravirtual.moved), (0, 0));
}

#[test]
fn long_sleeps_cost_no_more_than_before() {
    let [plain, paravirtual, guest_only] = measure("long idle", long_idle);
    assert_eq!(paravirtual.handlers, plain.handlers);
    assert_eq!(guest_only.handlers, plain.handlers);
    assert!(paravirtual.exits <= plain.exits);
    assert!(guest_only.exits <= plain.exits);
}
