//! Runs beside another guest on the same CPU.
//!
//! `test=storm` does all that might disturb the other guest: random values for the PMU, interrupts of every kind and of the
//! most urgent priority, short waits, and accesses to memory that is not the program's (`addr=A`, the other's). On a
//! second CPU it writes to the redistributors of all others. `test=switch.NAME` leaves the PMU as NAME says and computes
//! while the CPU goes from guest to guest (`ms=N`), or while the monitor borrows counters (`switch.borrow`). It rings the
//! monitor's doorbell at the begin and the end, where the device tree has one.

use super::{ASK, Context, DONE, Test, keeps};
use crate::encoding::*;
use crate::gic::{self, Gic};
use crate::loops::{interruptible, spin, wait_for_interrupt};
use crate::machine::Machine;
use crate::mmio::{fault_of, write32, write64};
use crate::pmu::{self, PMCR_E, PMCR_LC, Pmu, event, write};
use crate::{cell, percpu, psci};
use vpmu_payload_harness::{BootArgs, Failure, Pass, Text, Verdict, check, check_range};

pub(super) const STORM: &[Test] = &[("storm", storm)];
/// A test that begins on a CPU whose PMU the program has not touched: its name and function.
type Switch = (&'static str, fn(&Machine<'_>) -> Verdict);

pub(super) const SWITCH: &[Switch] = &[
    ("switch.unused", |machine| compute(machine, || Ok(false))),
    ("switch.stopped", |machine| compute(machine, stopped)),
    ("switch.one", |machine| compute(machine, || count(|_| 1))),
    ("switch.all", |machine| {
        compute(machine, || count(Pmu::mask))
    }),
    ("switch.borrow", |machine| {
        borrow(0, |value| ring(machine, value))
    }),
    ("switch.borrow_elsewhere", |machine| lend(machine, 0)),
    ("switch.borrow_before", |machine| lend(machine, 1)),
    ("switch.registers", keeps::keep),
    ("switch.sleep", sleep),
    ("switch.ring_asleep", ring_asleep),
];

/// Rounds of a storm: some 200 ms of a CPU that a guest has to itself.
const ROUNDS: u32 = 1_000;
/// Milliseconds in which the CPU computes, unless the command line says how many.
const COMPUTES: u64 = 250;

/// Numbers that look random (George Marsaglia's xorshift64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Registers that a storm writes. Those that do not exist raise an exception, which is skipped.
const REGISTERS: [Encoding; 13] = [
    PMCR_EL0,
    PMCNTENSET_EL0,
    PMCNTENCLR_EL0,
    PMOVSSET_EL0,
    PMOVSCLR_EL0,
    PMINTENSET_EL1,
    PMINTENCLR_EL1,
    PMSELR_EL0,
    PMXEVTYPER_EL0,
    PMXEVCNTR_EL0,
    PMCCNTR_EL0,
    PMUSERENR_EL0,
    PMSWINC_EL0,
];

fn storm(cx: &Context) -> Verdict {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let stray = BootArgs::parse(cx.machine.bootargs).address;
    if cx.machine.cpu_count > 1 {
        let entry = crate::entry::secondary_address();
        psci::cpu_on(cx.machine.cpus[1], entry, 1);
    }
    for round in 0..ROUNDS {
        percpu::this().reset();
        for register in REGISTERS {
            // Whatever comes of it.
            let _ = cell::write(register, random.next());
        }
        for n in 0..31 {
            let _ = cell::write(pmevcntr(n), !0 - random.next() % 1_000);
            let _ = cell::write(pmevtyper(n), random.next());
        }
        cx.gic.set_priority(cx.machine.pmi, 0);
        cx.gic.enable(cx.machine.pmi);
        for sgi in 0..8 {
            cx.gic.set_priority(sgi, 0);
            cx.gic.enable(sgi);
            gic::send(sgi, gic::affinity());
        }
        if let Some(address) = stray {
            let address = (address + random.next() % (64 << 20)) & !3;
            let fault = fault_of(|| write32(address, !0));
            if fault.is_none_or(|fault| !fault.is_external()) {
                return Err(Failure(Text::new(format_args!(
                    "{address:#x} was written in round {round} ({fault:?})"
                ))));
            }
        }
        if round % 8 == 0 {
            storm_of_devices(cx.machine.distributor);
        }
        cell::write(PMINTENCLR_EL1, !0)?;
        interruptible(|| spin(1_000));
        // No interrupt of any group, that which ends this guest's turn included.
        write32(cx.machine.distributor, 0x10);
        spin(100_000);
        write32(cx.machine.distributor, 0x13);
        cx.gic.enable(cx.machine.timer);
        gic::start_timer(random.next() % 20_000);
        wait_for_interrupt();
        interruptible(|| spin(100));
        gic::stop_timer();
        cell::write(PMOVSCLR_EL0, !0)?;
    }
    Ok(Pass::Ok)
}

/// Takes the interrupts of all devices: sends them nowhere, off, most and least urgent, and lost where they are pending.
fn storm_of_devices(distributor: u64) {
    const SETSPI: u64 = 0x40;
    const ICENABLER: u64 = 0x180;
    const ISPENDR: u64 = 0x200;
    const ICPENDR: u64 = 0x280;
    const ISACTIVER: u64 = 0x300;
    const ICACTIVER: u64 = 0x380;
    const IPRIORITYR: u64 = 0x400;
    const IROUTER: u64 = 0x6000;
    const LAST: u32 = 64;
    for intid in 32..LAST {
        write64(distributor + IROUTER + 8 * u64::from(intid), 0xff_ffff);
        write32(distributor + SETSPI, intid);
    }
    for n in (32..u64::from(LAST)).step_by(4) {
        write32(distributor + IPRIORITYR + n, 0);
        write32(distributor + IPRIORITYR + n, !0);
    }
    for register in [ICENABLER, ISPENDR, ICPENDR, ISACTIVER, ICACTIVER] {
        write32(distributor + register + 4, !0);
    }
}

/// On another CPU: switches all private interrupts of the first one off, and makes them pending, again and again.
pub(super) fn storm_at(gic: Gic) -> ! {
    const FRAMES: u64 = 0x2_0000;
    const ICENABLER0: u64 = 0x180;
    const ISPENDR0: u64 = 0x200;
    const ICPENDR0: u64 = 0x280;
    const ICACTIVER0: u64 = 0x380;
    const IPRIORITYR: u64 = 0x400;
    let first = gic.private() - FRAMES;
    loop {
        for register in [ICENABLER0, ISPENDR0, ICPENDR0, ICACTIVER0] {
            write32(first + register, !0);
        }
        for n in (0..32).step_by(4) {
            write32(first + IPRIORITYR + n, !0);
        }
        spin(1_000);
    }
}

/// Has the PMU count for a while, and stops it.
fn stopped() -> Result<bool, Failure> {
    count(Pmu::mask)?;
    spin(1_000);
    write(PMCR_EL0, PMCR_LC)?;
    write(PMCNTENCLR_EL0, !0)?;
    Ok(false)
}

/// Has counters count. Returns that counter 0 does.
fn count(counters: fn(&Pmu) -> u64) -> Result<bool, Failure> {
    let pmu = Pmu::identify()?;
    pmu.reset()?;
    for n in 0..pmu.counters {
        pmu.set_up(n, event::INST_RETIRED.into(), 0)?;
    }
    write(PMCR_EL0, PMCR_E | PMCR_LC)?;
    write(PMCNTENSET_EL0, counters(&pmu))?;
    Ok(true)
}

/// Computes while the PMU is as `prepare` leaves it. Counter 0, where it counts, has counted this program's instructions alone.
fn compute(machine: &Machine<'_>, prepare: fn() -> Result<bool, Failure>) -> Verdict {
    let counts = prepare()?;
    let arguments = BootArgs::parse(machine.bootargs);
    let milliseconds = arguments.milliseconds.unwrap_or(COMPUTES);
    let end = gic::now() + gic::timer_frequency() / 1_000 * milliseconds;
    ring(machine, 1);
    let mut rounds = 0;
    while gic::now() < end {
        spin(10_000);
        rounds += 10_000;
    }
    ring(machine, 2);
    if counts {
        let counted = pmu::read(pmevcntr(0))?;
        // Two instructions a round, and few beside them.
        let error = counted.abs_diff(2 * rounds) * 1_000 / counted.max(1);
        check(
            format_args!("thousandths of {counted} instructions too many"),
            error,
            0,
        )?;
    }
    Ok(Pass::Ok)
}

/// Instructions of a host's sample on another CPU, at the most. QEMU counts instructions of all CPUs as each one's.
const SAMPLES: u64 = 700;

/// Sleeps (`ms=N`): no instruction until the timer.
fn sleep(machine: &Machine<'_>) -> Verdict {
    let gic = Gic::for_this_cpu(machine);
    let milliseconds = BootArgs::parse(machine.bootargs).milliseconds;
    let ticks = gic::timer_frequency() / 1_000 * milliseconds.unwrap_or(COMPUTES);
    gic.enable(machine.timer);
    gic::start_timer(ticks);
    while !gic::timer_fired() {
        wait_for_interrupt();
    }
    gic::stop_timer();
    interruptible(|| spin(1_000));
    Ok(Pass::Ok)
}

/// Has CPU 1 ring the doorbell while this CPU sleeps.
fn ring_asleep(machine: &Machine<'_>) -> Verdict {
    if machine.cpu_count < 2 {
        return Ok(Pass::Skip("one CPU"));
    }
    Gic::for_this_cpu(machine).enable(DONE);
    let cpu = percpu::this();
    cpu.reset();
    let answer = psci::cpu_on(machine.cpus[1], crate::entry::secondary_address(), 1);
    check("CPU_ON", answer as u64, 0)?;
    while cpu.taken(DONE) == 0 {
        wait_for_interrupt();
        interruptible(|| spin(1));
    }
    Ok(Pass::Ok)
}

/// On CPU 1: each ring of the doorbell is over in a millisecond of a clock that goes on while the boot CPU sleeps, where some
/// thousand instructions serve it.
fn ring_here(machine: &Machine<'_>) -> Verdict {
    // By now the boot CPU, and who shares it, sleep.
    spin(1_000_000);
    for value in [1, 2] {
        let begun = gic::now();
        ring(machine, value);
        let took = gic::now() - begun;
        let most = gic::timer_frequency() / 1_000;
        check_range(format_args!("ticks of ring {value}"), took, 1, most)?;
    }
    Ok(Pass::Ok)
}

/// Has CPU 1 run [`beside`], and rings the doorbell for it: `already` before that CPU starts.
fn lend(machine: &Machine<'_>, already: u32) -> Verdict {
    if machine.cpu_count < 2 {
        return Ok(Pass::Skip("one CPU"));
    }
    let gic = Gic::for_this_cpu(machine);
    gic.enable(DONE);
    gic.enable(ASK);
    let cpu = percpu::this();
    cpu.reset();
    (1..=already).for_each(|value| ring(machine, value));
    let answer = psci::cpu_on(machine.cpus[1], crate::entry::secondary_address(), 1);
    check("CPU_ON", answer as u64, 0)?;
    let mut asked = 0;
    // This CPU halts, so that its instructions do not count as the other's.
    while cpu.taken(DONE) == 0 {
        wait_for_interrupt();
        interruptible(|| spin(1));
        if cpu.taken(ASK) > asked {
            asked += 1;
            ring(machine, already + asked as u32);
            gic::send(ASK, machine.cpus[1]);
        }
    }
    check("times asked to ring", asked, 2 - u64::from(already))?;
    Ok(Pass::Ok)
}

/// On CPU 1: the test that the boot CPU waits for in [`lend`] or [`ring_asleep`].
pub(super) fn beside(machine: &Machine<'_>) -> Verdict {
    if BootArgs::parse(machine.bootargs).selects("switch.ring_asleep") {
        return ring_here(machine);
    }
    let gic = Gic::for_this_cpu(machine);
    gic.enable(ASK);
    let cpu = percpu::this();
    let ask = || {
        let answered = cpu.taken(ASK);
        gic::send(ASK, machine.cpus[0]);
        while cpu.taken(ASK) == answered {
            wait_for_interrupt();
            interruptible(|| spin(1));
        }
    };
    if BootArgs::parse(machine.bootargs).selects("switch.borrow_before") {
        return borrowed_before(ask);
    }
    borrow(2 * SAMPLES, |_| ask())
}

/// Checks a CPU that starts while the monitor has the highest event counter: it has as many as the others, and counts by that
/// one, too, once `give_back` has been called.
fn borrowed_before(give_back: impl FnOnce()) -> Verdict {
    count(Pmu::mask)?;
    let pmu = Pmu::identify()?;
    let last = pmu.counters - 1;
    spin(1_000_000);
    let value = pmu.value(last)?;
    check(format_args!("counter {last}"), value, 0)?;
    check_range(
        format_args!("counter {}", last - 1),
        pmu.value(last - 1)?,
        2_000_000,
        2_000_000 + 20 * SAMPLES,
    )?;
    give_back();
    let counters = Pmu::identify()?.counters;
    check("PMCR_EL0.N", counters.into(), pmu.counters.into())?;
    let before = pmu.value(last)?;
    spin(10_000);
    let counted = pmu.value(last)? - before;
    check_range("given back", counted, 20_000, 20_100)?;
    Ok(Pass::Ok)
}

/// Checks what the PMU is while the monitor has the highest event counter, from one doorbell to the other: as many counters,
/// the others exact, the registers of that one as they were left, and its value where it stood. `ring` has the doorbell rung.
/// `others` is how many instructions another CPU executes meanwhile.
fn borrow(others: u64, ring: impl Fn(u32)) -> Verdict {
    count(Pmu::mask)?;
    let pmu = Pmu::identify()?;
    let last = pmu.counters - 1;
    let delta = |n: u8| {
        let before = pmu.value(n)?;
        spin(10_000);
        Ok::<_, Failure>(pmu.value(n)? - before)
    };
    let most = 20_100 + others;
    let few = |n: u8| check_range(format_args!("counter {n}"), delta(n)?, 20_000, most);
    few(last)?;
    ring(1);
    let counters = Pmu::identify()?.counters;
    check("PMCR_EL0.N", counters.into(), pmu.counters.into())?;
    check(format_args!("counter {last}"), delta(last)?, 0)?;
    (0..last).try_for_each(few)?;
    check("PMCNTENSET_EL0", pmu::read(PMCNTENSET_EL0)?, pmu.mask())?;
    write(pmevcntr(last), 0x1234)?;
    write(pmevtyper(last), event::CPU_CYCLES.into())?;
    check("its value", pmu::read(pmevcntr(last))?, 0x1234)?;
    let kind = pmu::read(pmevtyper(last))?;
    check("its event", kind, event::CPU_CYCLES.into())?;
    spin(1_000_000);
    ring(2);
    check_range(
        "given back",
        pmu::read(pmevcntr(last))?,
        0x1234,
        0x1234 + 1_000,
    )?;
    few(last)?;
    few(0)?;
    Ok(Pass::Ok)
}

fn ring(machine: &Machine<'_>, value: u32) {
    if let Some(doorbell) = machine.doorbell {
        write32(doorbell, value);
    }
}
